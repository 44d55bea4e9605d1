"""Test the watchdog's timer: work that moves is left alone, work that stands is
ended."""

import faulthandler
import itertools
import re
import time

import pytest

from tests.support.waiting import wait_until
from train.launch.processes import Watchdog

LIMIT_SEC = 0.4


@pytest.fixture
def timers(monkeypatch):
    """The events of faulthandler's timer, which is replaced: 'start' and 'cancel'."""
    events = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda *_, **__: events.append("start")
    )
    monkeypatch.setattr(
        faulthandler, "cancel_dump_traceback_later", lambda: events.append("cancel")
    )
    return events


def test_the_timer_starts_again_as_long_as_bytes_come(timers):
    said, grow = [], itertools.count()
    with Watchdog(LIMIT_SEC, said.append) as watchdog:
        watchdog.at("the last save", lambda: next(grow))
        wait_until(lambda: timers.count("start") > 9)
    assert timers[-1] == "cancel"
    assert said == []


def test_the_timer_runs_out_when_bytes_stop(timers):
    said, counts = [], []

    def count() -> int:
        counts.append(7)
        return 7

    with Watchdog(LIMIT_SEC, said.append) as watchdog:
        watchdog.at("the last save", count)
        wait_until(lambda: said and len(counts) > 9)
        assert timers == ["start", "start"], "the second is that of the first count"
    (line,) = said
    assert re.match(r"WATCHDOG the last save takes \d+ s already; at 0.4 s", line)


def test_other_work_has_one_timer(timers):
    said = []
    with Watchdog(LIMIT_SEC, said.append) as watchdog:
        watchdog.at("step 3")
        wait_until(lambda: said)
    assert timers == ["start", "cancel"]
    assert re.match(r"WATCHDOG step 3 takes \d+ s already; at 0.4 s", said[0])


def test_a_count_that_comes_late_starts_no_timer(timers):
    """Without this a process would be ended while its watchdog rests."""

    def slow_count() -> int:
        time.sleep(2 * LIMIT_SEC / 8)
        return next(grow)

    grow = itertools.count()
    with Watchdog(LIMIT_SEC, print) as watchdog:
        for _ in range(5):
            watchdog.at("the save", slow_count)
            time.sleep(1.5 * LIMIT_SEC / 8)
            watchdog.rest()
            num_timers = len(timers)
            time.sleep(3 * LIMIT_SEC / 8)
            assert len(timers) == num_timers
