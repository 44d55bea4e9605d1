"""The plan of chaos: which faults hit which run, drawn from a seed."""

import dataclasses
import random
from collections.abc import Iterator, Sequence

from tools.faults.fault import Fault

MIN_FAULTS, MAX_FAULTS = 3, 5
"""Number of faults of one run."""
NUM_PROCESSES = (1, 2, 4)
"""Numbers of processes. Eight simulated devices are divided among them equally."""
FIRST = ("mismatch", "shards")
"""Damage that is tried alone, before other files are damaged."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One run and the faults that hit it, in order."""

    number: int
    num_processes: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        names = ", ".join(fault.name for fault in self.faults)
        return f"run {self.number:3}  {self.num_processes} processes  {names}"


def make_plan(
    faults: Sequence[Fault], count: int, seed: int, num_processes: Sequence[int]
) -> list[Scenario]:
    """Return runs with `count` faults together. Every kind comes once before any comes
    again. `num_processes` are the numbers of processes to draw from."""
    rng = random.Random(seed)
    deck = _deal(faults, rng)
    scenarios, left = [], count
    while left:
        size = min(left, rng.randint(MIN_FAULTS, MAX_FAULTS))
        drawn = [next(deck) for _ in range(size)]
        minimum = max(fault.min_processes for fault in drawn)
        number = rng.choice([x for x in num_processes if x >= minimum])
        scenarios.append(Scenario(len(scenarios), number, _in_order(drawn, rng)))
        left -= size
    return scenarios


def _deal(faults: Sequence[Fault], rng: random.Random) -> Iterator[Fault]:
    """Yield all faults in a random order, then all again in another."""
    while True:
        yield from rng.sample(faults, len(faults))


def _in_order(drawn: list[Fault], rng: random.Random) -> tuple[Fault, ...]:
    """Return the faults with those of a resting run side by side, so that the run is
    stopped for them once."""
    running = [x for x in drawn if x.state == "running"]
    resting = [x for x in drawn if x.state == "resting"]
    resting.sort(key=lambda x: FIRST.index(x.name) if x.name in FIRST else len(FIRST))
    at = rng.randint(min(1, len(running)), len(running))
    return (*running[:at], *resting, *running[at:])
