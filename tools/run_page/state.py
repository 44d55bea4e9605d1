"""Tell how a run ended, or that it goes on, from the files of its folder.

The first of these that is true counts:

finished   summary.json is of the last step
running    no end of the last attempt is known, and a file grew in the last minute
empty      no step was written
crashed    attempts.jsonl says that an error has ended the last attempt
stopped    attempts.jsonl says so, or the newest checkpoint is of the last step
crashed    steps came after the newest checkpoint, and no file grew in the last minute
"""

import dataclasses
import os
import pathlib
import time
from typing import Literal

from train.checkpoint.record import list_steps

GROWTH_SEC = 60


@dataclasses.dataclass(frozen=True)
class RunState:
    """State of a run, and a sentence about it."""

    name: Literal["finished", "running", "stopped", "crashed", "empty"]
    text: str


def find_state(
    folder: pathlib.Path,
    step: int,
    num_steps: int | None,
    finished_step: int | None,
    end: dict,
) -> RunState:
    """Return the state of the run in `folder` after its last `step`.

    `num_steps` is what the configuration asks for, `finished_step` the step of
    summary.json, and `end` the line about the end of the last attempt, or {}.
    """
    of = f"step {step}" + (f" of {num_steps}" if num_steps else "")
    if finished_step is not None and finished_step >= max(step, num_steps or 0):
        return RunState("finished", f"finished after step {finished_step}")
    if not end and _grew_lately(folder):
        what = of if step else "no step yet"
        return RunState(
            "running", f"running: {what}; its files grew in the last minute"
        )
    has_failed = end.get("end") == "failed"
    why = f" by an error: {end.get('why')}" if has_failed else ""
    if not step:
        what = f"ended before its first step{why}" if end else "no step yet"
        return RunState("empty", what)
    saved = _newest_checkpoint(folder)
    if saved == step and not has_failed:
        text = f"stopped after {of}, which is saved: start it again to go on"
        return RunState("stopped", text)
    where = f"from step {saved}" if saved else "from the start, without a checkpoint"
    if not end:
        text = f"no sign of life since {of}: killed, or a step takes minutes"
    else:
        text = f"ended after {of}{why or ', unsaved'}"
    name = "stopped" if end and not has_failed else "crashed"
    return RunState(name, f"{text}; a new start goes on {where}")


def _grew_lately(folder: pathlib.Path) -> bool:
    """Return whether a file that a run appends to has changed in the last minute."""
    for name in ("metrics.jsonl", "goodput.jsonl", "config.gin"):
        try:
            age_sec = time.time() - os.stat(folder / name).st_mtime
        except OSError:
            continue
        if age_sec < GROWTH_SEC:
            return True
    return False


def _newest_checkpoint(folder: pathlib.Path) -> int | None:
    """Return the step of the newest checkpoint, good or not; None without one."""
    try:
        return next(iter(list_steps(folder / "checkpoints")), None)
    except OSError:
        return None
