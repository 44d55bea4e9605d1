"""How expert weights reach the slots of this device, and their gradients the masters.

    slots(weights, placement, layout, mesh, dtype) -> slot weights, differentiable

    owned       a slot is the place of its expert's masters: nothing travels
    transient,  owners cut what they offer into slices and scatter them; each device
    resident    gathers the slices of its copies: (offers + copies) experts per device
                and direction, however many replicas one expert has
    sharded     masters are split by hidden width over all devices: each gathers the
                slices of all its slots

Devices are those of a group (Layout.axes). Along expert alone, data splits the hidden
width of masters and slots until a layer computes; merged, nothing else splits them.

Gradients go back the same way. Replicas are summed where their slices meet, in float32
and in a fixed order, then once more at the owner.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax import axes
from moejax.axes import AxisNames
from moejax.layout import Layout
from moejax.types import Placement

Weights = dict[str, Array]

MASTERS = ("gate_edf", "up_edf", "down_efd")
"""Names of an MoE layer's expert parameters."""
SLOT_SPLITS = {
    "into": (axes.EXPERT, None, None, axes.DATA),
    "down": (axes.EXPERT, axes.DATA, None),
}
"""Slots of all devices: into_sd2f, gate beside up, and down_sfd."""


def master_spec(split: tuple, store: str, group: AxisNames) -> P:
    """Where an expert parameter lies, of its split (expert, .., data, ..) under a store
    of owners in groups along expert. Under 'sharded' all devices have a part of every
    expert's width; merged groups split experts over data too, and no width."""
    instead = {}
    if store == "sharded":
        instead = {axes.EXPERT: None, axes.DATA: (axes.DATA, axes.EXPERT)}
    elif axes.DATA in group:
        instead = {axes.EXPERT: group, axes.DATA: None}
    return P(*(instead.get(axis, axis) for axis in split))


def slot_specs(layout: Layout) -> dict[str, P]:
    """Where slots lie: with each device, what is split over data still is."""
    return {n: master_spec(s, "owned", layout.axes) for n, s in SLOT_SPLITS.items()}


def slots(
    weights: Weights, placement: Placement, layout: Layout, mesh: Mesh, dtype
) -> Weights:
    """One layer's slots in `dtype`: into_sd2f and down_sfd, split as slot_specs says.

    weights: gate_edf, up_edf, down_efd, masters in the order of the plan's `owned_le`.
    An empty slot is zeros.
    """
    store, group = layout.store, layout.axes
    specs = {n: master_spec(s, store, group) for n, s in SLOT_SPLITS.items()}
    body = partial(STORES[layout.store], layout=layout)
    return jax.shard_map(
        jax.named_scope("slots")(body),
        mesh=mesh,
        in_specs=(specs, P()),
        out_specs=slot_specs(layout),
    )(joined(weights, dtype), placement)


def joined(weights: Weights, dtype) -> Weights:
    """Masters in `dtype` as slots are: gate and up beside one another."""
    gate_edf, up_edf = weights["gate_edf"], weights["up_edf"]
    return {
        "into": jnp.stack([gate_edf.astype(dtype), up_edf.astype(dtype)], axis=2),
        "down": weights["down_efd"].astype(dtype),
    }


def slots_of_layers(make, weights: Weights, placement: Placement) -> Weights:
    """Slots of all layers, one after the other; make(weights, placement) of one."""

    def layer(_, args):
        return None, make(*args)

    return jax.lax.scan(layer, None, (weights, placement))[1]


def owned(masters: Weights, placement: Placement, layout: Layout) -> Weights:
    return masters


def copied(masters: Weights, placement: Placement, layout: Layout) -> Weights:
    """Slots from own experts and from copies."""
    fill_s = _mine(placement.fill_lws, layout)
    copies = [own[:0] for own in masters.values()]
    if layout.copies_per_device and layout.offers_per_device:
        offer_o = _mine(placement.offer_lwo, layout)
        offered = [pick(own, offer_o) for own in masters.values()]
        copies = travel(offered, placement.want_lwc, layout.axes)
    return {
        name: pick(jnp.concatenate([own, copy]), fill_s)
        for (name, own), copy in zip(masters.items(), copies)
    }


def travel(
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


def sharded(masters: Weights, placement: Placement, layout: Layout) -> Weights:
    """Slots from the slices of every expert that all devices have."""
    table_p = placement.slot_to_expert_lp

    def gathered(part_exx: Array, hidden_dim: int) -> Array:
        slices_pxx = pick(part_exx, table_p)
        return jax.lax.all_to_all(
            slices_pxx, layout.axes, split_axis=0, concat_axis=hidden_dim, tiled=True
        )

    return {
        "into": gathered(masters["into"], 3),
        "down": gathered(masters["down"], 1),
    }


STORES = {
    "owned": owned,
    "transient": copied,
    "resident": copied,
    "sharded": sharded,
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


def _mine(table_wx: Int[Array, "w x"], layout: Layout) -> Int[Array, " x"]:
    """This device's row of a table."""
    me = 0 if layout.num_devices == 1 else jax.lax.axis_index(layout.axes)
    return table_wx[me]


def _to_all(chunk_wx: Array, group: AxisNames) -> Array:
    return jax.lax.all_to_all(chunk_wx, group, split_axis=0, concat_axis=0, tiled=True)
