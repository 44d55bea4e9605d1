"""Predicted seconds of a train step on devices that need not be here, by parts.

Blocks are those of the cost model, at the run's speeds. What it leaves out is added:
the head, and the bytes of weights that the update and each micro-batch move, at the
rates of a device; collectives of dense weights and of gradients, on the lines of the
calibration. Elementwise work of activations is in no part. docs/measured.md has clocks
beside predictions.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from moejax.config import Config
from moejax.model.flops import expert_params, flops_per_token, num_params
from moejax.model.parameters import count
from moejax.perf import terms
from moejax.perf.calibration import leaving_bytes
from moejax.perf.cluster import Device
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import ITEMSIZE, Layout
from moejax.resolve.memory import state_bytes
from moejax.resolve.partition import micro_batch_tokens, rows_per_step
from moejax.resolve.resolved import Resolved

FLOAT32 = 4
"""Bytes of a master parameter, of a gradient, and of a second moment."""
NEWTON_SCHULZ_STEPS = 5
"""Steps of optax's Newton-Schulz iteration in an update of Muon."""
HEAD_PASSES = 4
"""Passes of the head: forward, its repetition for the gradient, and two products
backward."""


class Scene(NamedTuple):
    """Loads of some MoE layers of a run, and what they meet."""

    load_lwe: np.ndarray
    """Rows in a step from each source device to each expert [l, w, e]; all MoE layers
    take as long as the mean of these."""
    plan: ExpertPlan
    layout: Layout


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a train step on each device, by what takes them."""

    experts: float
    wait: float
    """Waiting for the fullest device of each MoE layer."""
    exchange: float
    """Rows that travel to experts and back, before other work hides any."""
    copies: float
    """Weights that travel to slots and gradients that return, or are summed along dc,
    as far as nothing hides them."""
    blocks: float
    """Attention, dense parts and shared experts."""
    dense: float
    """Collectives of dense weights and their gradients, as far as blocks and experts do
    not hide them, and of activations along the tensor axis."""
    dc: float
    """Sums of dense weights' gradients along dc."""
    head: float
    weights: float
    """Casts of weights and sums of their gradients in each micro-batch, and the
    update: bytes of device memory, and Muon's products."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(dataclasses.astuple(self))


def predict(
    run: Resolved,
    device: Device | None,
    master_bytes: int,
    scene: Scene | None = None,
) -> StepTime:
    """Return the predicted time of a train step of a run, whose devices hold
    `master_bytes` of parameters each.

    `device` has stated rates. None: the calibration's FLOP/s count for the head too,
    and `weights` is 0, since no rate of memory was measured. Without a `scene` the load
    is even, and experts are at home.
    """
    cfg, cost = run.cfg, run.cost
    load_lwe, plan, layout = scene or even_scene(run)
    parts = cost.step_parts(load_lwe, plan, layout, cfg.model.num_layers)
    share = cfg.model.num_moe_layers / len(load_lwe)
    tokens = cfg.train.batch_size * cfg.data.seq_len / cfg.mesh.num_devices
    head_flops = HEAD_PASSES * flops_per_token(cfg.network).head * tokens
    head_rate, weights_sec = cost.flops_per_sec, 0.0
    if device is not None:
        moved = master_bytes / FLOAT32 * _bytes_per_param(run)
        head_rate = device.dense_flops_per_sec
        weights_sec = moved / device.hbm_bytes_per_sec
        weights_sec += _orthogonal_flops(run) / head_rate
    hiding_sec = (parts.blocks + share * parts.experts) * cost.overlaps
    return StepTime(
        experts=share * parts.experts,
        wait=share * parts.wait,
        exchange=share * parts.wires,
        copies=share * parts.copies,
        blocks=parts.blocks,
        dense=max(0.0, _dense_sec(run) - hiding_sec) + _tensor_sec(run),
        dc=_dc_sec(run),
        head=head_flops / head_rate,
        weights=weights_sec,
    )


def even_scene(run: Resolved) -> Scene:
    """Return an even load of all MoE layers, with experts at home."""
    cfg, layout = run.cfg, run.layout
    shape = cfg.model.num_moe_layers, layout.num_devices, layout.num_experts
    load_lwe = np.full(shape, rows_per_step(cfg, layout) / layout.num_experts)
    return Scene(load_lwe, run.home_plan(), layout)


def _dense_sec(run: Resolved) -> float:
    """Return the time in which dense weights are gathered over data and expert, and
    their gradients scattered, in each micro-batch (moejax.moe.weights.gather)."""
    cfg = run.cfg
    group = {axis: getattr(cfg.mesh, axis) for axis in ("data", "expert")}
    w = terms.num_devices(group)
    size = _dense_params(cfg) / cfg.mesh.tensor
    model, steps = cfg.model, cfg.train.accumulate_steps
    widths = ITEMSIZE[model.compute_dtype], ITEMSIZE[model.gradient_reduce_dtype]
    passes = (
        ("all_gather", widths[0], steps * run.cost.num_fetched),
        ("reduce_scatter", max(widths), steps),
    )
    found = (
        terms.collective_term(
            run.cost.lines, name, group, leaving_bytes(name, size * width, w), times
        )
        for name, width, times in passes
    )
    return sum(term.sec for term in found)


def _dc_sec(run: Resolved) -> float:
    """Return the time in which gradients of dense weights are summed along dc, in
    float32 and in each micro-batch."""
    cfg = run.cfg
    size = FLOAT32 * _dense_params(cfg) * cfg.mesh.dc / cfg.mesh.num_devices
    leaving = leaving_bytes("all_reduce", size, cfg.mesh.dc)
    times, group = cfg.train.accumulate_steps, {"dc": cfg.mesh.dc}
    lines = run.cost.lines
    return terms.collective_term(lines, "all_reduce", group, leaving, times).sec


def _tensor_sec(run: Resolved) -> float:
    """Return the time in which the devices of a tensor axis sum hidden states: after
    attention in each pass, and its gradients. Those of MoE layers are rows of the
    exchange; dense layers sum as attention does."""
    cfg = run.cfg
    layers = 2 * cfg.model.num_layers - cfg.model.num_moe_layers
    passes = 2 + (cfg.model.repeats == "full")
    size = micro_batch_tokens(cfg) * run.cost.bytes_per_row
    leaving = leaving_bytes("all_reduce", size, cfg.mesh.tensor)
    times = passes * layers * cfg.train.accumulate_steps
    group = {"tensor": cfg.mesh.tensor}
    return terms.collective_term(
        run.cost.lines, "all_reduce", group, leaving, times
    ).sec


def _dense_params(cfg: Config) -> int:
    """Return the number of parameters that are not of routed experts."""
    routed = cfg.moe.num_experts * expert_params(cfg.network)
    return num_params(cfg.network)["total"] - routed


def _bytes_per_param(run: Resolved) -> float:
    """Return the bytes that a step moves for each master parameter of a device.

    Update: parameter and moments are read and written, the gradient is read; of a
    frozen parameter nothing is. In a micro-batch a weight is cast once, and again where
    the backward pass repeats it; its gradient is added to a sum.
    """
    cfg, held = run.cfg, state_bytes(run.cfg)
    width = ITEMSIZE[cfg.model.compute_dtype]
    trained = held["trained"] / held["params"]
    moments = FLOAT32 * held["moments"] / held["params"]
    update = 2 * (FLOAT32 * trained + moments) + FLOAT32 * trained
    cast = FLOAT32 + width if width < FLOAT32 else 0
    gradient = trained * (width + 2 * FLOAT32)
    micro_batch = run.cost.num_fetched * cast + gradient
    return update + cfg.train.accumulate_steps * micro_batch


def _orthogonal_flops(run: Resolved) -> float:
    """Return the FLOPs of a device in Muon's five steps of Newton-Schulz, each with two
    products X X^T or as large, and one of squares. All devices but those along dc share
    the matrices."""
    cfg = run.cfg
    if cfg.optimizer.name != "muon":
        return 0.0
    found = count(cfg.network, cfg.optimizer)
    flops = NEWTON_SCHULZ_STEPS * (2 * found.matrix_flops + found.square_flops)
    return flops * cfg.mesh.dc / cfg.mesh.num_devices
