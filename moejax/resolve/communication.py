"""Choice of how the layers of a run are cut over the mesh, and how rows travel.

'auto' takes the schedule and the domain that are fastest by a calibration's speeds,
of those that would run if they were named.
"""

import collections
import dataclasses
from collections.abc import Iterable

from jax.sharding import AbstractMesh, Mesh

from moejax.choice import Choice
from moejax.config import Config
from moejax.perf import choose_domain, choose_schedule
from moejax.perf.calibration import Calibration
from moejax.plan.layout import ITEMSIZE
from moejax.resolve import layouts
from moejax.resolve.partition import (
    Partition,
    group_sizes,
    micro_batch_tokens,
    partition_of,
)
from moejax.resolve.speeds import other_flops_per_device


def choose_communication(
    cfg: Config, calibration: Calibration, mesh: Mesh | AbstractMesh
) -> tuple[Partition, dict[str, Choice]]:
    """Return the partition of a run's layers, and the choices of 'schedule' and
    'domain' where predicted times made them.

    'auto' chooses among the values that would run if they were named. Raises ValueError
    where there are none, with the reasons, and where the calibration lacks a collective
    that a prediction needs.
    """
    _achieved_compression(cfg)  # refuses a ratio that no entry fits
    schedule, scheduled = _choose_schedule(cfg, calibration, mesh)
    domain, named = _choose_domain(scheduled, calibration, mesh)
    choices = {"schedule": schedule, "domain": domain}
    made = {name: choice for name, choice in choices.items() if choice is not None}
    return partition_of(named), made


def _choose_schedule(
    cfg: Config, calibration: Calibration, mesh: Mesh | AbstractMesh
) -> tuple[Choice | None, Config]:
    """Return the choice of the schedule, and the configuration that names it; None
    where it is named already, or no layer is cut over a tensor axis."""
    is_cut = cfg.mesh.tensor > 1 or cfg.expert_shards > 1
    if not is_cut or cfg.dispatch.schedule != "auto":
        return None, cfg
    named = _possible(cfg, "schedule", choose_schedule.TIMES, mesh)
    choice = choose_schedule.choose(micro_batch_shape(cfg), calibration, named)
    return choice, named[choice.value]


def _choose_domain(
    cfg: Config, calibration: Calibration, mesh: Mesh | AbstractMesh
) -> tuple[Choice | None, Config]:
    """Return the choice of the domain, and the configuration that names it; None where
    it is named already, or one domain alone can run."""
    if cfg.dispatch.domain != "auto":
        return None, cfg
    # Domains along (dc, expert) that divide the group, smallest first.
    sizes, domains = group_sizes(cfg), [(1, 1)]
    if "data" not in sizes:
        dc_and_expert = {"dc": sizes.get("dc", 1), "expert": sizes["expert"]}
        domains = choose_domain.candidates(dc_and_expert)
    named = _possible(cfg, "domain", domains, mesh)
    if len(named) == 1:
        return None, *named.values()
    traffic, has_dc = layer_traffic(cfg, calibration), len(sizes) > 1
    shared = [domain if has_dc else domain[1:] for domain in named]
    choice = choose_domain.choose(traffic, calibration, shared)
    return choice, named[choice.value if has_dc else (1, *choice.value)]


def _possible[T](
    cfg: Config, field: str, values: Iterable[T], mesh: Mesh | AbstractMesh
) -> dict[T, Config]:
    """Return the configuration with each value of a field of Dispatch with which it can
    run, by value. Raises ValueError, one line, where it can run with none."""
    possible, names_of = {}, collections.defaultdict(list)
    for value in values:
        try:
            named = _named(cfg, **{field: value})
            is_open = named.dispatch.domain == "auto"  # yet to be chosen
            partition = partition_of(_named(named, domain=(1, 1)) if is_open else named)
            layouts.step_layout(named, partition, mesh)
            possible[value] = named
        except ValueError as refusal:
            names_of[str(refusal)].append(repr(value))
    if possible:
        return possible
    if len(names_of) == 1:  # a rule that has nothing to do with the field
        raise ValueError(*names_of)
    why = "; ".join(f"{', '.join(names)}: {why}" for why, names in names_of.items())
    raise ValueError(f"Dispatch.{field}='auto' has no value that can run: {why}")


def _named(cfg: Config, **fields) -> Config:
    """Return the configuration with these fields of Dispatch. Without a domain there is
    nothing to compress."""
    if fields.get("domain") == (1, 1):
        fields["compression"] = None
    return dataclasses.replace(
        cfg, dispatch=dataclasses.replace(cfg.dispatch, **fields)
    )


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
        sizes=group_sizes(cfg),
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
        sizes=group_sizes(cfg),
        compression=_achieved_compression(cfg),
        num_micro_batches=cfg.train.accumulate_steps,
        remat=cfg.model.repeats,
        is_prefetched=dispatch.prefetch is not False,
        is_hierarchical=dispatch.transport == "hierarchical",
    )


def _achieved_compression(cfg: Config) -> float:
    """Return the compression ratio that gathered experts reach.

    It differs from the target, since blocks and entries are whole numbers. Raises
    ValueError where not one entry fits.
    """
    from moejax.moe.weights.domains import achieved_ratio

    dispatch = cfg.dispatch
    if dispatch.compression is None:
        return 1.0
    size = 3 * cfg.model.d_model * cfg.moe.d_expert // cfg.expert_shards
    size //= 1 if "data" in dispatch.group_axes else cfg.mesh.data
    try:
        return achieved_ratio(size, cfg.model.compute_dtype, dispatch.compression)
    except ValueError as error:
        raise ValueError(
            f"Dispatch.compression={dispatch.compression:g}: {error}"
        ) from error
