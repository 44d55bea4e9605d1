"""Make the folder of a run by hand, with all the files that a run writes."""

import json
import pathlib

import numpy as np

from tests.support.metrics_lines import DECISIONS, balanced_lines
from train.checkpoint.record import make_record
from train.logs.goodput import BUCKETS

CONFIG = """Balance.policy = 'eplb'

Moe.top_k = 2

Train.num_steps = 40
Train.run_dir = 'runs/a'
"""
PLAN = {"num_devices": 4, "slots_per_device": 3, "store": "resident"}


def account(step: int, attempt: int, at: float, **sec: float) -> dict:
    """Return a line of goodput.jsonl with these seconds; other buckets have none."""
    return {
        "step": step,
        "attempt": attempt,
        "at": at,
        "down_sec": 5.0 * (attempt - 1),
        "sec": dict.fromkeys(BUCKETS, 0.0) | sec,
    }


GOODPUT = [
    account(0, 1, 1e9, compile=4.0),
    account(30, 1, 1e9 + 20, compile=4.0, useful=15.0),
    account(20, 2, 1e9 + 26, compile=4.0, useful=10.0, restarts=6.0),
    account(40, 2, 1e9 + 40, compile=4.0, useful=20.0, restarts=6.0),
]
"""Two attempts, of which the second goes on from step 20."""
ATTEMPTS = [
    {"step": 0, "attempt": 1, "at": 1e9, "num_devices": 4},
    {"step": 20, "attempt": 2, "at": 1e9 + 25, "num_devices": 4},
]


def write_checkpoint_record(folder: pathlib.Path, step: int, meta: dict) -> None:
    """Write the record of a checkpoint without arrays into the folder of a run."""
    path = folder / "checkpoints" / str(step) / "record" / "metadata"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(make_record(step, {}, meta)))


def table(seed: int, num_layers: int = 3) -> np.ndarray:
    """Draw the slots of a plan: 8 experts in 12 slots, of which the last is empty."""
    rng = np.random.default_rng(seed)
    rows = [
        [*rng.permutation(8), *rng.integers(0, 8, 3), -1] for _ in range(num_layers)
    ]
    return np.array(rows)


PLANS = [
    {"step": 1, "kind": "start", "digest": "a", "slot_to_expert_lp": table(0).tolist(),
     "bytes": {"all_to_all": 1000}, **PLAN},
    {"step": 14, "kind": "swap", "digest": "b", "changed": [[0, 11, 5], [2, 0, 1]],
     **PLAN},
    {"step": 34, "kind": "relayout", "digest": "c",
     "slot_to_expert_lp": table(1).tolist(), **PLAN},
]  # fmt: skip


def make_folder(folder: pathlib.Path, **changes) -> pathlib.Path:
    """Make the folder of a balanced run of 40 steps that was stopped, with `changes` to
    its files: lines, or None for a file that is not there."""
    folder.mkdir(parents=True)
    files = {
        "metrics": balanced_lines(40, DECISIONS),
        "goodput": GOODPUT,
        "attempts": ATTEMPTS,
        "plans": PLANS,
    } | changes
    for name, lines in files.items():
        if lines is not None:
            text = "".join(
                (x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines
            )
            (folder / f"{name}.jsonl").write_text(text)
    (folder / "config.gin").write_text(CONFIG)
    (folder / "checkpoints" / "40").mkdir(parents=True)
    return folder


def finish(folder: pathlib.Path, step: int = 40) -> None:
    """Write the summary of a finished run."""
    summary = {"step": step, "eval_loss": 1.1, "load_le": [[1, 2]]}
    (folder / "summary.json").write_text(json.dumps(summary))
