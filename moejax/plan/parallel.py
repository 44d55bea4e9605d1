"""Sizes of tensor and expert-shard parallelism and of domains, in plain Python.

tensor axis   tokens are whole on each of its devices; attention is split over it
expert shard  one expert's hidden width f is cut in so many parts

shards == size   experts along expert,                 shards along tensor
shards <  size   experts along expert x tensor_outer,  shards along tensor_inner
shards >  size   experts along expert_outer,           shards along expert_inner x
                                                       tensor

A *domain* is the devices of a group that share gathered experts:

    axes dc = 4, expert = 2, shared = (2, 1): data centres 0 and 1 are a domain for each
    index of expert, 2 and 3 another one

Rows go to the device of another domain that has the same place in it.
"""

import dataclasses
import itertools
import math
import typing
from typing import Literal

from moejax.plan.schedule_rules import SCHEDULES, Schedule, ScheduleRules

Form = Literal["none", "residual", "delta"]
"""How experts that move inside a domain are compressed
(moejax.moe.weights.compression); 'none' is an all_gather of weights."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Sizes beside the experts' owners, and in which order rows and sums travel."""

    schedule: Schedule
    size: int
    """Devices of the tensor axis (N_MP)."""
    expert_shards: int
    """Parts of one expert (N_ESP)."""

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
                "and Mesh.tensor and expert_shards are 1: leave Dispatch.schedule "
                "out, or "
                "use Mesh.tensor = 2"
            )
        if self.is_local and size == 1:
            raise ValueError(
                f"schedule='{self.schedule}' has the experts along the tensor axis, "
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
        """Whether experts lie along the tensor axis, and no row travels."""
        return self.rules.is_local

    @property
    def inner(self) -> dict[str, int]:
        """Devices of the inner part, of axes that are split in two."""
        size, shards = self._sizes
        if self.is_local or size == shards:
            return {}
        return {"tensor": shards} if shards < size else {"expert": shards // size}

    @property
    def num_windows(self) -> int:
        """Parts of a buffer that the devices of the tensor axis send."""
        return self.rules.num_windows(*self._sizes)

    @property
    def num_parts(self) -> int:
        """Parts into which a tensor group's tokens are split."""
        return self.rules.num_parts(*self._sizes)

    @property
    def num_gathered(self) -> int:
        """Such parts that one source routes."""
        return self.rules.num_gathered(*self._sizes)

    def num_senders(self, num_owners: int) -> int:
        """Devices that a device gets rows from, itself included."""
        return self.rules.num_senders(num_owners, self.expert_shards)

    def num_sources(self, num_owners: int) -> int:
        """Different sets of tokens among the senders."""
        return self.rules.num_sources(num_owners, *self._sizes)


@dataclasses.dataclass(frozen=True)
class Domain:
    """Along each mesh axis of the group (Layout.axes): how many devices there are, and
    how many in a row share their experts."""

    sizes: tuple[int, ...]
    shared: tuple[int, ...]
    form: Form = "none"
    ratio: float = 1.0
    """Compressed experts take so many times fewer bytes."""
    gradient_compression: float | None = None
    """And their gradients, on the way to the owners; None: they travel whole."""

    def __post_init__(self) -> None:
        forms = typing.get_args(Form)
        if self.form not in forms or not self.ratio >= 1:
            raise ValueError(
                f"a domain's form='{self.form}' and ratio={self.ratio} must be one of "
                f"{', '.join(forms)}, and at least 1"
            )
        if self.gradient_compression is not None and not self.gradient_compression >= 1:
            raise ValueError(
                f"a domain's gradient_compression={self.gradient_compression} must be "
                "at least 1, or None"
            )
        for name in ("sizes", "shared"):  # JSON makes them lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes, shared = self.sizes, self.shared
        fits = len(sizes) == len(shared) and min(shared, default=0) >= 1
        if not fits or any(n % s for n, s in zip(sizes, shared)):
            near = tuple(math.gcd(n, max(s, 1)) for n, s in zip(sizes, shared))
            raise ValueError(
                f"domain={shared} must have a divisor of each axis of the group "
                f"{sizes}: use {near or sizes}"
            )

    @property
    def num_devices(self) -> int:
        """In one domain."""
        return math.prod(self.shared)

    def members(self) -> list[list[int]]:
        """Devices of the group by domain, each in the order in which it gathers their
        experts: by number."""
        counts = [n // s for n, s in zip(self.sizes, self.shared)]
        return [
            [self._number(which, place) for place in _indices(self.shared)]
            for which in _indices(counts)
        ]

    def _number(self, which: tuple[int, ...], place: tuple[int, ...]) -> int:
        number = 0
        for size, shared, i, j in zip(self.sizes, self.shared, which, place):
            number = number * size + i * shared + j
        return number


def _indices(sizes) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in sizes)))
