"""How layers are cut over the mesh, where schedule and domain are named."""

import dataclasses

from moejax.config import Config
from moejax.plan.layout import Layout
from moejax.plan.parallel import Domain, Tensor
from moejax.plan.schedule_rules import UNSPLIT


@dataclasses.dataclass(frozen=True)
class Partition:
    """Partition of a run's layers over the mesh: owners, tensor axis and domain."""

    axes: tuple[str, ...]
    """Names of the mesh axes of the group, as in Layout.axes."""
    num_owners: int
    """Number of owners of experts in a group."""
    tensor: Tensor | None
    """Sizes of the tensor axis and of expert shards; None where both are 1."""
    domain: Domain | None
    """Domain whose devices gather one another's experts; None where none do."""

    @property
    def fields(self) -> dict:
        """Fields of a Layout that follow from the partition, by name."""
        return {"axes": self.axes, "tensor": self.tensor, "domain": self.domain}

    @property
    def domain_size(self) -> int:
        """Number of devices in one domain; 1 without domains."""
        return 1 if self.domain is None else self.domain.num_devices

    def source_tokens(self, tokens: int) -> int:
        """Return how many of the `tokens` of a tensor group one source routes.

        Raises ValueError where the tensor axis does not divide them.
        """
        if self.tensor is None:
            return tokens
        tensor = self.tensor
        if tokens % tensor.num_parts:
            raise ValueError(
                f"Dispatch.schedule='{tensor.schedule}' splits the {tokens} tokens of "
                f"a micro-batch and device over Mesh.tensor={tensor.size}: use a batch "
                f"and a length whose product {tensor.num_parts} divides"
            )
        return tokens // tensor.num_parts * tensor.num_gathered

    def for_any_batch(self, tokens: int) -> "Partition":
        """Return this partition, if its tensor axis divides `tokens`.

        If not, return it with the schedule that routes all tokens on each device of the
        tensor axis.
        """
        if self.tensor is None or tokens % self.tensor.num_parts == 0:
            return self
        tensor = dataclasses.replace(self.tensor, schedule=UNSPLIT)
        return dataclasses.replace(self, tensor=tensor)


def partition_of(cfg: Config) -> Partition:
    """Return the partition of a run whose configuration names schedule and domain.

    Raises ValueError for sizes that do not go together.
    """
    dispatch, tensor, domain = cfg.dispatch, None, None
    if cfg.mesh.tensor > 1 or cfg.expert_shards > 1:
        tensor = Tensor(dispatch.schedule, cfg.mesh.tensor, cfg.expert_shards)
    if tensor is not None and tensor.is_local:
        return Partition(("tensor",), cfg.mesh.tensor, tensor, None)
    sizes = group_sizes(cfg)
    if dispatch.domain != (1, 1):
        shared = dispatch.domain if "dc" in sizes else dispatch.domain[1:]
        domain = Domain(tuple(sizes.values()), shared, dispatch.compression)
    return Partition(tuple(sizes), cfg.group_size, tensor, domain)


def group_sizes(cfg: Config) -> dict[str, int]:
    """Return the number of devices along each mesh axis of Dispatch.group."""
    return {axis: getattr(cfg.mesh, axis) for axis in cfg.dispatch.group_axes}


def rows_per_step(cfg: Config, layout: Layout) -> float:
    """Return the number of rows that one device computes in a step of a layout, if the
    load is even: with whole experts or with its shards of them."""
    rows = micro_batch_tokens(cfg) * cfg.moe.top_k * cfg.train.accumulate_steps
    shards = 1 if layout.is_local else cfg.expert_shards
    return rows * shards / cfg.mesh.tensor


def micro_batch_tokens(cfg: Config) -> int:
    """Return the number of tokens of one micro-batch on one device.

    The devices of a tensor group hold the same tokens.
    """
    shards = cfg.mesh.num_batch_shards * cfg.train.accumulate_steps
    return cfg.train.batch_size // shards * cfg.data.seq_len
