"""Whole slots: the hidden width of slots gathered over the axes on which weights rest.

    whole         inside a layer's shard_map, where its rows are multiplied
    whole_slots   outside of it, so that another layer may make them ahead

Rows differ between the devices that hold the same expert, so each of them has its own
gradient of a whole slot. Outside of shard_map whole slots are therefore arrays that are
split over all devices that have rows of their own, although some hold equal parts.
Their gradients are summed where the slots were gathered, as inside a layer.
"""

from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from moejax.moe.exchange.schedules import find_schedule
from moejax.moe.mesh_roles import Axes, MeshLayout, spec
from moejax.moe.weights.compression import ExpertWeights
from moejax.moe.weights.gather import Rest, gather
from moejax.moe.weights.stores import slot_specs


class WholeSlots(NamedTuple):
    """Slots of one layer that `whole_slots` made: nothing is left to gather."""

    weights: ExpertWeights
    """into_sdh [s, d, 2f], gate and up side by side, and down_sfd, where s counts the
    slots of all devices that `whole_axes` names; into_bias_sh and down_bias_sw where
    experts have biases."""


@jax.named_scope("slots")
def whole(
    slots: ExpertWeights,
    x_nd: Array,
    mesh_layout: MeshLayout,
    gradient_reduce_dtype: str,
    is_joined: bool = False,
) -> ExpertWeights:
    """Gather the hidden width of this device's slots over the axes on which parameters
    rest, unless that was done once for the step, and lay gate and up weights side by
    side.

    The result varies over the mesh axes of `x_nd` and of the slots. The transpose sums
    gradients, and scatters them back. If `is_joined`, both weights are copied into one
    collective, which starts as a whole: more of it hides where it travels ahead.
    """
    along = mesh_layout.master_axes if mesh_layout.layout.gather == "layer" else ()
    rest = Rest(along, None, gradient_reduce_dtype)
    into, down = (slots["into"], 3), (slots["down"], 1)
    gathered = []
    for group in [(into, down)] if is_joined else [(into,), (down,)]:
        gathered += gather(*zip(*group), x_nd, rest)
    into_sd2f, down_sfd = gathered
    s, d = into_sd2f.shape[:2]
    weights = {"into_sdh": into_sd2f.reshape(s, d, -1), "down_sfd": down_sfd}
    if "down_bias" in slots:
        parts = (slots["into_bias"], slots["down_bias"])
        into_s2f, down_bias_sw = gather(parts, (2, 1), x_nd, rest)
        weights["into_bias_sh"] = into_s2f.reshape(s, -1)
        weights["down_bias_sw"] = down_bias_sw
    return weights


def whole_slots(
    slots: ExpertWeights, mesh_layout: MeshLayout, gradient_reduce_dtype: str
) -> WholeSlots:
    """Return the whole slots of one layer, from those that `stores.slots` made."""
    axes = whole_axes(mesh_layout)

    def body(slots):
        part = slots["down"]
        missing = set(axes) - jax.typeof(part).manual_axis_type.varying
        x = jax.lax.pcast(part, tuple(sorted(missing)), to="varying")
        return whole(slots, x, mesh_layout, gradient_reduce_dtype, is_joined=True)

    made = jax.shard_map(
        body,
        mesh=mesh_layout.mesh,
        in_specs=(slot_specs(mesh_layout, slots),),
        out_specs=spec(axes),
    )(slots)
    return WholeSlots(made)


def whole_axes(mesh_layout: MeshLayout) -> Axes:
    """Return the mesh axes over which whole slots are split: those along which rows or
    experts differ between devices, in the order of the mesh."""
    tokens = find_schedule(mesh_layout).split(mesh_layout)
    experts = mesh_layout.owner_axes + mesh_layout.width_axes
    differ = {*mesh_layout.batch_axes, *tokens, *experts}
    return tuple(axis for axis in mesh_layout.mesh.axis_names if axis in differ)


def whole_spec(mesh_layout: MeshLayout) -> P:
    """Return the PartitionSpec of each array of WholeSlots."""
    return spec(whole_axes(mesh_layout))
