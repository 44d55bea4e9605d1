"""Call an MoE layer of a model with its inputs in one pass."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.config import Points
from moejax.model.sharding import halve_rows
from moejax.moe import recorded
from moejax.moe.dense import dense
from moejax.moe.layer import LayerInputs, MoeLayer, moe_layer_of_parts
from moejax.moe.setup import LayerSetup
from moejax.moe.types import LayerSums, Placement
from moejax.moe.weights.slots import Slots, make_slots

Parts = tuple[Float[Array, "b t d"], ...]
"""Activations of a batch: one array, or two halves of each device's sequences that have
nothing in common but the weights (Moe.halves)."""


class MoeInputs(NamedTuple):
    """Arrays that one MoE layer reads beside its activations and parameters; stacked on
    a leading dim for all layers."""

    placement: Placement
    chance_e: Float[Array, " e"] | None = None
    """With recorded routing, the probability that a token chooses each expert. None:
    the router chooses."""
    key: Array | None = None
    """Random key for jitter and for recorded choices."""
    tracked_sx: Float[Array, "s x"] | None = None
    """Estimates of compressed experts (moejax.moe.weights.domains), from which the
    layer makes its slots."""
    slots: Slots | None = None
    """Weights of the slots, if they were made before the layer. None: the layer makes
    them from its parameters."""
    dependency: Array | None = None
    """Zeros that tell when the copies of another layer's experts have arrived
    (moejax.moe.weights.dependency)."""


class RoutingMode(NamedTuple):
    """Static choices of how the MoE layers of a model route in one pass."""

    jitter: float = 0.0
    """Half-width of the interval around 1 from which factors on the router's input are
    drawn; 0 for none."""
    is_dense: bool = False
    """Whether every expert computes every token (moejax.moe.dense)."""
    points: Points = "random"
    """How the tokens draw their experts with recorded routing (Recorded.points)."""


class MoeOptions(NamedTuple):
    """Static options of all MoE layers in one pass of a model."""

    setup: LayerSetup
    mode: RoutingMode


def routed_experts(
    layer: MoeLayer, inputs: MoeInputs, parts: Parts, options: MoeOptions
) -> tuple[Parts, LayerSums]:
    """Return the output of an MoE layer for each part of a batch, and its sums."""
    (setup, mode), placement = options, inputs.placement
    b, t, d = parts[0].shape
    shape = (len(parts) * b, t, d)
    jitter_btd = forced_btk = None
    if mode.jitter:
        low, high = 1 - mode.jitter, 1 + mode.jitter
        jitter_btd = jax.random.uniform(inputs.key, shape, jnp.float32, low, high)
    if mode.is_dense:
        y_btd, sums = dense(layer, *parts, placement, setup, jitter_btd)
        return (y_btd,), sums
    if inputs.chance_e is not None:
        point_bt = recorded.draw_points(mode.points, inputs.key, shape[:2])
        forced_btk = recorded.choose(inputs.chance_e, point_bt, setup.moe.top_k)
    slots = inputs.slots
    if slots is None and inputs.tracked_sx is not None:
        how = setup.mesh_layout, parts[0].dtype, setup.gradient_reduce_dtype
        params = layer.master_params()
        slots, _ = make_slots(params, placement, *how, inputs.tracked_sx)
    drawn = []
    for value in (jitter_btd, forced_btk):
        if value is None or len(parts) == 1:
            drawn.append((value,) * len(parts))
        else:
            drawn.append(halve_rows(value, setup.mesh))
    return moe_layer_of_parts(
        layer.params(),
        tuple(map(LayerInputs, parts, *drawn)),
        placement,
        setup,
        slots=slots,
        dependency=inputs.dependency,
    )
