"""Test the timer: order and number of calls, and the median of a made clock."""

import itertools
import types

from tools.bench import timer


def test_calls_take_turns_after_one_call_each():
    events = []
    calls = {name: lambda name=name: events.append(name) for name in "ab"}
    timer.median_sec(calls, 2, {"a": 2, "b": 1}, lambda _: events.append("-"))
    assert "".join(events) == "a-b-" + "b-aa-" + "aa-b-"
    waited, results = [], itertools.count()
    timer.median_sec({"a": lambda: next(results)}, 2, 3, waited.append)
    assert waited == [0, 3, 6]  # the result of the last call of each turn


def test_a_time_is_the_median_of_the_mean_over_calls(monkeypatch):
    clock = iter([0, 10, 20, 24, 30, 36])  # samples of 10, 4 and 6 seconds
    here = types.SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(timer, "time", here)
    assert timer.median_sec({"a": lambda: None}, 3, 2) == {"a": 3.0}
