"""Slots: expert weights, from the parameters to the rows that they multiply.

    parameters      gate_edf, up_edf, down_efd: float32, at their owners
        own_experts     cast to the compute dtype, gate beside up
        make_slots      the experts of each slot: copies and slices of other devices'
                        experts (moejax.moe.weights.stores), experts of a domain
        make_whole      the hidden width, over the axes on which it rests; gate and up
                        side by side
    rows            multiplied by into_sdh [s, d, 2f] and down_sfd [s, f, d]

Each arrow is a function that is linear up to the cast. Gradients go back the same way,
and are summed where weights were copied or gathered. What differs is when it happens:

    in the layer that computes        by default
    while the layer before computes   Layout.prefetch (moejax.model.ahead)
    once a step, for all layers       Layout.keeps_slots; with gather='step' their width
                                      is gathered then, too
    when a layer's loads are known    splits that make replicas: own experts go in, and
                                      copies are added inside the layer; split 'top_up'
                                      adds copies to the slots of the plan there

Rows differ between the devices that hold the same expert, so each of them has its own
gradient of a whole slot. Outside of shard_map whole slots are therefore arrays that are
split over all devices that have rows of their own, although some hold equal parts.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.moe.exchange.schedules import find_schedule
from moejax.moe.mesh_roles import Axes, MeshLayout, spec
from moejax.moe.types import Placement
from moejax.moe.weights.compression import ExpertWeights
from moejax.moe.weights.dependency import (
    dependency_spec,
    fits_in_attention,
    is_awaited,
    zero_of,
)
from moejax.moe.weights.domains import gather_in_domain, track, tracked_axes
from moejax.moe.weights.gather import Fsdp, gather
from moejax.moe.weights.over_layers import over_layers
from moejax.moe.weights.stores import (
    EXPERT_BIASES,
    SLOT_DIMS,
    STORES,
    WIDTHS,
    master_param_spec,
    width_dim,
)


@struct.dataclass
class Slots:
    """Expert weights of slots, of one layer or stacked for all layers."""

    weights: ExpertWeights
    """`into` [s, d, 2, f] and `down` [s, f, d], and their biases where experts have
    them, named as in SLOT_DIMS. Of whole slots: into_sdh [s, d, 2f], down_sfd,
    into_bias_sh and down_bias_sw. s counts the slots of all devices."""
    gradients: ExpertWeights | None = None
    """Arrays of the shapes of `weights`, in the dtype of a sum over micro-batches, to
    which `read` sends the gradients. Their values are not read. None: gradients go back
    to where the weights come from."""
    is_whole: bool = struct.field(pytree_node=False, default=False)
    """Whether `make_whole` made them: nothing is left to gather."""

    def read(self) -> ExpertWeights:
        """Return the weights, for use. Their gradients go to `gradients`, if there are
        any, in its dtype.

        A layer reads its slots here, so that its gradients are widened and added to
        their sum before the next layer has any.
        """
        if self.gradients is None:
            return self.weights
        return _read(self.weights, self.gradients)

    def specs(self, mesh_layout: MeshLayout) -> dict[str, P]:
        """Return the PartitionSpecs of the weights: each device has its own slots.

        Their hidden width is still split over the axes over which parameters are
        stored, if it is gathered in each layer. Slots that are gathered once a step
        have no width left to split: every device has its own whole slots, also where
        others have equal ones, so that gradients of slots differ between devices until
        they are summed.
        """
        if self.is_whole:
            return dict.fromkeys(self.weights, spec(_whole_axes(mesh_layout)))
        return _slot_specs(self.weights, mesh_layout)


@jax.custom_vjp
def _read(weights, gradients):
    return weights


def _read_forward(weights, gradients):
    return weights, jax.tree.map(lambda leaf: leaf.dtype.type(0), gradients)


def _read_backward(zeros, d_weights):
    widened = jax.tree.map(lambda d, zero: d.astype(zero.dtype), d_weights, zeros)
    return jax.tree.map(jnp.zeros_like, d_weights), widened


_read.defvjp(_read_forward, _read_backward)


@jax.named_scope("slots")
def own_experts(params: ExpertWeights, dtype) -> Slots:
    """Return a device's own experts as slots in `dtype`, gate beside up: the slots of a
    home plan, before anything travels."""
    gate_edf, up_edf = params["gate_edf"], params["up_edf"]
    joined = {
        "into": jnp.stack([gate_edf.astype(dtype), up_edf.astype(dtype)], axis=2),
        "down": params["down_efd"].astype(dtype),
    }
    if "down_bias_ew" in params:
        both = [params[name].astype(dtype) for name in EXPERT_BIASES[:2]]
        joined["into_bias"] = jnp.stack(both, axis=1)
        joined["down_bias"] = params["down_bias_ew"].astype(dtype)
    return Slots(joined)


def make_slots(
    params: ExpertWeights,
    placement: Placement,
    mesh_layout: MeshLayout,
    dtype,
    gradient_reduce_dtype: str,
    tracked_sx: Float[Array, "s x"] | None = None,
    attention_flops: float | None = None,
) -> tuple[Slots, Int[Array, " w"] | None]:
    """Return the slots of one layer in `dtype`, and what tells that copies in them have
    arrived, or None. With a split that makes replicas these are own experts alone.

    `params` are the parameters gate_edf, up_edf and down_efd of the layer, and biases
    where experts have them, in the order of the plan's `owned_le`. An empty slot is
    zeros. In a domain each device has the slots of all members, and gradients travel
    between them in `gradient_reduce_dtype` (Model.gradient_reduce_dtype). If
    `tracked_sx` is given, other members' slots are the estimates in it.

    If `attention_flops` is given, and copies are awaited (`dependency.is_awaited`), the
    second result is a zero of each device for which the rows of the layer before can
    wait. It is known when what travels under the attention of that layer has arrived:
    the copies, or the offers alone if both take longer than `attention_flops`.
    """
    layout, own = mesh_layout.layout, own_experts(params, dtype).weights
    # Splits that make replicas add copies in the layer, once its loads are known.
    is_late = layout.copies_after_gather
    store = "owned" if layout.makes_replicas or is_late else layout.store
    has_dependency = attention_flops is not None and is_awaited(mesh_layout)

    def body(own, placement, tracked_sx):
        slots, offers_px = STORES[store](own, placement, mesh_layout)
        dependency = None
        if has_dependency:
            parts = list(own.values())
            is_short = fits_in_attention(parts, mesh_layout, attention_flops)
            dependency = zero_of(slots["down"] if is_short else offers_px)
        of_domain = slots, mesh_layout, gradient_reduce_dtype, tracked_sx
        slots = gather_in_domain(*of_domain)
        if is_late:
            slots, _ = STORES[layout.store](slots, placement, mesh_layout.exchanged)
        if layout.gather == "step":
            slots = _gather_width(slots, mesh_layout, gradient_reduce_dtype)
        return slots, dependency

    tracked_spec = None if tracked_sx is None else spec(*tracked_axes(mesh_layout)[1:])
    slots, dependency = jax.shard_map(
        jax.named_scope("slots")(body),
        mesh=mesh_layout.mesh,
        in_specs=(_param_specs(own, mesh_layout), P(), tracked_spec),
        out_specs=(
            _slot_specs(own, mesh_layout),
            dependency_spec(mesh_layout) if has_dependency else None,
        ),
    )(own, placement, tracked_sx)
    return Slots(slots), dependency


@jax.named_scope("slots")
def make_slots_of_layers(
    params: ExpertWeights, placement: Placement, mesh: Mesh, *args
) -> Slots:
    """Return the slots of all layers, made one layer after the other: `make_slots` of
    arguments with a leading layer dim, and of `args` as they are."""

    def make(of_layer):
        return make_slots(*of_layer, *args)[0]

    return over_layers(make, (params, placement), mesh)


def make_whole(
    slots: Slots, mesh_layout: MeshLayout, gradient_reduce_dtype: str
) -> Slots:
    """Return the whole slots of one layer, so that another layer may make them ahead:
    outside of a layer's shard_map."""
    axes = _whole_axes(mesh_layout)

    def body(weights):
        part = weights["down"]
        missing = set(axes) - jax.typeof(part).manual_axis_type.varying
        x = jax.lax.pcast(part, tuple(sorted(missing)), to="varying")
        return whole(weights, x, mesh_layout, gradient_reduce_dtype, is_joined=True)

    made = jax.shard_map(
        body,
        mesh=mesh_layout.mesh,
        in_specs=(slots.specs(mesh_layout),),
        out_specs=spec(axes),
    )(slots.read())
    return Slots(made, is_whole=True)


