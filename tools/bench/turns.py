"""Timing in turns: all variants run once in each turn, so that a slow second of the
machine affects all of them alike."""

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

Variants = Sequence[Any] | Mapping[Any, Any]


def in_turns(
    variants: Variants, num_turns: int, num_warm_ups: int = 1
) -> Iterator[tuple[int, Any]]:
    """Yield (turn, variant) for each variant in each turn. Negative turns are warm-ups.

    Every other turn goes backwards, so that no variant always follows the same one.
    """
    for turn in range(-num_warm_ups, num_turns):
        for variant in variants if turn % 2 else reversed(variants):
            yield turn, variant


def median_sec[K: Hashable](
    calls: Mapping[K, Callable[[], Any]], num_turns: int
) -> dict[K, float]:
    """Return the median over turns of the seconds until each call's result is there."""
    import jax

    times = {name: [] for name in calls}
    for turn, name in in_turns(calls, num_turns):
        begin = time.perf_counter()
        jax.block_until_ready(calls[name]())
        if turn >= 0:
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(sec) for name, sec in times.items()}
