"""Choice of how the layers of a run are cut over the mesh, and how rows travel.

'auto' takes the schedule and the domain whose layers take the least time by the cost
model, together where both are open, of those that would run if they were named. The
load is even, and experts are at home.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from moejax.balance.policies import AUTO
from moejax.choice import Choice
from moejax.config import Config
from moejax.perf import terms
from moejax.perf.calibration import Calibration
from moejax.perf.terms import Prediction
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.parallel import candidate_domains
from moejax.plan.schedule_rules import SCHEDULES, USUAL
from moejax.resolve import layouts
from moejax.resolve.partition import (
    Partition,
    group_sizes,
    partition_of,
    rows_per_step,
)
from moejax.resolve.speeds import make_cost_model, naming

ALONE = (1, 1)
"""Domain of one device."""
Way = tuple[str, tuple[int, int]]
"""A schedule ('auto' where no layer is cut over a tensor axis) and a domain."""


class Communication(NamedTuple):
    """How the layers of a run are cut over the mesh, and what else they could be."""

    partition: Partition
    named: Config
    """Configuration with the schedule and the domain that were chosen."""
    choices: dict[str, Choice]
    """Choices of 'schedule' and 'domain' where predicted times made them."""
    layouts: tuple[Layout, ...]
    """Layouts of the first step in every way among which the choice was."""


def choose_communication(
    cfg: Config, calibration: Calibration, mesh: Mesh | AbstractMesh
) -> Communication:
    """Return the partition of a run's layers, and the other ways to communicate that a
    configuration leaves open.

    'auto' chooses among the values that would run if they were named. Raises ValueError
    where there are none, with the reasons, and where the calibration lacks a collective
    that a prediction needs.
    """
    _check_compression(cfg)
    ways = _open_ways(cfg)
    if len(ways) == 1:
        named = _named(cfg, *ways[0])
        partition = partition_of(named)
        if cfg.router.training != "dense":  # raises where the calibration lacks a line
            predict(named, layouts.step_layout(named, partition, mesh), calibration)
        return Communication(partition, named, {}, ())
    possible = _possible(cfg, ways, mesh)
    sec: dict[Way, Prediction] = {}
    for way, (named, layout) in possible.items():
        if cfg.dispatch.domain is not None or way[1] == ALONE:
            sec[way] = predict(named, layout, calibration)
    best = terms.first_fastest(sec)
    schedules = {s: sec[s, d] for s, d in sec if d == best[1]}
    domains = {d: sec[s, d] for s, d in sec if s == best[0]}
    choices = {}
    if len({schedule for schedule, _ in ways}) > 1:
        choices["schedule"] = terms.fastest(schedules, USUAL)
    if len({domain for _, domain in sec}) > 1:
        choices["domain"] = terms.fastest(domains, next(iter(domains)))
    named, _ = possible[best]
    found = tuple(layout for _, layout in possible.values())
    return Communication(partition_of(named), named, choices, found)


def predict(cfg: Config, layout: Layout, calibration: Calibration) -> Prediction:
    """Return the predicted time of one layer of a run in one step, for an even load
    with experts at home."""
    cost = make_cost_model(cfg, calibration)
    row_p = ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0]
    with naming(cfg.balance.calibration):
        return cost.predict(even_load(cfg, layout), row_p, layout)


def even_load(cfg: Config, layout: Layout) -> np.ndarray:
    """Return the rows of one layer in a step from each source device to each expert, if
    all are equal: float [w, e]."""
    shape = layout.num_devices, layout.num_experts
    return np.full(shape, rows_per_step(cfg, layout) / layout.num_experts)


def _open_ways(cfg: Config) -> list[Way]:
    """Return the schedules and domains among which a configuration leaves the choice.
    Of equally fast ones the first is taken; a run of policy 'auto' begins without
    domains, unless they are asked for."""
    is_cut = cfg.mesh.tensor > 1 or cfg.expert_shards > 1
    schedules, domains = [cfg.dispatch.schedule], [cfg.dispatch.domain or ALONE]
    if is_cut and cfg.dispatch.schedule == "auto":
        schedules = list(SCHEDULES)
    is_open = cfg.dispatch.domain is None and cfg.balance.policy == AUTO
    if cfg.dispatch.domain == "auto" or is_open:
        # Domains along (dc, expert) that divide the group, smallest first.
        sizes, domains = group_sizes(cfg), [ALONE]
        if "data" not in sizes:
            domains = candidate_domains((sizes.get("dc", 1), sizes["expert"]))
    return list(itertools.product(schedules, domains))


def _possible(
    cfg: Config, ways: list[Way], mesh: Mesh | AbstractMesh
) -> Mapping[Way, tuple[Config, Layout]]:
    """Return the configuration and the layout of each way that can run. Raises
    ValueError, one line, where none can."""
    possible, names_of = {}, collections.defaultdict(list)
    num_schedules = len({schedule for schedule, _ in ways})
    num_domains = len(ways) // num_schedules
    for schedule, domain in ways:
        try:
            named = _named(cfg, schedule, domain)
            layout = layouts.step_layout(named, partition_of(named), mesh)
            possible[schedule, domain] = named, layout
        except ValueError as refusal:
            name = [repr(schedule)] * (num_schedules > 1)
            name += [repr(domain)] * (num_domains > 1)
            names_of[str(refusal)].append(" with ".join(name))
    if possible:
        return possible
    if len(names_of) == 1:  # a rule that has nothing to do with the fields
        raise ValueError(*names_of)
    why = "; ".join(f"{', '.join(names)}: {why}" for why, names in names_of.items())
    fields = ["Dispatch.schedule='auto'"] * (num_schedules > 1)
    fields += ["Dispatch.domain='auto'"] * (num_domains > 1)
    raise ValueError(f"{' and '.join(fields)} has no value that can run: {why}")


def _named(cfg: Config, schedule: str, domain: tuple[int, int]) -> Config:
    """Return the configuration with this schedule and domain. Without a domain there is
    nothing to compress."""
    fields = {"schedule": schedule, "domain": domain}
    if domain == ALONE:
        fields["compression"] = None
    return dataclasses.replace(
        cfg, dispatch=dataclasses.replace(cfg.dispatch, **fields)
    )


def _check_compression(cfg: Config) -> None:
    """Raise ValueError for a compression ratio that not one entry of an expert fits."""
    from moejax.moe.weights.domains import achieved_ratio

    dispatch = cfg.dispatch
    if dispatch.compression is None:
        return
    size = 3 * cfg.model.d_model * cfg.moe.d_expert // cfg.expert_shards
    size //= 1 if "data" in dispatch.group_axes else cfg.mesh.data
    try:
        achieved_ratio(size, cfg.model.compute_dtype, dispatch.compression)
    except ValueError as error:
        raise ValueError(
            f"Dispatch.compression={dispatch.compression:g}: {error}"
        ) from error
