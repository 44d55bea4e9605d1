"""Wrong values that no file shows: mismatched processes, flipped bits on devices."""

import hashlib
import json
import pathlib
import random

from tools.faults.run import START_SEC, Broken, Run
from tools.faults.worker import FLIP, FLIPPED

FLIP_SEC = 90.0
"""Limit on the time from a flipped bit to the end of all processes. The next save, and
with it the next check, is at most six steps away; steps may be replayed after it."""
MISMATCHES = (
    "Optimizer.learning_rate = 1e-2",
    "Optimizer.weight_decay = 0.2",
    "Model.norm_eps = 1e-5",
    "Data.seed = 7",
    "Train.seed = 7",
    "Checkpoint.every_steps = 5",
    "Data.corpus = '{other}'",
)


def mismatch(run: Run, rng: random.Random) -> None:
    """Start with another value on one process: all end with 2 before the first step,
    and nothing that was written changes."""
    index = rng.randrange(run.num_processes)
    binding = rng.choice(MISMATCHES).format(other=run.place.speeds.parent / "other")
    before = _written(run.place.run_dir)
    run.start(f"{index}:{binding}")
    run.expect_end(2, START_SEC)
    if _written(run.place.run_dir) != before:
        raise Broken(f"{binding} on process {index} changed what was written")
    name = binding.split(" ")[0].partition(".")[2]
    if name not in run.error():
        raise Broken(f"the line does not name {name}: {run.error()[:300]}")


def flip_bit(run: Run, rng: random.Random) -> None:
    """Flip a bit of one copy of a replicated parameter: the run ends with 3, and names
    leaf and device. Only bits that a sum cannot round away are flipped."""
    run.pids()
    order = {
        "process": rng.randrange(run.num_processes),
        "device": rng.randrange(8),
        "leaf": rng.randrange(1000),
        "element": rng.randrange(10**6),
        "bit": rng.randrange(16, 30),
    }
    folder = run.place.orders
    (folder / "order").write_text(json.dumps(order))
    (folder / "order").rename(folder / FLIP)
    done = folder / FLIPPED
    run.wait_until(done.exists, "a flipped bit", START_SEC)
    run.expect_end(3, FLIP_SEC)
    flipped = json.loads(done.read_text())
    done.unlink()
    words = flipped["leaf"].rpartition("/")[2], f"device {flipped['device']} "
    if not all(word in run.error() for word in words):
        raise Broken(f"the line names not both {words}: {run.error()[:300]}")


def _written(run_dir: pathlib.Path) -> dict[str, str]:
    """Return the sha256 of each file that a run has written, logs and lock left out."""
    paths = [p for p in run_dir.rglob("*") if p.is_file() and p.name != ".lock"]
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.parent.name != "logs"
    }
