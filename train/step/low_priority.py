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
"""Niceness of threads that yield their cores, by which they are known. Their policy is
SCHED_IDLE besides: a thread of a step that wakes up takes the core of an idle one at
once, and that of a nice one only after its time slice. They yield to other programs
too: a compilation that the steps waited for at niceness 19 once took 108 s in place of
23 s."""


def mark_compiler_threads() -> None:
    """Make XLA start the threads that generate code for CPUs, one nicer than this one.

    This is to be called before anything else is compiled in a process. Afterwards, on
    other devices, and on systems other than Linux it changes nothing.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return

    def compile_something() -> None:
        _set_priority(threading.get_native_id(), _own_niceness() + 1)
        jax.jit(lambda x: x + 1).lower(np.float32(0)).compile()

    thread = threading.Thread(target=compile_something)
    thread.start()
    thread.join()


def yield_cores() -> None:
    """Give this thread, and those that it will start, the lowest priority."""
    if sys.platform == "linux":
        _yield(threading.get_native_id())


def take_cores_back() -> None:
    """Give threads that yield their cores the priority of the process again.

    The system must permit that, as it does to root; else they stay as they are.
    """
    if sys.platform == "linux":
        own = _own_niceness()
        for thread in _threads_of(LOWEST):
            _set_priority(thread, own)


@contextlib.contextmanager
def code_generated_at_low_priority() -> Iterator[None]:
    """Let XLA's pool yield its cores within this context, and later take them back, as
    `take_cores_back` does."""
    if sys.platform != "linux":
        yield
        return
    marked = _own_niceness() + 1
    pool = _threads_of(marked)
    for thread in pool:
        _yield(thread)
    try:
        yield
    finally:
        for thread in pool:
            _set_priority(thread, marked)


def _threads_of(niceness: int) -> list[int]:
    """Return the ids of the threads of this process that have a niceness."""
    threads = map(int, os.listdir("/proc/self/task"))
    return [thread for thread in threads if _niceness(thread) == niceness]


def _own_niceness() -> int:
    """Return the niceness of the main thread."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def _niceness(thread: int) -> int | None:
    """Return the niceness of a thread; None if it has ended."""
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except ProcessLookupError:
        return None


def _yield(thread: int) -> None:
    """Let a thread yield its core to all others."""
    _set_priority(thread, LOWEST, is_idle=True)


def _set_priority(thread: int, niceness: int, *, is_idle: bool = False) -> None:
    """Set the niceness of a thread, and its policy. Nothing happens where the thread
    has ended; what the system does not permit stays as it is."""
    policy = os.SCHED_IDLE if is_idle else os.SCHED_OTHER
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.sched_setscheduler(thread, policy, os.sched_param(0))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness, LOWEST))
