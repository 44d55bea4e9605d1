"""Choice of how the layers of a run are cut over the mesh, and how rows travel.

'auto' takes the schedule and the domain that are fastest by a calibration's speeds.
"""

import dataclasses
from typing import NamedTuple

from moejax.config import Config
from moejax.perf import choose_domain, choose_schedule
from moejax.perf.calibration import Calibration
from moejax.plan.layout import ITEMSIZE
from moejax.plan.parallel import Domain, Tensor
from moejax.plan.schedule_rules import SCHEDULES, UNSPLIT
from moejax.resolve.speeds import other_flops_per_device


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


class Communication(NamedTuple):
    """Partition of a run's layers, and the predictions behind each 'auto' choice."""

    partition: Partition
    schedule: choose_schedule.ScheduleChoice | None = None
    """Choice of the schedule; None where no predicted times chose it."""
    domain: choose_domain.DomainChoice | None = None
    """Choice of the domain; None where no predicted times chose it."""

    def lines(self) -> list[str]:
        """Return the reason for each choice, and each candidate's time in ms as a sum
        of terms."""
        lines = []
        for name, choice in (("schedule", self.schedule), ("domain", self.domain)):
            if choice is None:
                continue
            lines.append(f"{name} {choice.why.removeprefix(name).strip()}")
            for candidate, prediction in choice.predictions.items():
                terms = " + ".join(
                    f"{1e3 * t.sec:.3g} {t.name}" for t in prediction.terms
                )
                lines.append(
                    f"  {candidate} modelled {1e3 * prediction.sec:.3g} ms = {terms}"
                )
        return lines


def choose_communication(cfg: Config, calibration: Calibration) -> Communication:
    """Return the partition of a run's layers, with schedule and domain chosen.

    Raises ValueError where no candidate can run, and where the calibration lacks a
    collective that a prediction needs.
    """
    schedule, tensor = None, None
    if cfg.mesh.tensor > 1 or cfg.expert_shards > 1:
        name = cfg.dispatch.schedule
        if name == "auto":
            candidates = possible_schedules(cfg)
            schedule = choose_schedule.choose(
                micro_batch_shape(cfg), calibration, candidates
            )
            name = schedule.schedule
        tensor = Tensor(name, cfg.mesh.tensor, cfg.expert_shards)
    if tensor is not None and tensor.is_local:
        partition = Partition(("tensor",), cfg.mesh.tensor, tensor, None)
        return Communication(partition, schedule)
    sizes = _group_sizes(cfg)
    domain, choice = _choose_domain(cfg, tensor, calibration)
    partition = Partition(tuple(sizes), cfg.group_size, tensor, domain)
    return Communication(partition, schedule, choice)


def _choose_domain(
    cfg: Config, tensor: Tensor | None, calibration: Calibration
) -> tuple[Domain | None, choose_domain.DomainChoice | None]:
    """Return the run's domain, if it has one, and its choice, if 'auto' made one."""
    sizes, dispatch = _group_sizes(cfg), cfg.dispatch
    shared, choice = dispatch.domain, None
    is_cut = tensor is not None and bool(tensor.inner)
    if shared == "auto" and (is_cut or not _has_plain_slots(cfg)):
        shared = (1,) * len(sizes)  # a domain needs whole owners without replicas
    elif shared == "auto":
        choice = choose_domain.choose(layer_traffic(cfg, calibration), calibration)
        shared = choice.domain
    elif "dc" not in sizes:
        shared = shared[1:]
    if max(shared) == 1:
        return None, choice
    return Domain(tuple(sizes.values()), shared, dispatch.compression), choice


def possible_schedules(cfg: Config) -> tuple[str, ...]:
    """Return the schedules that the rest of the configuration permits."""
    return tuple(name for name in choose_schedule.TIMES if _is_possible(cfg, name))


