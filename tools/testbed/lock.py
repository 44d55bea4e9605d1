"""The lock that allows one testbed at a time, the removal of leftovers, and signal
handling."""

import contextlib
import fcntl
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator

from tools.testbed import network, quota

LOCK = pathlib.Path("/run/moejax-testbed.lock")
"""Lock file. The one cluster of this machine holds its flock; the file itself
remains."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SEC = 0.05


@contextlib.contextmanager
def hold_lock(wait_sec: float = 0.0) -> Iterator[None]:
    """Hold the lock of this machine's cluster during a `with` block.

    The lock is the kernel's, so it ends with this process. Raises ValueError if another
    process holds it for longer than wait_sec.
    """
    end_sec = time.monotonic() + wait_sec
    with open(LOCK, "a+") as file:
        while not _take(file.fileno()):
            if time.monotonic() > end_sec:
                file.seek(0)
                raise ValueError(
                    f"another testbed ({file.read().strip()}) is running, and a "
                    "machine can have one at a time: wait for it, or end it"
                )
            time.sleep(POLL_SEC)
        file.truncate(0)
        file.write(f"pid {os.getpid()}")
        file.flush()
        yield


def remove_leftovers() -> list[str]:
    """End and remove everything that clusters make, and return the names of what was
    removed.

    Signals are recorded and take effect at the end. They are not blocked, because the
    kernel may deliver them to another thread of this process.
    """
    removed, signals = [], []
    with handle_signals(lambda number, _frame: signals.append(number)):
        try:
            removed += quota.remove()
        finally:  # a failure there must not keep the namespaces
            removed += network.remove()
    if signals:
        raise KeyboardInterrupt
    return removed


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Let `handler` handle SIGNALS during a `with` block. Signals that are ignored, as
    under nohup, remain ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, old in before.items():
        if old != signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def interrupt(_number: int, _frame: object) -> None:
    """Raise KeyboardInterrupt; a signal handler."""
    raise KeyboardInterrupt


def say(event: str) -> None:
    """Print one line about the testbed itself on stderr."""
    print(f"testbed: {event}", file=sys.stderr, flush=True)


def _take(file: int) -> bool:
    """Try to lock an open file, and return whether it succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
