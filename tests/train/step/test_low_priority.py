"""Test that a compilation beside training gives its cores to the steps."""

import os
import subprocess
import sys
import threading
import time

import pytest

from train.step.low_priority import (
    LOWEST,
    code_generated_at_low_priority,
    take_cores_back,
    yield_cores,
)

POOL = """
import os, sys, threading
import jax, numpy as np
from train.step import low_priority as lp

os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_enable_compilation_cache", False)
lp.mark_compiler_threads()

def busy():
    out = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        text = open(f"/proc/self/task/{thread}/stat").read().rpartition(")")[2].split()
        out[thread] = int(text[11]) + int(text[12])
    return out

def many(x):
    for i in range(40):
        x = jax.numpy.sin(x @ x + i)
        x = jax.lax.scan(lambda c, _: (jax.numpy.tanh(c @ x), None), x, None, 3)[0]
    return x

lowered, used = jax.jit(many).lower(np.ones((64, 64), np.float32)), {}
def compile_nicely():
    lp.yield_cores()
    before = busy()
    with lp.code_generated_at_low_priority():
        lowered.compile()
        for thread, ticks in busy().items():
            niceness = os.getpriority(os.PRIO_PROCESS, thread)
            used[niceness] = used.get(niceness, 0) + ticks - before.get(thread, 0)
thread = threading.Thread(target=compile_nicely)
thread.start()
thread.join()
print(used.get(lp.LOWEST, 0), sum(used.values()))
"""
"""Program that prints the time, in ticks, that threads of low priority took for a
compilation, and that of all threads."""


@pytest.fixture
def marked():
    """Return the id of a thread that is one nicer than this process."""
    found, is_over = [], threading.Event()

    def run() -> None:
        found.append(threading.get_native_id())
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + 1
        os.setpriority(os.PRIO_PROCESS, found[0], niceness)
        is_over.wait()

    thread = threading.Thread(target=run)
    thread.start()
    while not found or niceness(found[0]) == niceness(os.getpid()):
        time.sleep(0.001)
    yield found[0]
    is_over.set()
    thread.join()


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def priority(thread: int) -> tuple[int, int]:
    """Return the niceness of a thread, and its scheduling policy."""
    return niceness(thread), os.sched_getscheduler(thread)


def test_marked_threads_are_nice_while_a_layout_compiles(marked):
    own, before = niceness(os.getpid()), niceness(marked)
    with code_generated_at_low_priority():
        assert niceness(marked) == LOWEST
        assert niceness(os.getpid()) == own
    is_root = os.geteuid() == 0  # others may not raise a priority
    assert niceness(marked) == (before if is_root else LOWEST)


def test_a_thread_yields_its_cores_alone_until_they_are_taken_back():
    own, found = priority(os.getpid()), []
    lowest = LOWEST, os.SCHED_IDLE

    def run() -> None:
        yield_cores()
        found.append(priority(threading.get_native_id()))
        take_cores_back()
        found.append(priority(threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [lowest, own if os.geteuid() == 0 else lowest]
    assert priority(os.getpid()) == own


def test_a_process_of_the_lowest_niceness_keeps_its_policy(repo):
    """All of its threads have the niceness by which yielding ones are known."""
    program = """
import os, threading
from train.step import low_priority as lp
os.setpriority(os.PRIO_PROCESS, os.getpid(), lp.LOWEST)
thread = threading.Thread(target=lp.yield_cores)
thread.start()
thread.join()
lp.take_cores_back()
assert os.sched_getscheduler(os.getpid()) == os.SCHED_OTHER
"""
    subprocess.run([sys.executable, "-c", program], cwd=repo, check=True)


@pytest.mark.long
def test_xla_compiles_for_cpus_in_threads_that_are_known(repo):
    """Nearly all of a compilation is done at low priority."""
    ended = subprocess.run(
        [sys.executable, "-c", POOL], cwd=repo, capture_output=True, check=True
    )
    nice, total = map(int, ended.stdout.split())
    assert total > 20
    assert nice > 0.9 * total
