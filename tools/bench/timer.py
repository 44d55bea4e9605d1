"""Timing in turns: every call runs in each turn, so that a slow second of the machine
affects all of them alike."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any


def block_until_ready(results: Any) -> Any:
    """Wait until the arrays of a pytree are computed, and return it."""
    import jax  # late: programs set the variables that JAX reads when it is imported

    return jax.block_until_ready(results)


def median_sec[K: Hashable](
    calls: Mapping[K, Callable[[], Any]],
    turns: int,
    calls_per_turn: int | Mapping[K, int] = 1,
    wait: Callable[[Any], Any] = block_until_ready,
) -> dict[K, float]:
    """Return the median seconds of each call, which runs once before it is timed.

    A sample is the mean of `calls_per_turn` calls back to back with one wait, for the
    result of the last one: a GPU computes the others before it. The number may differ
    by name.
    """
    numbers = calls_per_turn
    if isinstance(numbers, int):
        numbers = dict.fromkeys(calls, numbers)
    for call in calls.values():
        wait(call())
    times = {name: [] for name in calls}
    for turn in range(turns):
        # Every other turn goes backwards, so that no call always follows the same one.
        for name in calls if turn % 2 else reversed(calls):
            call, begin = calls[name], time.perf_counter()
            for _ in range(numbers[name]):
                result = call()
            wait(result)
            times[name].append((time.perf_counter() - begin) / numbers[name])
    return {name: statistics.median(sec) for name, sec in times.items()}
