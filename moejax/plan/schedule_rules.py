"""Sizes and limits of each schedule of collectives, in plain Python: ScheduleRules.

A schedule is the order of the collectives around the experts of a layer that has a
tensor axis or expert shards. Its functions on devices are in
moejax.moe.exchange.schedules, which also has a table of all schedules. Its predicted
time is computed in moejax.perf.exchange. Three sizes are used here:

    size      devices of the tensor axis (MP); each holds all tokens of a tensor group
    shards    parts into which one expert is cut (ESP)
    owners    devices over which experts are split, and between which rows travel (EP)
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
    """Numbers into which one schedule cuts tokens and buffers, and its limits."""

    num_parts: Callable[[int, int], int] = _one
    """num_parts(size, shards) -> number of parts into which the tokens of a tensor
    group are split."""
    num_gathered: Callable[[int, int], int] = _one
    """num_gathered(size, shards) -> number of these parts that one source routes."""
    num_windows: Callable[[int, int], int] = _one
    """num_windows(size, shards) -> number of parts into which a send buffer is cut;
    every device of the tensor axis sends one."""
    num_senders: Callable[[int, int], int] = _owners_and_shards
    """num_senders(num_owners, shards) -> number of devices from which a device receives
    rows, itself included."""
    is_local: bool = False
    """Whether whole experts are split over the tensor axis, so that no row travels."""
    takes_ragged: bool = False
    """Whether the schedule works with transport='ragged'."""

    def num_sources(self, num_owners: int, size: int, shards: int) -> int:
        """Return the number of sending devices, of which those with the same tokens
        count as one; at least 1."""
        num_senders = self.num_senders(num_owners, shards)
        return max(num_senders // self.num_windows(size, shards), 1)


SCHEDULES = {
    "s1h": ScheduleRules(num_parts=_size, takes_ragged=True),
    "s1": ScheduleRules(num_parts=_size),
    "s2": ScheduleRules(num_windows=_size),
    "base": ScheduleRules(
        num_parts=lambda size, shards: max(size // shards, 1),
        num_gathered=lambda size, shards: shards,
        num_senders=lambda num_owners, shards: num_owners,
    ),
    "local": ScheduleRules(num_senders=_one, is_local=True),
}
"""Rules of every schedule, by name. Of equally fast ones the first is taken."""

Schedule = Literal[*SCHEDULES]
"""Name of a schedule."""

USUAL: Schedule = "base"
"""Schedule that others are compared with: DeepSpeed-MoE's."""
UNSPLIT: Schedule = "s2"
"""Schedule that works with any number of tokens, because every device of the tensor
axis routes all tokens of its tensor group."""
