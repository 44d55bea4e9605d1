"""Wait for a condition, on a machine that may be busy."""

import time
from collections.abc import Callable

LIMIT_SEC = 120.0
"""Longest wait. A condition that a test waits for comes true within a second or so."""


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait until is_so() is true. Raises AssertionError after LIMIT_SEC."""
    end_sec = time.monotonic() + LIMIT_SEC
    while not is_so():
        assert time.monotonic() < end_sec, f"not so after {LIMIT_SEC:g} s"
        time.sleep(0.01)
