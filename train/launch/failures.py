"""End all processes of a run when one of them ends with bad input or a failure.

    the process that fails        every other process
    end_all(code, line)           a thread looks for such a note,
      notes code and line         prints the line, confirms, and ends with the same
      waits for the others        code (wherever its main thread waits)
      ends

So nobody waits in a collective, or in a barrier of orbax, for a process that is gone,
and a launcher sees a code that says not to start again. A process that is killed or
crashes leaves no note: heartbeats, the watchdog or the launcher end the others.
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

POLLS_PER_HEARTBEAT = 60
"""Looks for a note within the silence after which a process counts as dead, 30 s by
default, in a run of up to POLLED_PER_POLL processes; larger runs look less often, so
that the coordinator is not flooded. A run that may be silent for an hour asks once a
minute: gRPC gives up a connection on which an answer is not read for 60 s, and a run
that is stopped should have none to read."""
POLLED_PER_POLL = 256
CONFIRM_SEC = 5.0
"""Longest time that a failed process waits for the others to confirm, or two looks of
theirs where that is longer."""
LEAVE_SEC = 0.2
"""Time that process 0 leaves the others to end. When it ends, and the coordinator with
it, jax aborts those that are left."""

_report: Callable[[str, int], object] = lambda line, code: print(  # noqa: E731
    f"error: {line}", file=sys.stderr, flush=True
)
_ending = threading.Lock()
_heartbeat_sec = 30.0


def report_by(report: Callable[[str, int], object]) -> None:
    """Let `report(line, code)` print the line with which this process ends."""
    global _report
    _report = report


def watch(heartbeat_sec: float) -> None:
    """Start to look for a note of another process, in a run of several, whose processes
    count as dead after a silence of `heartbeat_sec`."""
    global _heartbeat_sec
    _heartbeat_sec = heartbeat_sec
    if not coordinator.is_here():
        return
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(stop,), daemon=True)
    thread.start()
    # A daemon thread that returns from C++ while Python ends crashes the process.
    atexit.register(lambda: (stop.set(), thread.join(2 * _poll_sec())))


def end_all(code: int, line: str) -> NoReturn:
    """End all processes of the run with this exit code and line, from any thread. It
    never returns."""
    if not _ending.acquire(blocking=False):
        time.sleep(_limit_sec())  # another thread is ending this process
        exit_now(code)
    with contextlib.suppress(Exception):  # its output may be on the same full disk
        _report(line, code)
    if coordinator.is_here():
        _try(lambda: _tell(code, line))
    exit_now(code)


def end_if_told() -> None:
    """End this process if another one, or another thread of it, is ending the run.

    Called after an error that nobody expects, such as that of a collective in which a
    process is missing. That process has left its note before it ended.
    """
    if not coordinator.is_here():
        return
    if _ending.locked():
        time.sleep(_limit_sec())
    _try(_look)


def _watch(stop: threading.Event) -> None:
    """Look for notes until the process ends; end it when there is one."""
    while not stop.wait(_poll_sec()):
        # Without its coordinator jax ends this process; other errors may pass.
        with contextlib.suppress(Exception):
            _look()
        if not coordinator.is_here():
            return


def _look() -> None:
    """End this process if another one has left a note."""
    notes = coordinator.find("failure")
    if not notes or not _ending.acquire(blocking=False):
        return
    first = min(notes, key=int)
    note = json.loads(notes[first])
    with contextlib.suppress(Exception):
        coordinator.put(f"ended/{coordinator.own_index()}", "")
    with contextlib.suppress(Exception):
        _report(f"process {first} has ended the run: {note['line']}", note["code"])
    if coordinator.own_index() == 0:
        with contextlib.suppress(Exception):
            _wait_for_others()
    exit_now(note["code"])


def _tell(code: int, line: str) -> None:
    """Leave a note for the other processes, and wait until they have confirmed."""
    note = json.dumps({"code": code, "line": line})
    coordinator.put(f"failure/{coordinator.own_index()}", note)
    coordinator.put(f"ended/{coordinator.own_index()}", "")
    _wait_for_others()


def _wait_for_others() -> None:
    """Wait until all processes have confirmed, for _confirm_sec() at most."""
    end_sec = time.monotonic() + _confirm_sec()
    while time.monotonic() < end_sec:
        if len(coordinator.find("ended")) >= coordinator.count():
            break
        time.sleep(_poll_sec() / 10)
    if coordinator.own_index() == 0:
        time.sleep(LEAVE_SEC)


def _try(work: Callable[[], None]) -> None:
    """Call `work` in a thread; return when it has ended or failed, or after
    _limit_sec().

    The coordinator's answers have no time limit while process 0 is stopped. Where it is
    gone there is nobody to tell, so errors do not matter.
    """

    def suppressed() -> None:
        with contextlib.suppress(Exception):
            work()

    with contextlib.suppress(RuntimeError):  # no thread can be started any more
        thread = threading.Thread(target=suppressed, daemon=True)
        thread.start()
        thread.join(_limit_sec())


def _poll_sec() -> float:
    each_sec = _heartbeat_sec / POLLS_PER_HEARTBEAT
    return each_sec * max(1.0, coordinator.count() / POLLED_PER_POLL)


def _confirm_sec() -> float:
    return max(CONFIRM_SEC, 2 * _poll_sec())


def _limit_sec() -> float:
    """Return the longest time that the end of this process may take."""
    return 2 * _confirm_sec()


def exit_now(code: int) -> NoReturn:
    """End this process at once, without a wait for other processes or threads."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
