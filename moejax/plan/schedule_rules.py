"""Sizes and limits of each schedule of collectives, in plain Python: ScheduleRules.

A schedule is the order in which rows and sums travel where there is a tensor axis. What
it does on devices is its record in moejax.moe.exchange.schedules, which draws them all;
how long it takes is its function in moejax.perf.choose_schedule.

    size      devices of the tensor axis (MP): all of them hold a tensor group's tokens
    shards    parts that one expert is cut into (ESP)
    owners    devices that experts are split over, between which rows travel (EP)
"""

import dataclasses
from collections.abc import Callable
from typing import Literal


def _one(*sizes: int) -> int:
    return 1


def _size(size: int, shards: int) -> int:
    return size


def _owners_and_shards(num_owners: int, shards: int) -> int:
    return num_owners * shards


@dataclasses.dataclass(frozen=True)
class ScheduleRules:
    """How one schedule cuts tokens and buffers, and what it can be combined with."""

    num_parts: Callable[[int, int], int] = _one
    """num_parts(size, shards): parts into which a tensor group's tokens are split."""
    num_gathered: Callable[[int, int], int] = _one
    """num_gathered(size, shards): such parts that one source routes."""
    num_windows: Callable[[int, int], int] = _one
    """num_windows(size, shards): parts of a buffer that the tensor axis sends."""
    num_senders: Callable[[int, int], int] = _owners_and_shards
    """num_senders(num_owners, shards): devices that a device gets rows from."""
    is_local: bool = False
    """Whether experts lie whole along the tensor axis, and no row travels."""
    takes_ragged: bool = False
    """Whether its rows can travel by transport='ragged'."""

    def num_sources(self, num_owners: int, size: int, shards: int) -> int:
        """Return the number of different sets of tokens among the senders."""
        num_senders = self.num_senders(num_owners, shards)
        return max(num_senders // self.num_windows(size, shards), 1)


SCHEDULES = {
    "base": ScheduleRules(
        num_parts=lambda size, shards: max(size // shards, 1),
        num_gathered=lambda size, shards: shards,
        num_senders=lambda num_owners, shards: num_owners,
    ),
    "s1": ScheduleRules(num_parts=_size),
    "s2": ScheduleRules(num_windows=_size),
    "s1h": ScheduleRules(num_parts=_size, takes_ragged=True),
    "local": ScheduleRules(num_senders=_one, is_local=True),
}

Schedule = Literal[*SCHEDULES]
"""Name of a schedule."""

UNSPLIT: Schedule = "s2"
"""The schedule that runs with any number of tokens: it routes all of them on each
device of the tensor axis."""
