"""Sizes of tensor and expert-shard parallelism and of domains, in plain Python.

Attention is split over the devices of the *tensor axis*, and each of them has all
tokens of its tensor group. An *expert shard* is one part of an expert, whose hidden
width f is cut into `expert_shards` equal parts. The sizes decide which mesh axes split
the experts and which split each expert:

    shards == size   experts along expert,                 shards along tensor
    shards <  size   experts along expert x tensor_outer,  shards along tensor_inner
    shards >  size   experts along expert_outer,           shards along expert_inner x
                                                           tensor

The devices of a *domain* gather one another's experts, so that rows travel between
domains only. For example, with dc = 4, expert = 2 and shared = (2, 1), data centres 0
and 1 form a domain for each index of the expert axis, and data centres 2 and 3 form
another one. A device sends rows to the device at its own index in each other domain.
"""

import dataclasses
import itertools
import math

from moejax.plan.schedule_rules import SCHEDULES, Schedule, ScheduleRules


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Sizes of the tensor axis and of expert shards, and the schedule for both."""

    schedule: Schedule
    """Order of the collectives around the experts (moejax.plan.schedule_rules)."""
    size: int
    """Number of devices of the tensor axis (N_MP)."""
    expert_shards: int
    """Number of parts into which the hidden width of each expert is cut (N_ESP). It
    divides `size` or is a multiple of it."""

    def __post_init__(self) -> None:
        size, shards = self._sizes
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule='{self.schedule}' is none of {', '.join(SCHEDULES)}"
            )
        if size < 1 or shards < 1 or (size % shards and shards % size):
            raise ValueError(
                f"expert_shards={shards} must divide the tensor axis ({size}) or be a "
                f"multiple of it: use {size}"
            )
        if size == shards == 1:
            raise ValueError(
                f"schedule='{self.schedule}' orders the collectives of a tensor axis, "
                "and Mesh.tensor and expert_shards are 1: leave Dispatch.schedule out"
            )
        if self.is_local and size == 1:
            raise ValueError(
                f"schedule='{self.schedule}' splits the experts over the tensor axis, "
                "which has one device: use 's1h', or Mesh.tensor = 2"
            )

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.size, self.expert_shards

    @property
    def rules(self) -> ScheduleRules:
        """Sizes and limits of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def is_local(self) -> bool:
        """Whether whole experts are split over the tensor axis, so that no row
        travels."""
        return self.rules.is_local

    @property
    def inner(self) -> dict[str, int]:
        """Size of the inner part of the mesh axis that must be split in two, by the
        axis's name; empty where no axis is split."""
        size, shards = self._sizes
        if self.is_local or size == shards:
            return {}
        return {"tensor": shards} if shards < size else {"expert": shards // size}

    @property
    def num_windows(self) -> int:
        """Number of parts into which a send buffer is cut; every device of the tensor
        axis sends one."""
        return self.rules.num_windows(*self._sizes)

    @property
    def num_parts(self) -> int:
        """Number of parts into which the tokens of a tensor group are split."""
        return self.rules.num_parts(*self._sizes)

    @property
    def num_gathered(self) -> int:
        """Number of parts of a tensor group's tokens that one source routes."""
        return self.rules.num_gathered(*self._sizes)

    def num_senders(self, num_owners: int) -> int:
        """Return the number of devices from which a device receives rows, itself
        included."""
        return self.rules.num_senders(num_owners, self.expert_shards)

    def num_sources(self, num_owners: int) -> int:
        """Return the number of sending devices, of which those with the same tokens
        count as one."""
        return self.rules.num_sources(num_owners, *self._sizes)


@dataclasses.dataclass(frozen=True)
class Domain:
    """Sizes of the domains of a group, and the compression used inside a domain. Sizes
    have one entry for each mesh axis of the group (Layout.axes)."""

    sizes: tuple[int, ...]
    """Number of devices along each mesh axis of the group."""
    shared: tuple[int, ...]
    """Number of neighbouring devices along each mesh axis that form one domain; a
    divisor of the axis's size."""
    compression: float | None = None
    """Target compression ratio of gathered experts: 50 sends 1/50 of the bytes. None
    sends whole experts (moejax.moe.weights.compression)."""

    def __post_init__(self) -> None:
        if self.compression is not None and not self.compression >= 1:
            raise ValueError(
                f"a domain's compression={self.compression} must be at least 1, or None"
            )
        sizes, shared = self.sizes, self.shared
        fits = len(sizes) == len(shared) and min(shared, default=0) >= 1
        if not fits or any(n % s for n, s in zip(sizes, shared)):
            near = tuple(math.gcd(n, max(s, 1)) for n, s in zip(sizes, shared))
            raise ValueError(
                f"domain={shared} must have a divisor of each axis size of the group "
                f"{sizes}: use {near or sizes}"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices in one domain."""
        return math.prod(self.shared)

    def members(self) -> list[list[int]]:
        """Return the device numbers of each domain, in rising order, which is the order
        in which their experts are gathered."""
        counts = [n // s for n, s in zip(self.sizes, self.shared)]
        return [
            [self._device(domain, member) for member in _indices(self.shared)]
            for domain in _indices(counts)
        ]

    def _device(self, domain: tuple[int, ...], member: tuple[int, ...]) -> int:
        """Return the number in the group of a member of a domain. Both are given by
        their index along each axis."""
        device = 0
        for size, shared, i, j in zip(self.sizes, self.shared, domain, member):
            device = device * size + i * shared + j
        return device


def candidate_domains(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all domains whose sizes divide those of a group's axes, smallest first.

    The first has one device along each axis: plain expert parallelism.
    """
    divisors = [[n for n in range(1, size + 1) if size % n == 0] for size in sizes]
    return sorted(itertools.product(*divisors), key=lambda d: (math.prod(d), d))


def _indices(sizes) -> list[tuple[int, ...]]:
    """Return the indices of all elements of an array with these sizes, row-major."""
    return list(itertools.product(*(range(size) for size in sizes)))