@jax.named_scope("slots")
def whole(
    weights: ExpertWeights,
    x_nd: Array,
    mesh_layout: MeshLayout,
    gradient_reduce_dtype: str,
    is_joined: bool = False,
) -> ExpertWeights:
    """Gather the hidden width of this device's slots over the axes on which parameters
    rest, unless that was done once for the step, and lay gate and up weights side by
    side. For use inside shard_map.

    The result varies over the mesh axes of `x_nd` and of the slots. The transpose sums
    gradients, and scatters them back. If `is_joined`, both weights are copied into one
    collective, which starts as a whole: more of it hides where it travels ahead.
    """
    along = mesh_layout.master_axes if mesh_layout.layout.gather == "layer" else ()
    fsdp = Fsdp(along, None, gradient_reduce_dtype)
    into, down = (weights["into"], 3), (weights["down"], 1)
    gathered = []
    for group in [(into, down)] if is_joined else [(into,), (down,)]:
        gathered += gather(*zip(*group), x_nd, fsdp)
    into_sd2f, down_sfd = gathered
    s, d = into_sd2f.shape[:2]
    made = {"into_sdh": into_sd2f.reshape(s, d, -1), "down_sfd": down_sfd}
    if "down_bias" in weights:
        parts = (weights["into_bias"], weights["down_bias"])
        into_s2f, down_bias_sw = gather(parts, (2, 1), x_nd, fsdp)
        made["into_bias_sh"] = into_s2f.reshape(s, -1)
        made["down_bias_sw"] = down_bias_sw
    return made


