"""How expert weights reach the slots of this device, and their gradients the masters.

    slots(weights, placement, mesh_layout, dtype) -> slot weights, differentiable

    owned       a slot is the place of its expert's masters: nothing travels
    transient,  owners cut what they offer into slices and scatter them; each device
    resident    gathers the slices of its copies: (offers + copies) experts per device
                and direction, however many replicas one expert has
    sharded     masters are split by hidden width over all devices: each gathers the
                slices of all its slots

Devices are those of a group (MeshLayout.owner_axes). Along expert alone, data splits
the hidden width of masters and slots until a layer computes; merged, nothing else
splits them.

Gradients go back the same way. Replicas are summed where their slices meet, in float32
and in a fixed order, then once more at the owner.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.axes import AxisNames
from moejax.moe.mesh_roles import MeshLayout, index_along, spec
from moejax.moe.types import Placement
from moejax.moe.weights.domains import gathered_in_domain, track, tracked_axes
from moejax.moe.weights.gradient_compression import scatter

Weights = dict[str, Array]

EXPERT_PARAMS = ("gate_edf", "up_edf", "down_efd")
EXPERT_DIMS = ("edf", "edf", "efd")
"""Names of an MoE layer's expert parameters."""
SLOT_DIMS = {"into": "ed2f", "down": "efd"}
"""Slots of all devices: into_sd2f, gate beside up, and down_sfd."""


def master_param_spec(dims: str, store: str, mesh_layout: MeshLayout) -> P:
    """Where an expert parameter of these dims ('edf') lies: experts by owner, hidden
    width by shard and, where it rests, over data. Under 'sharded' all devices have a
    part of every expert's width; groups that data belongs to split no width over it."""
    where = {"e": mesh_layout.owner_axes, "f": mesh_layout.width_axes}
    if store == "sharded":
        where = {"e": (), "f": mesh_layout.width_axes + mesh_layout.owner_axes}
    return spec(*(where.get(dim, ()) for dim in dims))


def slot_specs(mesh_layout: MeshLayout) -> dict[str, P]:
    """Where slots lie: with each device; what rests over data still does."""
    return {
        n: master_param_spec(dims, "owned", mesh_layout)
        for n, dims in SLOT_DIMS.items()
    }


def slots(
    weights: Weights,
    placement: Placement,
    mesh_layout: MeshLayout,
    dtype,
    tracked_sx: Float[Array, "s x"] | None = None,
) -> Weights:
    """One layer's slots in `dtype`: into_sd2f and down_sfd, split as slot_specs says.

    weights: gate_edf, up_edf, down_efd, masters in the order of the plan's `owned_le`.
    An empty slot is zeros. In a domain each device has the slots of all: as they are,
    or, with `tracked_sx`, its own as they are and others as tracked.
    """
    store = mesh_layout.layout.store
    specs = {n: master_param_spec(d, store, mesh_layout) for n, d in SLOT_DIMS.items()}

    def body(master_params, placement, tracked_sx):
        slots = STORES[store](master_params, placement, mesh_layout)
        return gathered_in_domain(slots, mesh_layout, tracked_sx)

    where = None if tracked_sx is None else spec(*tracked_axes(mesh_layout)[1:])
    return jax.shard_map(
        jax.named_scope("slots")(body),
        mesh=mesh_layout.mesh,
        in_specs=(specs, P(), where),
        out_specs=slot_specs(mesh_layout),
    )(join_gate_up(weights, dtype), placement, tracked_sx)


def track_experts(
    weights: Weights, tracked_lsx: Array | None, mesh_layout: MeshLayout, dtype
) -> Float[Array, "l s x"]:
    """moejax.moe.weights.domains.track, of the masters of all layers, weights [l, e,
    ..]."""
    store = mesh_layout.layout.store
    specs = {
        n: P(None, *master_param_spec(d, store, mesh_layout))
        for n, d in SLOT_DIMS.items()
    }
    experts = jax.vmap(lambda weights: join_gate_up(weights, dtype))(weights)
    return track(experts, tracked_lsx, mesh_layout, specs)


def scatter_gradients(
    grads: Weights, residual_lsx: Array, mesh_layout: MeshLayout, dtype
) -> tuple[Weights, Float[Array, "l s x"]]:
    """moejax.moe.weights.gradient_compression.scatter, of the slots of all layers;
    gradients of masters, and what is kept."""
    specs = {n: P(None, *s) for n, s in slot_specs(mesh_layout).items()}
    own, residual_lsx = scatter(grads, residual_lsx, mesh_layout, specs, dtype)
    gate_ledf, up_ledf = jnp.moveaxis(own["into"], 3, 0)
    return dict(zip(EXPERT_PARAMS, (gate_ledf, up_ledf, own["down"]))), residual_lsx


