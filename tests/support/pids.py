"""Watch processes that a test has started, by their ids."""

import pathlib
import time

LIMIT_SEC = 120.0
"""Longest wait for processes to end. It is ten times the time that
tools/launch/workers.py promises, for a busy machine, and below --grace_sec, 60."""


def is_alive(pid: int) -> bool:
    """Return whether a process runs, sleeps or is stopped. A zombie is not alive."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or after
        return False
    return state[0] not in "ZX"


def wait_until_gone(pids: list[int]) -> None:
    """Wait until all processes have ended. Raises AssertionError after LIMIT_SEC."""
    end_sec = time.monotonic() + LIMIT_SEC
    while any(map(is_alive, pids)):
        assert time.monotonic() < end_sec, f"still alive: {pids}"
        time.sleep(0.01)
