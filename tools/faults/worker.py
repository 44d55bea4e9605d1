"""Run train/main.py as usual, at a slower pace, and obey orders to disturb the run.

tools/chaos.py starts this program instead of train/main.py, so that the product needs
no hooks. Three environment variables give its orders:

    MOEJAX_CHAOS_ORDERS      folder in which an order may appear: to flip a bit, or to
                             die in the next save
    MOEJAX_CHAOS_PACE_SEC    seconds that each step waits, so that faults hit every part
                             of a run that would last two seconds
    MOEJAX_CHAOS_PARAM       'index:binding', a gin binding for one process alone
"""

import json
import os
import pathlib
import signal
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder's modules are tools.x, never top-level names

from train import main  # noqa: E402
from train.launch.cluster import PROCESS_ID  # noqa: E402
from train.launch.program import end  # noqa: E402

ORDERS, PACE, PARAM = (f"MOEJAX_CHAOS_{x}" for x in ("ORDERS", "PACE_SEC", "PARAM"))
ORDER, DONE = "order.json", "done.json"
"""An order to one process, and its report that it obeys."""
FLIP, DIE_IN_SAVE = "flip", "die in save"


def start_and_disturb(cfg) -> None:
    """Do what main.start does, and put wrappers around the function that the training
    loop calls before each step, and around the start of a save. jax, which they import,
    has its flags by then."""
    start(cfg)
    from orbax.checkpoint import AsyncCheckpointer

    from train.balance.balancing import Balancing

    before, save = Balancing.before, AsyncCheckpointer.save
    pace_sec = float(os.environ[PACE])

    def before_slowly(self, step: int, state):
        time.sleep(pace_sec)
        state = before(self, step, state)
        if order := take_order(FLIP):
            leaf, device, state = flip(state, order)
            report(order | {"leaf": leaf, "device": device, "step": step})
        return state

    def save_and_die(self, path: pathlib.Path, *words, **named):
        save(self, path, *words, **named)
        if order := take_order(DIE_IN_SAVE):
            report(order | {"step": int(path.name)})
            os.kill(os.getpid(), signal.SIGKILL)

    Balancing.before, AsyncCheckpointer.save = before_slowly, save_and_die


def take_order(kind: str) -> dict:
    """Return the order of this kind to this process, and remove it; {} if there is
    none."""
    import jax

    path = pathlib.Path(os.environ[ORDERS]) / ORDER
    try:
        order = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    if (order["kind"], order["process"]) != (kind, jax.process_index()):
        return {}
    path.unlink()
    return order


def report(done: dict) -> None:
    """Write that an order is obeyed."""
    folder = pathlib.Path(os.environ[ORDERS])
    (folder / "report").write_text(json.dumps(done))
    (folder / "report").rename(folder / DONE)


def flip(state, order: dict):
    """Flip a bit of one copy of a replicated parameter in a training state.

    Returns the name of the leaf, the id of the copy's device, and the new state. The
    numbers `leaf`, `device` and `element` of the order count modulo what there is.
    """
    import jax
    import numpy as np

    from train.checkpoint.checksum import named_leaves

    names = [
        name
        for name, leaf in named_leaves(state).items()
        if name.startswith("params")
        and leaf.dtype == "float32"
        and leaf.sharding.is_fully_replicated
        and leaf.size > 1
    ]
    chosen = names[order["leaf"] % len(names)]
    leaf = named_leaves(state)[chosen]
    parts = [shard.data for shard in leaf.addressable_shards]
    wrong = order["device"] % len(parts)
    host = np.array(parts[wrong])
    words = host.reshape(-1).view(np.uint32)
    words[order["element"] % words.size] ^= np.uint32(1 << order["bit"])
    device = parts[wrong].device
    parts[wrong] = jax.device_put(host, device)
    copy = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    state = jax.tree.map(lambda x: copy if x is leaf else x, state)
    return chosen, device.id, state


def obey_param() -> None:
    """Add the binding of MOEJAX_CHAOS_PARAM to the arguments of the process that it
    names."""
    index, _, binding = os.environ.get(PARAM, "").partition(":")
    if binding and os.environ.get(PROCESS_ID) == index:
        sys.argv.append(f"--gin_param={binding}")


if __name__ == "__main__":
    start, main.start = main.start, start_and_disturb
    obey_param()
    sys.exit(end(main.main()))