def join_gate_up(weights: Weights, dtype) -> Weights:
    """Masters in `dtype` as slots are: gate and up beside one another."""
    gate_edf, up_edf = weights["gate_edf"], weights["up_edf"]
    return {
        "into": jnp.stack([gate_edf.astype(dtype), up_edf.astype(dtype)], axis=2),
        "down": weights["down_efd"].astype(dtype),
    }


def slots_of_layers(make, *of_layers) -> Weights:
    """Slots of all layers, one after the other; make(weights, placement, ..) of one."""

    def layer(_, args):
        return None, make(*args)

    return jax.lax.scan(layer, None, of_layers)[1]


def keep_owned(master_params, placement, mesh_layout: MeshLayout) -> Weights:
    return master_params


def gather_copies(
    master_params: Weights, placement: Placement, mesh_layout: MeshLayout
) -> Weights:
    """Slots from own experts and from copies."""
    me = index_along(mesh_layout.owner_axes)
    fill_s, layout = placement.fill_lws[me], mesh_layout.layout
    copies = [own[:0] for own in master_params.values()]
    if layout.copies_per_device and layout.offers_per_device:
        offer_o = placement.offer_lwo[me]
        offered = [pick(own, offer_o) for own in master_params.values()]
        copies = exchange_copies(offered, placement.want_lwc, mesh_layout.owner_axes)
    return {
        name: pick(jnp.concatenate([own, copy]), fill_s)
        for (name, own), copy in zip(master_params.items(), copies)
    }


def exchange_copies(
    offered: list[Array], want_wc: Int[Array, "w c"], group: AxisNames
) -> list[Array]:
    """Copies of this device, [c, ..] per weight: scattered, then gathered by slices.

    Each of the weights [o, ..] is laid out flat and cut into w slices, the last one
    padded. `want_wc` counts offers over all devices, and is the same on all of them.
    """
    (w, copies), offers = want_wc.shape, len(offered[0])
    flat_ox = jnp.concatenate([x.reshape(offers, -1) for x in offered], axis=1)
    size = flat_ox.shape[1]
    flat_ox = jnp.pad(flat_ox, ((0, 0), (0, -size % w)))
    slices_wox = _to_all(flat_ox.reshape(offers, w, -1).swapaxes(0, 1), group)
    every_px = slices_wox.reshape(-1, slices_wox.shape[-1])  # offers of all owners
    wanted_wcx = pick(every_px, want_wc.reshape(-1)).reshape(w, copies, -1)
    whole_cx = _to_all(wanted_wcx, group).swapaxes(0, 1).reshape(copies, -1)[:, :size]
    ends = np.cumsum([x[0].size for x in offered])[:-1]
    parts = jnp.split(whole_cx, ends, axis=1)
    return [part.reshape(copies, *x.shape[1:]) for part, x in zip(parts, offered)]


def gather_sharded(
    master_params: Weights, placement: Placement, mesh_layout: MeshLayout
) -> Weights:
    """Slots from the slices of every expert that all devices have."""
    table_p = placement.slot_to_expert_lp

    def gathered(part_exx: Array, hidden_dim: int) -> Array:
        slices_pxx = pick(part_exx, table_p)
        if not (group := mesh_layout.owner_axes):
            return slices_pxx
        return jax.lax.all_to_all(
            slices_pxx, group, split_axis=0, concat_axis=hidden_dim, tiled=True
        )

    return {
        "into": gathered(master_params["into"], 3),
        "down": gathered(master_params["down"], 1),
    }


STORES = {
    "owned": keep_owned,
    "transient": gather_copies,
    "resident": gather_copies,
    "sharded": gather_sharded,
}


@jax.custom_vjp
def pick(
    row_qx: Float[Array, "q ..."], index_s: Int[Array, " s"]
) -> Float[Array, "s ..."]:
    """row[index]; zeros for -1. Its gradient sums in float32, in a fixed order: no
    scatter, whose order on a GPU is chance."""
    taken_sx = row_qx[jnp.maximum(index_s, 0)]
    is_real_s = (index_s >= 0).reshape(-1, *(1,) * (row_qx.ndim - 1))
    return jnp.where(is_real_s, taken_sx, 0)


def _pick_forward(row_qx, index_s):
    return pick(row_qx, index_s), (index_s, jnp.arange(row_qx.shape[0]))


def _pick_backward(saved, d_taken_sx):
    index_s, place_q = saved
    wide = jnp.promote_types(d_taken_sx.dtype, jnp.float32)
    hit_qs = (place_q[:, None] == index_s).astype(wide)
    d_row_qx = jnp.tensordot(
        hit_qs, d_taken_sx.astype(wide), axes=1, precision=jax.lax.Precision.HIGHEST
    )
    return d_row_qx.astype(d_taken_sx.dtype), None


pick.defvjp(_pick_forward, _pick_backward)


def _to_all(chunk_wx: Array, group: AxisNames) -> Array:
    if not group:
        return chunk_wx
    return jax.lax.all_to_all(chunk_wx, group, split_axis=0, concat_axis=0, tiled=True)
