"""Ways to compute the experts of a run on its devices, with seconds and bytes of each.

    expert parallelism      rows travel along expert; slots are gathered over data, in
                            each layer of each micro-batch or once a step
    no expert parallelism   Mesh.expert = 1: no row travels; the weights of all experts
                            are gathered, as FSDP does

The mesh is the user's, so that the second is advice.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moejax.config import Config, Dispatch
from moejax.perf.calibration import Calibration, find_line
from moejax.plan.layout import ITEMSIZE
from moejax.plan.layout_checks import GATHERED_ONCE
from moejax.resolve.partition import rows_per_step
from moejax.resolve.resolved import Resolved
from moejax.resolve.speeds import make_cost_model

NO_EXPERT_AXIS = "no expert parallelism (FSDP)"
WAYS = {"layer": "gathered in each layer", "step": "gathered once a step"}


class Strategy(NamedTuple):
    """A way to compute the experts, and the configuration that selects it."""

    name: str
    cfg: Config
    params: tuple[str, ...]
    """Values for --gin_param that lead from the user's configuration to this one."""


class LinkTime(NamedTuple):
    """Seconds that the links work for the MoE layers in one step; all of it is counted,
    whether other work hides it or not."""

    rows_sec: float
    """Rows to experts and back, with their gradients."""
    weights_sec: float
    """Weights to slots, and their gradients back."""

    @property
    def sec(self) -> float:
        return self.rows_sec + self.weights_sec


def find_strategies(run: Resolved) -> list[Strategy]:
    """Return the strategies of a run: those with its mesh, and those with
    Mesh.expert = 1.

    There is none where experts lie along the tensor axis, of which other tables speak
    (docs/communication.md).
    """
    if run.layout.is_local:
        return []
    return [*_own_mesh(run), *_no_expert_axis(run.cfg)]


def _own_mesh(run: Resolved) -> Iterator[Strategy]:
    """Yield the strategies with the mesh of the run."""
    cfg, mesh = run.cfg, run.cfg.mesh
    name = "expert parallelism" if mesh.expert > 1 else NO_EXPERT_AXIS
    if mesh.data == 1 or "data" in run.layout.axes:
        yield Strategy(name, cfg, ())  # slots are whole
        return
    for gather, how in WAYS.items():
        if gather == "layer" or run.layout.store in GATHERED_ONCE:
            yield _with_gather(Strategy(f"{name}, {how}", cfg, ()), gather)


def _no_expert_axis(cfg: Config) -> Iterator[Strategy]:
    """Yield the strategies with all devices along data."""
    if cfg.mesh.expert == 1:
        return
    data = cfg.mesh.data * cfg.mesh.expert
    # Without owners to balance, what a policy asks of slots has no meaning.
    dispatch = dataclasses.replace(Dispatch(), kernels=cfg.dispatch.kernels)
    params = [f"Mesh.data = {data}", "Mesh.expert = 1"]
    params += [
        f"Dispatch.{field.name} = {default!r}"
        for field in dataclasses.fields(Dispatch)
        if getattr(cfg.dispatch, field.name)
        != (default := getattr(dispatch, field.name))
    ]
    balance = cfg.balance
    if balance.policy != "home" or balance.calibration is not None:
        params += ["Balance.policy = 'home'", "Balance.calibration = None"]
        balance = dataclasses.replace(balance, policy="home", calibration=None)
    mesh = dataclasses.replace(cfg.mesh, data=data, expert=1)
    changed = {"mesh": mesh, "dispatch": dispatch, "balance": balance}
    strategy_cfg = dataclasses.replace(cfg, **changed)
    for gather, how in WAYS.items():
        strategy = Strategy(f"{NO_EXPERT_AXIS}, {how}", strategy_cfg, tuple(params))
        yield _with_gather(strategy, gather)


def _with_gather(strategy: Strategy, gather: str) -> Strategy:
    """Return a strategy whose slots are gathered at these times."""
    if strategy.cfg.dispatch.gather == gather:
        return strategy
    dispatch = dataclasses.replace(strategy.cfg.dispatch, gather=gather)
    params = (*strategy.params, f"Dispatch.gather = {gather!r}")
    return Strategy(
        strategy.name, dataclasses.replace(strategy.cfg, dispatch=dispatch), params
    )


def link_time(run: Resolved, calibration: Calibration) -> LinkTime:
    """Return the seconds of the links in one step of a run, for an even load.

    `calibration` has the speeds of the run's mesh. Along dc parts of gradients are
    summed in each of them alike, and do not count.
    """
    cfg, layout = run.cfg, run.layout
    cost = make_cost_model(cfg, calibration)
    u = layout.exchanged.num_devices
    pair_uu = np.full((u, u), rows_per_step(cfg, layout) / u)
    gathered, scattered = cost.num_gathers(layout)
    copies = dataclasses.replace(cost, gather_sec=0.0)  # slots over data: below
    weights_sec = copies.sync_sec(dataclasses.replace(layout, prefetch=False))
    weights_sec += gathered * cost.gather_sec
    weights_sec += scattered * _scatter_sec(run, calibration, cost.gather_sec)
    num_layers = cfg.model.num_moe_layers
    return LinkTime(
        num_layers * cost.rows_sec(pair_uu, layout),
        num_layers * weights_sec,
    )


def _scatter_sec(run: Resolved, calibration: Calibration, gather_sec: float) -> float:
    """Return the seconds in which the gradient of one slot is scattered over data: by
    all_to_all in the compute dtype, or by reduce-scatter in float32
    (moejax.moe.weights.gather)."""
    if gather_sec == 0:
        return 0.0
    model = run.cfg.model
    dtypes = (model.compute_dtype, model.gradient_reduce_dtype)
    is_wide = "float32" in dtypes
    collective = "reduce_scatter" if is_wide else "all_to_all"
    gather, scatter = (
        find_line(calibration, name, ("data",))["bytes_per_sec"]
        for name in ("all_gather", collective)
    )
    width = ITEMSIZE["float32" if is_wide else "bfloat16"]
    return gather_sec * gather / scatter * width / ITEMSIZE[model.compute_dtype]
