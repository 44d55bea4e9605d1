"""How layers are cut over the mesh and in which order rows travel.

'auto' takes the schedule and the domain that a calibration makes fastest.
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
    """How the layers of a run are cut over the mesh: owners, shards, tensor, domain."""

    axes: tuple[str, ...]
    """Mesh axes of the group: Layout.axes."""
    num_owners: int
    tensor: Tensor | None
    domain: Domain | None

    @property
    def fields(self) -> dict:
        """Fields of a Layout, by name."""
        return {"axes": self.axes, "tensor": self.tensor, "domain": self.domain}

    def source_tokens(self, tokens: int) -> int:
        """Return how many of a tensor group's `tokens` one source of the layer has.

        ValueError where the tensor axis does not divide them.
        """
        if self.tensor is None:
            return tokens
        tensor = self.tensor
        if tokens % tensor.num_parts:
            raise ValueError(
                f"Dispatch.schedule='{tensor.schedule}' splits the {tokens} tokens of "
                f"a micro-batch and device over Mesh.tensor={tensor.size}: use a batch "
                "and length that it divides"
            )
        return tokens // tensor.num_parts * tensor.num_gathered

    def for_any_batch(self, tokens: int) -> "Partition":
        """Return these parts, or where the tensor axis does not divide so many tokens,
        those of a schedule that routes them whole."""
        if self.tensor is None or tokens % self.tensor.num_parts == 0:
            return self
        tensor = dataclasses.replace(self.tensor, schedule=UNSPLIT)
        return dataclasses.replace(self, tensor=tensor)


class Communication(NamedTuple):
    """How layers are cut, and what was predicted where 'auto' chose."""

    parts: Partition
    schedule: choose_schedule.ScheduleChoice | None = None
    domain: choose_domain.DomainChoice | None = None

    def lines(self) -> list[str]:
        """Say what was chosen and why, and each candidate's time as a sum of terms."""
        said = []
        for name, choice in (("schedule", self.schedule), ("domain", self.domain)):
            if choice is None:
                continue
            said.append(f"{name} {choice.why.removeprefix(name).strip()}")
            for candidate, predicted in choice.predictions.items():
                sums = " + ".join(
                    f"{1e3 * t.sec:.3g} {t.name}" for t in predicted.terms
                )
                said.append(f"  {candidate} {1e3 * predicted.sec:.3g} ms = {sums}")
        return said


def choose_communication(cfg: Config, calibration: Calibration) -> Communication:
    """Return how the layers of this run are cut.

    Raises ValueError where no candidate can run, and where the calibration lacks a line
    that a prediction takes.
    """
    schedule, tensor = None, None
    if cfg.mesh.tensor > 1 or cfg.expert_shards > 1:
        name = cfg.dispatch.schedule
        if name == "auto":
            among = possible_schedules(cfg)
            schedule = choose_schedule.choose(
                micro_batch_shape(cfg), calibration, among
            )
            name = schedule.schedule
        tensor = Tensor(name, cfg.mesh.tensor, cfg.expert_shards)
    if tensor is not None and tensor.is_local:
        parts = Partition(("tensor",), cfg.mesh.tensor, tensor, None)
        return Communication(parts, schedule)
    sizes = _group_sizes(cfg)
    domain, choice = _domain(cfg, tensor, calibration)
    parts = Partition(tuple(sizes), cfg.group_size, tensor, domain)
    return Communication(parts, schedule, choice)


def _domain(
    cfg: Config, tensor: Tensor | None, calibration: Calibration
) -> tuple[Domain | None, choose_domain.DomainChoice | None]:
    sizes, dispatch = _group_sizes(cfg), cfg.dispatch
    shared, choice = dispatch.domain, None
    is_cut = tensor is not None and bool(tensor.inner)
    if shared == "auto" and (is_cut or not _has_plain_slots(cfg)):
        shared = (1,) * len(sizes)  # a domain takes whole owners, and no replicas
    elif shared == "auto":
        choice = choose_domain.choose(layer_traffic(cfg, calibration), calibration)
        shared = choice.domain
    elif "dc" not in sizes:
        shared = shared[1:]
    if max(shared) == 1:
        return None, choice
    form, ratio = dispatch.compression, dispatch.compression_ratio
    how = ("none", 1.0) if form == "none" else (form, ratio)
    back = dispatch.gradient_compression
    return Domain(tuple(sizes.values()), shared, *how, back), choice


def possible_schedules(cfg: Config) -> tuple[str, ...]:
    """Return the schedules that what else is configured leaves."""
    return tuple(name for name in choose_schedule.TIMES if _is_possible(cfg, name))


def _is_possible(cfg: Config, schedule: str) -> bool:
    rules, has_plain_slots = SCHEDULES[schedule], _has_plain_slots(cfg)
    if cfg.dispatch.transport == "ragged" and not rules.takes_ragged:
        return False
    if rules.is_local:
        return has_plain_slots and cfg.dispatch.domain == (1, 1)
    num_owners = cfg.group_size
    num_sources = rules.num_sources(num_owners, cfg.mesh.tensor, cfg.expert_shards)
    return has_plain_slots or num_sources % num_owners == 0  # else few to balance


def _has_plain_slots(cfg: Config) -> bool:
    """Whether every expert stays at its owner, and nowhere else."""
    dispatch = cfg.dispatch
    is_home = cfg.balance.policy == "home" and dispatch.store in (None, "owned")
    return is_home and dispatch.split in (None, "even")


def micro_batch_shape(cfg: Config) -> choose_schedule.MicroBatchShape:
    """One MoE layer and micro-batch of this run."""
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
        remat=cfg.model.remat,
    )


def layer_traffic(cfg: Config, calibration: Calibration) -> choose_domain.LayerTraffic:
    """What one MoE layer of this run sends and computes in one micro-batch."""
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
        **_fewer_bytes(cfg),
        num_micro_batches=cfg.train.accumulate_steps,
        remat=cfg.model.remat,
        is_prefetched=dispatch.prefetch is not False,
        is_hierarchical=dispatch.transport == "hierarchical",
    )


def _fewer_bytes(cfg: Config) -> dict[str, float]:
    """How many times, as blocks and whole entries come out."""
    from moejax.moe.weights.domains import achieved_ratio
    from moejax.moe.weights.gradient_compression import SCALE_BYTES

    moe, dispatch, mesh = cfg.moe, cfg.dispatch, cfg.mesh
    dtype = cfg.model.compute_dtype
    size = 3 * cfg.model.d_model * moe.d_expert // cfg.expert_shards
    size //= 1 if "data" in dispatch.group_axes else mesh.data
    found = {}
    if dispatch.compression != "none":
        found["compression"] = achieved_ratio(size, dtype, dispatch.compression_ratio)
    if dispatch.gradient_compression is not None:
        sizes = (size, dtype, dispatch.gradient_compression, SCALE_BYTES)
        found["gradient_compression"] = achieved_ratio(*sizes)
    return found


def _group_sizes(cfg: Config) -> dict[str, int]:
    return {axis: getattr(cfg.mesh, axis) for axis in cfg.dispatch.group_axes}


def micro_batch_tokens(cfg: Config) -> int:
    """Return the tokens of one micro-batch on one device, or on one tensor group."""
    shards = cfg.mesh.num_batch_shards * cfg.train.accumulate_steps
    return cfg.train.batch_size // shards * cfg.data.seq_len
