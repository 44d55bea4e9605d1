"""Low priority for compilations, so that steps that run meanwhile keep their cores.

On Linux each thread has a niceness of its own, and a new one begins with that of the
thread that starts it. XLA compiles partly in the thread that asks for it. For CPUs it
generates code in a pool of threads besides, which it starts at the first compilation of
a process and keeps apart from those that run steps. That first compilation is made here
by a thread that is one nicer than its process, so the pool is known by its niceness.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import jax
import numpy as np

LOWEST = 19
"""Niceness at which a thread gets about 1/70 of the time that any other would."""


def mark_compiler_threads() -> None:
    """Make XLA start the threads that generate code for CPUs, one nicer than this one.

    This is to be called before anything else is compiled in a process. Afterwards, on
    other devices, and on systems other than Linux it changes nothing.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return

    def compile_something() -> None:
        _set_niceness(threading.get_native_id(), _own_niceness() + 1)
        jax.jit(lambda x: x + 1).lower(np.float32(0)).compile()

    thread = threading.Thread(target=compile_something)
    thread.start()
    thread.join()


def yield_cores() -> None:
    """Give this thread, and those that it will start, the lowest priority for good."""
    if sys.platform == "linux":
        _set_niceness(threading.get_native_id(), LOWEST)


@contextlib.contextmanager
def code_generated_at_low_priority() -> Iterator[None]:
    """Give XLA's pool the lowest priority within this context.

    The pool gets its niceness back where the system permits that, as it does to root;
    elsewhere it stays nice.
    """
    if sys.platform != "linux":
        yield
        return
    marked = _own_niceness() + 1
    pool = [thread for thread in _threads() if _niceness(thread) == marked]
    for thread in pool:
        _set_niceness(thread, LOWEST)
    try:
        yield
    finally:
        for thread in pool:
            with contextlib.suppress(PermissionError):
                _set_niceness(thread, marked)


def _threads() -> list[int]:
    """Return the ids of the threads of this process."""
    return [int(name) for name in os.listdir("/proc/self/task")]


def _own_niceness() -> int:
    """Return the niceness of the main thread."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def _niceness(thread: int) -> int | None:
    """Return the niceness of a thread; None if it has ended."""
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except ProcessLookupError:
        return None


def _set_niceness(thread: int, niceness: int) -> None:
    """Set the niceness of a thread, LOWEST at most, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness, LOWEST))
