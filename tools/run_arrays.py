"""metrics.jsonl of a run as arrays, read line by line.

n training steps, m evaluations, q steps whose loads were recorded, layers l, experts e.
"""

import dataclasses
import json
import pathlib
import re

import numpy as np

from train.tensorboard import load_over_mean

MAX_LOADS = 800
"""So many tables of loads at most are kept: of a long run every second, fourth, .."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What metrics.jsonl holds; NaN where a figure is missing or was not finite."""

    name: str
    step_n: np.ndarray
    loss_n: np.ndarray
    tok_per_sec_n: np.ndarray
    step_msec_n: np.ndarray
    ratio_nl: np.ndarray
    """Load of the fullest expert over the mean."""
    eval_step_m: np.ndarray
    eval_loss_m: np.ndarray
    load_step_q: np.ndarray
    load_qle: np.ndarray
    """Load over mean where tokens_le was recorded."""
    save_every_steps: int | None
    """Of config.gin; None where there is none."""
    num_bad_lines: int


def read_run(folder: pathlib.Path) -> Run:
    """Line by line; a step that stands twice counts as it was written last.

    ValueError for a folder without a metrics.jsonl that holds at least one step, and
    for one in which most lines are damaged.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        what = "has no metrics.jsonl" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {what}: name the run directory of train/main.py")
    steps, evals, loads, stride, num_bad = {}, {}, {}, 1, 0
    with path.open("rb") as file:
        for line in file:
            record = _record(line)
            num_bad += record is None
            if record is None:
                continue
            step = record["step"]
            if "eval_loss" in record:
                evals[step] = _number(record["eval_loss"])
            if "loss" in record:
                steps[step] = _row(record)
            if "tokens_le" in record and step % stride == 0:
                load_le = _load(record["tokens_le"])
                num_bad += load_le is None
                if load_le is not None:
                    loads[step] = load_le
            while len(loads) > MAX_LOADS:  # so a long run fits in memory
                stride *= 2
                loads = {
                    step: kept for step, kept in loads.items() if step % stride == 0
                }
    if not steps:
        raise ValueError(
            f"{path} holds no training step ({num_bad} damaged lines): let the run "
            "make a step first"
        )
    if num_bad > len(steps) + len(evals):
        raise ValueError(
            f"{path} has {num_bad} damaged lines and {len(steps)} steps: it is no log "
            "of a run, or was overwritten"
        )
    return _as_arrays(folder, steps, evals, loads, num_bad)


def _record(line: bytes) -> dict | None:
    """None for a torn or damaged line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**53 else None


def _row(record: dict) -> np.ndarray:
    """Loss, throughput, step time, then the load max/mean of each layer."""
    ratio_l = record.get("load_max_over_mean")
    first = [record.get(name) for name in ("loss", "tok_per_sec", "step_msec")]
    row = [*first, *(ratio_l if isinstance(ratio_l, list) else [])]
    return np.array([_number(value) for value in row], np.float32)


def _number(value) -> float:
    """NaN for null, which stands for what was not finite, and for what is none."""
    return float(value) if isinstance(value, int | float) else np.nan


def _load(tokens_le) -> np.ndarray | None:
    """Load over mean [layer, expert]; None for what is no table of numbers."""
    try:
        load_le = np.asarray(tokens_le, np.float32)
    except (ValueError, TypeError):
        return None
    is_table = load_le.ndim == 2 and load_le.size and np.isfinite(load_le).all()
    return load_over_mean(load_le).astype(np.float32) if is_table else None


def _as_arrays(
    folder: pathlib.Path, steps: dict, evals: dict, loads: dict, num_bad: int
) -> Run:
    order = sorted(steps)
    width = max(row.size for row in steps.values())
    row_nx = np.full((len(order), width), np.nan, np.float32)
    for index, step in enumerate(order):
        row_nx[index, : steps[step].size] = steps[step]
    eval_steps, load_steps = sorted(evals), sorted(loads)
    if load_steps:
        shape = loads[load_steps[-1]].shape
        load_steps = [step for step in load_steps if loads[step].shape == shape]
    return Run(
        name=folder.resolve().name,
        step_n=np.array(order),
        loss_n=row_nx[:, 0],
        tok_per_sec_n=row_nx[:, 1],
        step_msec_n=row_nx[:, 2],
        ratio_nl=row_nx[:, 3:],
        eval_step_m=np.array(eval_steps, int),
        eval_loss_m=np.array([evals[step] for step in eval_steps]),
        load_step_q=np.array(load_steps, int),
        load_qle=np.array([loads[step] for step in load_steps]),
        save_every_steps=_save_every_steps(folder),
        num_bad_lines=num_bad,
    )


def _save_every_steps(folder: pathlib.Path) -> int | None:
    path = folder / "config.gin"
    text = path.read_text(errors="replace") if path.is_file() else ""
    found = re.search(r"^Checkpoint\.every_steps = (\d{1,9})$", text, re.MULTILINE)
    return int(found[1]) if found else None
