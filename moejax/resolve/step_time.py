"""Predicted seconds of a train step on devices that need not be here, by parts.

Blocks are those of the cost model, for an even load in the home placement, at the run's
speeds. What it leaves out is added at a target's rates: the head, and the bytes of
weights that the update and each micro-batch move. Elementwise work of activations is in
no part. docs/measured.md has clocks beside predictions.
"""

import dataclasses

import numpy as np

from moejax.model.flops import flops_per_token
from moejax.model.parameters import count
from moejax.perf.rates import Rates
from moejax.plan.layout import ITEMSIZE
from moejax.resolve.memory import state_bytes
from moejax.resolve.partition import rows_per_step
from moejax.resolve.resolved import Resolved

FLOAT32 = 4
"""Bytes of a master parameter, of a gradient, and of a second moment."""
NEWTON_SCHULZ_STEPS = 5
"""Steps of optax's Newton-Schulz iteration in an update of Muon."""
HEAD_PASSES = 4
"""Passes of the head: forward, its repetition for the gradient, and two products
backward."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a train step on each device, by what takes them."""

    experts: float
    exchange: float
    """Rows that travel to experts and back, before other work hides any."""
    copies: float
    """Weights that travel to slots and gradients that return, as far as nothing hides
    them."""
    blocks: float
    """Attention, dense parts and shared experts."""
    head: float
    weights: float
    """Casts of weights and sums of their gradients in each micro-batch, and the
    update: bytes of device memory, and Muon's products."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(dataclasses.astuple(self))


def predict(run: Resolved, rates: Rates | None, master_bytes: int) -> StepTime:
    """Return the predicted time of a train step of a run, whose devices hold
    `master_bytes` of parameters each.

    `rates` are those of a target. None: the calibration's FLOP/s count for the head
    too, and `weights` is 0, since no rate of memory was measured.
    """
    cfg, layout = run.cfg, run.layout
    shape = cfg.model.num_moe_layers, layout.num_devices, layout.num_experts
    load_lwe = np.full(shape, rows_per_step(cfg, layout) / layout.num_experts)
    plan, num_blocks = run.home_plan(), cfg.model.num_layers
    parts = run.cost.step_parts(load_lwe, plan, layout, num_blocks)
    tokens = cfg.train.batch_size * cfg.data.seq_len / cfg.mesh.num_devices
    head_flops = HEAD_PASSES * flops_per_token(cfg.network).head * tokens
    head_rate, weights_sec = run.cost.flops_per_sec, 0.0
    if rates is not None:
        moved = master_bytes / FLOAT32 * _bytes_per_param(run)
        head_rate = rates.dense_flops_per_sec
        weights_sec = moved / rates.hbm_bytes_per_sec
        weights_sec += _orthogonal_flops(run) / head_rate
    return StepTime(
        experts=parts.experts,
        exchange=parts.wires,
        copies=parts.copies,
        blocks=parts.blocks,
        head=head_flops / head_rate,
        weights=weights_sec,
    )


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
