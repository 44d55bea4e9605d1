"""End all processes of a run when one of them ends with bad input or a failure.

    the process that fails         every other process
    end_all(code, line) sends      a thread waits for such a note, prints the line,
      code and line to each,       meets the others, and ends with the same code
      meets the others, ends       (wherever its main thread waits)

So nobody waits in a collective, or in a barrier of orbax, for a process that is gone,
and a launcher sees a code that says not to start again. A process that is killed or
crashes sends no note: heartbeats, the watchdog or the launcher end the others.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from train.launch import coordinator

MEET_SEC = 5.0
"""Longest time that processes which end wait for one another."""
LEAVE_SEC = 0.5
"""Time that process 0 leaves the others to end. When it ends, and the coordinator with
it, jax aborts those that are left."""

_report: Callable[[str, int], object] = lambda line, code: print(  # noqa: E731
    f"error: {line}", file=sys.stderr, flush=True
)
_ending = threading.Lock()
"""Held by the thread that ends this process."""


def report_by(report: Callable[[str, int], object]) -> None:
    """Let `report(line, code)` print the line with which this process ends."""
    global _report
    _report = report


def watch() -> None:
    """Start to wait for a note of another process."""
    mailbox = _mailbox(coordinator.own_index())

    def read() -> None:
        with contextlib.suppress(Exception):  # without its coordinator jax ends us
            note = json.loads(coordinator.wait_for(mailbox))
            if note and _ending.acquire(blocking=False):
                line = f"process {note['from']} has ended the run: {note['line']}"
                _leave(note["code"], line)

    def close() -> None:
        # A daemon thread that returns from C++ while Python ends crashes the process.
        with contextlib.suppress(Exception):
            coordinator.put(mailbox, "null")
        thread.join(MEET_SEC)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    atexit.register(close)


def end_all(code: int, line: str) -> NoReturn:
    """End all processes of the run with this exit code and line, from any thread. It
    never returns."""
    if not _ending.acquire(blocking=False):
        time.sleep(2 * MEET_SEC)  # another thread is ending this process
        exit_now(code)
    _leave(code, line, is_first=True)


def end_if_told() -> None:
    """Return unless another thread is ending this process.

    Called after an error that nobody expects, such as that of a collective in which a
    process is missing. That process has sent its note before it ended.
    """
    if _ending.locked():
        time.sleep(2 * MEET_SEC)


def _leave(code: int, line: str, *, is_first: bool = False) -> NoReturn:
    """Print the line, tell the others if this process is the first to end, wait until
    all have read it, and exit."""
    with contextlib.suppress(Exception):  # its output may be on the same full disk
        _report(line, code)
    if coordinator.is_here():
        # The coordinator's answers have no time limit while process 0 is stopped.
        work = threading.Thread(target=_part, args=(code, line, is_first), daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started any more
            work.start()
            work.join(2 * MEET_SEC)
    exit_now(code)


def _part(code: int, line: str, is_first: bool) -> None:
    """Tell the others, if this process is the first to end, and meet them."""
    own = coordinator.own_index()
    note = json.dumps({"from": own, "code": code, "line": line})
    for index in range(coordinator.count()) if is_first else ():
        with contextlib.suppress(Exception):  # it has a note already
            if index != own:
                coordinator.put(_mailbox(index), note)
    with contextlib.suppress(Exception):  # a process is dead, or does not answer
        coordinator.meet("end", MEET_SEC)
    if own == 0:
        time.sleep(LEAVE_SEC)


def _mailbox(index: int) -> str:
    return f"failure/{index}"


def exit_now(code: int) -> NoReturn:
    """End this process at once, without a wait for other processes or threads."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
