"""Run a command as a group of processes with a time limit, and leave none of them."""

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

POLL_SEC = 0.5
"""Time between two looks at the parent of a process."""

GARBAGE = 100_000
"""Number of new objects after which Python collects garbage."""

_running: set[int] = set()
"""Leaders of the groups that run now."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int | None
    """Exit code, negative for a signal; None if it was killed at its time limit."""
    sec: float

    @property
    def why(self) -> str:
        """Reason why this end is wrong, as one clause; '' for exit code 0."""
        if self.code is None:
            return f"no end after {self.sec:.0f} s: killed"
        if self.code < 0:
            return f"crashed with {signal.Signals(-self.code).name}"
        return f"exit code {self.code}" if self.code else ""


def run(
    words: Sequence[str],
    limit_sec: float,
    log: pathlib.Path,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: pathlib.Path | None = None,
) -> Ended:
    """Run a command whose output is appended to `log`. After `limit_sec`, or if
    `kill_all` is called, its whole group is killed. `environ` adds variables."""
    start_sec = time.monotonic()
    with log.open("ab") as file:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environ or {})},
            cwd=cwd,
            start_new_session=True,
        )
    _running.add(process.pid)
    try:
        code = process.wait(limit_sec)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_group(process.pid)
        process.wait()
        _running.discard(process.pid)
    return Ended(code, time.monotonic() - start_sec)


def kill_all() -> None:
    """Kill all groups that `run` has started and that have not ended."""
    for leader in tuple(_running):
        kill_group(leader)


def start(words: Sequence[str], environ: Mapping[str, str] | None = None):
    """Start a command in the group of this process, with its output, and return the
    subprocess.Popen."""
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environ)


def run_in_group(
    words: Sequence[str], limit_sec: float, environ: Mapping[str, str] | None = None
) -> Ended:
    """Run a command in the group of this process, and kill it after `limit_sec`."""
    start_sec = time.monotonic()
    process = start(words, environ)
    try:
        code = process.wait(limit_sec)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = None
    return Ended(code, time.monotonic() - start_sec)


def kill_group(leader: int) -> None:
    """Kill what is left of a group of processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def last_line(log: pathlib.Path) -> str:
    """Return the last line of a log that is not empty, or ''."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def begin_process() -> None:
    """Prepare a process of a stage: it ends with its parent, and collects garbage
    seldom, which would take a tenth of the time of tracing."""
    gc.set_threshold(GARBAGE)
    end_with_parent()


def end_with_parent() -> None:
    """Start a thread that kills this process and its children as soon as the process
    that started it is gone, even by SIGKILL."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SEC)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
