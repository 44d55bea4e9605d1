"""One testbed at a time, and nothing of it left: the lock, the sweep, the signals."""

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
"""Its flock is held by the one cluster of this machine; the file itself stays."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SEC = 0.05


@contextlib.contextmanager
def locked(wait_sec: float = 0.0) -> Iterator[None]:
    """Holds the lock of this machine's cluster: the kernel's, so it goes with us."""
    end_sec = time.monotonic() + wait_sec
    with open(LOCK, "a+") as file:
        while not _is_taken(file.fileno()):
            if time.monotonic() > end_sec:
                file.seek(0)
                raise ValueError(
                    f"another testbed ({file.read().strip()}) stands, and there is one "
                    "on a machine at a time: wait for it, or end it"
                )
            time.sleep(POLL_SEC)
        file.truncate(0)
        file.write(f"pid {os.getpid()}")
        file.flush()
        yield


def remove_leftovers() -> list[str]:
    """Ends and removes all that clusters make; says what. Signals wait until it is
    done: noted, not blocked, for another thread of ours may be given them."""
    removed, asked = [], []
    with handled(lambda number, _frame: asked.append(number)):
        try:
            removed += quota.remove()
        finally:  # what fails there keeps nothing else
            removed += network.remove()
    if asked:
        raise KeyboardInterrupt
    return removed


@contextlib.contextmanager
def handled(handler: Callable[[int, object], None]) -> Iterator[None]:
    """SIGNALS go to it; those that are ignored, as under nohup, stay so."""
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
    raise KeyboardInterrupt


def say(event: str) -> None:
    print(f"testbed: {event}", file=sys.stderr, flush=True)


def _is_taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
