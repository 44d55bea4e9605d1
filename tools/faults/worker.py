"""Run train/main.py as usual, at a slower pace, and obey orders to disturb the run.

tools/chaos.py starts this program instead of train/main.py, so that the product needs
no hooks. Three environment variables give its orders:

    MOEJAX_CHAOS_ORDERS      folder in which an order to flip a bit appears (FLIP)
    MOEJAX_CHAOS_PACE_SEC    seconds that each step waits, so that faults hit every part
                             of a run that would last two seconds
    MOEJAX_CHAOS_PARAM       'index:binding', a gin binding for one process alone
"""

import json
import os
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder's modules are tools.x, never top-level names

from train import main  # noqa: E402
from train.launch.cluster import PROCESS_ID  # noqa: E402
from train.launch.program import end  # noqa: E402

ORDERS, PACE, PARAM = (f"MOEJAX_CHAOS_{x}" for x in ("ORDERS", "PACE_SEC", "PARAM"))
FLIP, FLIPPED = "flip.json", "flipped.json"
"""An order to flip a bit, and the report that it has been done."""


def disturbed_run(cfg, args, process) -> int:
    """Do what main.run does, with a wrapper around the function that the training loop
    calls before each step. jax, which it imports, has its flags by now."""
    from train.balance.balancing import Balancing

    before = Balancing.before
    orders = pathlib.Path(os.environ[ORDERS])
    pace_sec = float(os.environ[PACE])

    def slower(self, step: int, state):
        time.sleep(pace_sec)
        return flip_if_ordered(orders, step, before(self, step, state))

    Balancing.before = slower
    return run(cfg, args, process)


def flip_if_ordered(orders: pathlib.Path, step: int, state):
    """Return the state, with one bit flipped if an order names this process."""
    try:
        order = json.loads((orders / FLIP).read_text())
    except FileNotFoundError:
        return state
    import jax

    if order["process"] != jax.process_index():
        return state
    name, device, state = flip(state, order)
    report = order | {"leaf": name, "device": device, "step": step}
    (orders / FLIP).unlink()
    (orders / FLIPPED).write_text(json.dumps(report))
    return state


def flip(state, order: dict):
    """Flip a bit of one copy of a replicated parameter in a training state.

    Returns the name of the leaf, the id of the copy's device, and the new state. The
    numbers `leaf`, `device` and `element` of the order count modulo what there is.
    """
    import jax

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
    shards = leaf.addressable_shards
    wrong = order["device"] % len(shards)
    parts = [shard.data for shard in shards]
    parts[wrong] = _flip_one(parts[wrong], order["element"], order["bit"])
    copy = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    state = jax.tree.map(lambda x: copy if x is leaf else x, state)
    return chosen, shards[wrong].device.id, state


def _flip_one(part, element: int, bit: int):
    """Return a single-device array with one bit of one float32 element flipped."""
    import jax
    import numpy as np

    host = np.array(part)
    words = host.reshape(-1).view(np.uint32)
    words[element % words.size] ^= np.uint32(1 << bit)
    return jax.device_put(host, part.device)


def obey_param() -> None:
    """Add the binding of MOEJAX_CHAOS_PARAM to the arguments of the process that it
    names."""
    index, _, binding = os.environ.get(PARAM, "").partition(":")
    if binding and os.environ.get(PROCESS_ID) == index:
        sys.argv.append(f"--gin_param={binding}")


if __name__ == "__main__":
    run, main.run = main.run, disturbed_run
    obey_param()
    sys.exit(end(main.main()))
