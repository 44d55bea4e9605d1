"""Tell how a run ended, or that it goes on, from the files of its folder.

finished   summary.json is of the last step
running    a process holds the folder, or (where that cannot be known) a file of the run
           grew in the last minute
empty      neither, and no step was written
stopped    neither, and the newest checkpoint is of the last step: nothing is lost
crashed    neither, and steps came after the newest checkpoint, or an error ended it
"""

import dataclasses
import os
import pathlib
import re
import socket
import time
from typing import Literal

from train.checkpoint.record import list_steps

Name = Literal["finished", "running", "stopped", "crashed", "empty"]

LOCK = ".lock"
GROWTH_SEC = 60
PROC = pathlib.Path("/proc")
_HOLDER = re.compile(r"pid (\d{1,10}) on (.+)")


@dataclasses.dataclass(frozen=True)
class RunState:
    """State of a run, and a sentence about it."""

    name: Name
    text: str


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far the files of a run have got."""

    step: int
    """Last step in metrics.jsonl; 0 before the first."""
    num_steps: int | None
    """Steps that the configuration asks for; None if it does not say."""
    finished_step: int | None
    """Step of summary.json; None without one."""
    failure: str | None = None
    """Error that has ended the last attempt; None where none is known."""


def find_state(folder: pathlib.Path, progress: Progress) -> RunState:
    """Return the state of the run in `folder`."""
    step, num_steps = progress.step, progress.num_steps
    of = f"step {step}" + (f" of {num_steps}" if num_steps else "")
    is_held = is_locked(folder)
    if is_held:
        return RunState("running", f"running: {of}" if step else "running: no step yet")
    if progress.finished_step is not None and progress.finished_step >= max(
        step, num_steps or 0
    ):
        return RunState("finished", f"finished after step {progress.finished_step}")
    if is_held is None and _grew_lately(folder):
        text = f"running: {of}" if step else "running: no step yet"
        return RunState("running", f"{text}; its files grew in the last minute")
    why = "" if progress.failure is None else f" by an error: {progress.failure}"
    if not step:
        return RunState("empty", f"ended before its first step{why}")
    saved = _newest_checkpoint(folder)
    if saved == step and progress.failure is None:
        text = f"stopped after {of}, which is saved: start it again to go on"
        return RunState("stopped", text)
    where = f"from step {saved}" if saved else "from the start, without a checkpoint"
    text = f"a new start goes on {where}"
    return RunState("crashed", f"ended after {of}{why or ', unsaved'}; {text}")


def is_locked(folder: pathlib.Path) -> bool | None:
    """Return whether the process that `.lock` names has that file open, as a run has
    while it holds the folder (train/logs/run_dir.py); None where that cannot be known:
    on another host, of another user, or without Linux's /proc.

    The lock itself is not tried: that would hold it for a moment, in which a run could
    not start.
    """
    try:
        holder = _HOLDER.fullmatch((folder / LOCK).read_text(errors="replace"))
        lock = (folder / LOCK).stat()
        if holder is None or holder[2] != socket.gethostname():
            return None
        if not PROC.joinpath("self").exists():
            return None
        files = list(PROC.joinpath(holder[1], "fd").iterdir())
    except FileNotFoundError:
        return False if (folder / LOCK).exists() else None
    except OSError:
        return None
    return any(_is_file(file, lock) for file in files)


def _is_file(path: pathlib.Path, stat: os.stat_result) -> bool:
    """Return whether a path leads to the file with this stat result."""
    try:
        return os.path.samestat(path.stat(), stat)
    except OSError:
        return False


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
