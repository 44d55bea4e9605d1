"""Which threads yield their cores while a layout compiles, and when they take them
back. The system's threads and priorities are a dict here."""

import pytest

from train.step import low_priority
from train.step.low_priority import LOWEST

MAIN, POOL, STEPS, COMPILER = 1, 2, 3, 4


@pytest.fixture
def niceness(monkeypatch):
    """Return the niceness of each thread: XLA's pool is one nicer than the process."""
    threads = {MAIN: 5, POOL: 6, STEPS: 5, COMPILER: 5}

    def set_priority(thread, value, *, is_idle=False):
        assert is_idle == (value == LOWEST)
        threads[thread] = value

    monkeypatch.setattr(low_priority.sys, "platform", "linux")
    monkeypatch.setattr(low_priority.os, "listdir", lambda path: map(str, threads))
    monkeypatch.setattr(low_priority, "_niceness", threads.get)
    monkeypatch.setattr(low_priority, "_own_niceness", lambda: threads[MAIN])
    monkeypatch.setattr(low_priority, "_set_priority", set_priority)
    monkeypatch.setattr(low_priority.threading, "get_native_id", lambda: COMPILER)
    return threads


def test_the_pool_yields_while_a_layout_compiles(niceness):
    with low_priority.code_generated_at_low_priority():
        assert niceness == {MAIN: 5, POOL: LOWEST, STEPS: 5, COMPILER: 5}
    assert niceness == {MAIN: 5, POOL: 6, STEPS: 5, COMPILER: 5}


def test_a_thread_yields_alone_until_it_takes_its_core_back(niceness):
    low_priority.yield_cores()
    assert niceness == {MAIN: 5, POOL: 6, STEPS: 5, COMPILER: LOWEST}
    low_priority.take_cores_back()
    assert niceness == {MAIN: 5, POOL: 6, STEPS: 5, COMPILER: 5}