def _is_possible(cfg: Config, schedule: str) -> bool:
    """Return whether the rest of the configuration permits this schedule."""
    rules, has_plain_slots = SCHEDULES[schedule], _has_plain_slots(cfg)
    if cfg.dispatch.transport == "ragged" and not rules.takes_ragged:
        return False
    if rules.is_local:
        return has_plain_slots and cfg.dispatch.domain == (1, 1)
    num_owners = cfg.group_size
    num_sources = rules.num_sources(num_owners, cfg.mesh.tensor, cfg.expert_shards)
    # A split over replicas needs the same number of sources for each owner.
    return has_plain_slots or num_sources % num_owners == 0


def _has_plain_slots(cfg: Config) -> bool:
    """Return whether every expert stays at its owner, without replicas."""
    dispatch = cfg.dispatch
    is_home = cfg.balance.policy == "home" and dispatch.store in (None, "owned")
    return is_home and dispatch.split in (None, "even")


def micro_batch_shape(cfg: Config) -> choose_schedule.MicroBatchShape:
    """Return the sizes of one MoE layer and micro-batch of a run."""
    return choose_schedule.MicroBatchShape(
        tokens=micro_batch_tokens(cfg),
        d_model=cfg.model.d_model,
        d_expert=cfg.moe.d_expert,
        num_experts=cfg.moe.num_experts,
        top_k=cfg.moe.top_k,
        buffer_factor=cfg.dispatch.buffer_factor,
        itemsize=ITEMSIZE[cfg.model.compute_dtype],
        tensor=cfg.mesh.tensor,
        expert_shards=cfg.expert_shards,
        sizes=_group_sizes(cfg),
        remat=cfg.model.repeats,
    )


def layer_traffic(cfg: Config, calibration: Calibration) -> choose_domain.LayerTraffic:
    """Return the bytes and seconds of one MoE layer of a run in one micro-batch."""
    moe, dispatch, d_model = cfg.moe, cfg.dispatch, cfg.model.d_model
    itemsize = ITEMSIZE[cfg.model.compute_dtype]
    rows = micro_batch_tokens(cfg) * moe.top_k
    expert_weights = 3 * d_model * moe.d_expert // cfg.expert_shards
    return choose_domain.LayerTraffic(
        row_bytes=dispatch.buffer_factor * rows / cfg.mesh.tensor * d_model * itemsize,
        expert_bytes=moe.num_experts // cfg.group_size * expert_weights * itemsize,
        pre_expert_sec=other_flops_per_device(cfg) / calibration.flops_per_sec,
        expert_sec=2 * rows * expert_weights / calibration.flops_per_sec,
        sizes=_group_sizes(cfg),
        compression=_achieved_compression(cfg),
        num_micro_batches=cfg.train.accumulate_steps,
        remat=cfg.model.repeats,
        is_prefetched=dispatch.prefetch is not False,
        is_hierarchical=dispatch.transport == "hierarchical",
    )


def _achieved_compression(cfg: Config) -> float:
    """Return the compression ratio that gathered experts reach.

    It differs from the target, since blocks and entries are whole numbers.
    """
    from moejax.moe.weights.domains import achieved_ratio

    dispatch = cfg.dispatch
    if dispatch.compression is None:
        return 1.0
    size = 3 * cfg.model.d_model * cfg.moe.d_expert // cfg.expert_shards
    size //= 1 if "data" in dispatch.group_axes else cfg.mesh.data
    return achieved_ratio(size, cfg.model.compute_dtype, dispatch.compression)


def _group_sizes(cfg: Config) -> dict[str, int]:
    """Return the number of devices along each mesh axis of Dispatch.group."""
    return {axis: getattr(cfg.mesh, axis) for axis in cfg.dispatch.group_axes}


def micro_batch_tokens(cfg: Config) -> int:
    """Return the number of tokens of one micro-batch on one device.

    The devices of a tensor group hold the same tokens.
    """
    shards = cfg.mesh.num_batch_shards * cfg.train.accumulate_steps
    return cfg.train.batch_size // shards * cfg.data.seq_len
