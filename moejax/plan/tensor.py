"""Tensor and expert-shard parallelism of an MoE layer, in plain Python: Tensor.

tensor axis   tokens are whole on each of its devices; attention is split over it
expert shard  one expert's hidden width f is cut in so many parts

shards == size   experts along expert,                 shards along tensor
shards <  size   experts along expert x tensor_outer,  shards along tensor_inner
shards >  size   experts along expert_outer,           shards along expert_inner x
                                                       tensor
"""

import dataclasses
import typing
from typing import Literal

Schedule = Literal["base", "s1", "s2", "s1h", "local"]
"""Order of the collectives of a layer (moejax.moe.exchange.schedules)."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Sizes beside the experts' owners, and in which order rows and sums travel."""

    schedule: Schedule
    size: int
    """Devices of the tensor axis (N_MP)."""
    expert_shards: int
    """Parts of one expert (N_ESP)."""

    def __post_init__(self) -> None:
        known, (size, shards) = typing.get_args(Schedule), self._sizes
        if self.schedule not in known:
            raise ValueError(
                f"schedule='{self.schedule}' is none of {', '.join(known)}"
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
        if self.schedule == "local" and size == 1:
            raise ValueError(
                "schedule='local' has the experts along the tensor axis, which has one "
                "device: use 's1h', or Mesh.tensor = 2"
            )

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.size, self.expert_shards

    @property
    def inner(self) -> dict[str, int]:
        """Devices of the inner part, of axes that are split in two."""
        size, shards = self._sizes
        if self.schedule == "local" or size == shards:
            return {}
        return {"tensor": shards} if shards < size else {"expert": shards // size}

    @property
    def owners_per_expert_axis(self) -> tuple[int, int]:
        """Owners are the expert axis times the first, over the second."""
        size, shards = self._sizes
        return max(size // shards, 1), max(shards // size, 1)

    @property
    def num_windows(self) -> int:
        """Parts of a buffer that the devices of the tensor axis send."""
        return self.size if self.schedule == "s2" else 1

    def num_senders(self, num_owners: int) -> int:
        """Devices that a device gets rows from, itself included."""
        if self.schedule == "local":
            return 1
        return num_owners * (1 if self.schedule == "base" else self.expert_shards)

    def num_sources(self, num_owners: int) -> int:
        """Different sets of tokens among the senders."""
        return max(self.num_senders(num_owners) // self.num_windows, 1)