def track_experts(
    params: ExpertWeights, tracked_lsx: Array | None, mesh_layout: MeshLayout, dtype
) -> Float[Array, "l s x"]:
    """Return the estimates of compressed experts that the devices of a domain hold,
    updated for the current parameters, for all layers.

    `params` are the expert parameters [l, e, ..] (moejax.moe.weights.domains.track).
    """
    experts = jax.vmap(partial(own_experts, dtype=dtype))(params).weights
    specs = _param_specs(experts, mesh_layout)
    specs = {name: P(None, *of_layer) for name, of_layer in specs.items()}
    return track(experts, tracked_lsx, mesh_layout, specs)


def _gather_width(
    slots: ExpertWeights, mesh_layout: MeshLayout, gradient_reduce_dtype: str
) -> ExpertWeights:
    """Return slots with their whole hidden width, from this device's part of it.

    The transpose sums the gradients of all devices that compute the same experts, and
    scatters them to where the width rests.
    """
    fsdp = Fsdp(mesh_layout.master_axes, None, gradient_reduce_dtype)
    tokens = jax.lax.pcast(jnp.zeros(()), mesh_layout.batch_axes, to="varying")
    dims = {n: width_dim(SLOT_DIMS[n]) for n in slots}
    return {n: gather((slots[n],), (dims[n],), tokens, fsdp)[0] for n in slots}


def _param_specs(own: ExpertWeights, mesh_layout: MeshLayout) -> dict[str, P]:
    """Return the PartitionSpecs of own experts: those of their parameters."""
    store = mesh_layout.layout.store
    return {n: master_param_spec(SLOT_DIMS[n], store, mesh_layout) for n in own}


def _slot_specs(weights: ExpertWeights, mesh_layout: MeshLayout) -> dict[str, P]:
    if mesh_layout.layout.gather != "step":
        return {
            n: master_param_spec(SLOT_DIMS[n], "owned", mesh_layout) for n in weights
        }
    experts = mesh_layout.replica_axes + mesh_layout.owner_axes
    where = {"e": experts} | dict.fromkeys(WIDTHS, mesh_layout.shard_axes)
    return {n: spec(*(where.get(dim, ()) for dim in SLOT_DIMS[n])) for n in weights}


def _whole_axes(mesh_layout: MeshLayout) -> Axes:
    """Return the mesh axes over which whole slots are split: those along which rows or
    experts differ between devices, in the order of the mesh."""
    tokens = find_schedule(mesh_layout).split(mesh_layout)
    experts = mesh_layout.owner_axes + mesh_layout.width_axes
    differ = {*mesh_layout.batch_axes, *tokens, *experts}
    return tuple(axis for axis in mesh_layout.mesh.axis_names if axis in differ)
