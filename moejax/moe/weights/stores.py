"""Stores: how expert weights reach the slots of a device, and gradients come back.

    STORES[store](own, placement, mesh_layout) -> weights of the slots, offers

    owned       slots are the own experts of their device: nothing travels
    transient,  owners cut the experts that they offer into slices and scatter these;
    resident    each device then gathers the slices of its copies. Per device and
                direction (offers + copies) experts travel, however many replicas one
                expert has. In a group of several nodes slices stay in a node, and
                each node takes what it needs from others in between: an expert crosses
                to it once
    sharded     parameters are split by hidden width over all devices; each device
                gathers the slices of the experts in its slots

"Devices" are those of a group (MeshLayout.owner_axes). If the group does not include
the data axis, that axis splits the hidden width of parameters and slots until a layer
computes.

Gradients go back the same way. Those of replicas are summed where their slices meet, in
float32 and in a fixed order, and then once more at the owner.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.axes import AxisNames
from moejax.kernels import varying_alike, zeros_varying_as
from moejax.kernels.device import device_here
from moejax.moe.mesh_roles import MeshLayout, index_along, spec
from moejax.moe.types import Placement
from moejax.moe.weights.compression import ExpertWeights

EXPERT_PARAMS = ("gate_edf", "up_edf", "down_efd")
"""Names of the matrices of an MoE layer's experts."""
EXPERT_BIASES = ("gate_bias_ef", "up_bias_ef", "down_bias_ew")
"""Names of their biases (Moe.expert_bias). The letter w is the width of the output. It
rests in as many parts as the hidden width f, so that biases travel as matrices do."""
SLOT_DIMS = {"into": "ed2f", "down": "efd", "into_bias": "e2f", "down_bias": "ew"}
"""Names of the weights of slots and the letters of their dims, where e counts the slots
of all devices: `into` has gate beside up."""
WIDTHS = "fw"
"""Letters of the dims that are split where weights rest; each weight has one."""
MIN_SEGMENTS = 32
"""Number of rows from which a CPU adds float32 gradients of replicas one by one.

Measured on two cores (docs/log.md): equal to the product at 8 rows, 1.7 times as fast
at 32, 4 to 7 times at 256. Below it the product keeps the order of its sums.
"""


def dims(name: str) -> str:
    """Return the letters of the dims of an expert parameter, such as 'edf'."""
    return name.rpartition("_")[2]


def width_dim(dims: str) -> int:
    """Return the dim of a weight that is split where it rests."""
    return next(i for i, letter in enumerate(dims) if letter in WIDTHS)


def master_param_spec(dims: str, store: str, mesh_layout: MeshLayout) -> P:
    """Return the PartitionSpec of an expert parameter with these dims, such as 'edf'.

    Experts are split over owners. The hidden width is split over shards and, while
    stored, over the data axis, unless the group includes that axis. In the store
    'sharded' every device has a part of the hidden width of every expert.
    """
    experts, width = mesh_layout.owner_axes, mesh_layout.width_axes
    if store == "sharded":
        experts, width = (), width + experts
    where = {"e": experts} | dict.fromkeys(WIDTHS, width)
    return spec(*(where.get(dim, ()) for dim in dims))


def keep_owned(
    own: ExpertWeights, placement: Placement, mesh_layout: MeshLayout
) -> tuple[ExpertWeights, None]:
    """Return the experts that this device owns as its slots."""
    return own, None


def gather_copies(
    own: ExpertWeights, placement: Placement, mesh_layout: MeshLayout
) -> tuple[ExpertWeights, Float[Array, "p x"] | None]:
    """Fill the slots with the device's own experts and with copies of others'. Return
    also the slices of all offers, which arrive before copies are made from them; None
    where nothing travels."""
    me = index_along(mesh_layout.owner_axes)
    fill_s, layout = placement.fill_lws[me], mesh_layout.layout
    copies, offers_px = [weight[:0] for weight in own.values()], None
    if layout.copies_per_device and layout.offers_per_device:
        offer_o = placement.offer_lwo[me]
        offered = [pick(weight, offer_o) for weight in own.values()]
        between, inside = mesh_layout.copy_axes
        node, nodes = index_along(between), layout.num_copy_nodes
        want_mwc = jnp.reshape(
            placement.want_lwc, (nodes, -1, layout.copies_per_device)
        )
        offers_px = scatter_offers(offered, want_mwc.shape[1], inside)
        if layout.copies_per_node and layout.offers_per_node:
            sent_ox = pick(offers_px, placement.node_offer_lmo[node])
            of_others = exchange_copies([sent_ox], placement.node_want_lmc, between)
            offers_px = jnp.concatenate([offers_px, *of_others])
        copies = gather_wanted(offers_px, offered, want_mwc[node], inside)
    slots = {
        name: pick(jnp.concatenate([weight, copy]), fill_s)
        for (name, weight), copy in zip(own.items(), copies)
    }
    return slots, offers_px


def append_copies(
    slots: ExpertWeights, placement: Placement, mesh_layout: MeshLayout
) -> ExpertWeights:
    """Return the slots and, behind them, those for the copies of split 'top_up', which
    are zeros where there is no copy.

    Any device that has an expert in its slots may offer it. Where no device of the
    group takes a copy nothing travels, in either pass. Otherwise each device sends and
    receives `top_up_offers` and then `top_up_copies` experts, whatever the number of
    copies. The devices of a group agree, since `placement` is made from integers that
    all of them have. (On a GPU the host waits until it knows.)
    """
    me, group = index_along(mesh_layout.owner_axes), mesh_layout.owner_axes
    offer_o, want_wc = placement.offer_lwo[me], placement.want_lwc

    def travel(parts: list[Array]) -> list[Array]:
        offered = [pick(part, offer_o) for part in parts]
        return exchange_copies(offered, want_wc, group)

    def stay(parts: list[Array]) -> list[Array]:
        shape = want_wc.shape[1:]
        return [zeros_varying_as(x, shape + x.shape[1:], x.dtype) for x in parts]

    copies = jax.lax.cond(jnp.any(want_wc >= 0), travel, stay, list(slots.values()))
    return {
        name: jnp.concatenate([weight, copy])
        for (name, weight), copy in zip(slots.items(), copies)
    }


def exchange_copies(
    offered: list[Array], want_wc: Int[Array, "w c"], group: AxisNames
) -> list[Array]:
    """Return this device's copies, [c, ..] per weight, of experts that owners offer.

    Each offered expert is laid out flat and cut into w slices, the last one padded. The
    slices are scattered; then each device gathers the slices of the experts it wants.
    `want_wc` holds indices into the offers of all devices, and is equal on all of them.
    """
    offers_px = scatter_offers(offered, len(want_wc), group)
    return gather_wanted(offers_px, offered, want_wc, group)


def scatter_offers(
    offered: list[Array], num_devices: int, group: AxisNames
) -> Float[Array, "p x"]:
    """Return this device's slices of the offers of all w devices, the first part of
    `exchange_copies`."""
    offers = len(offered[0])
    flat_ox = jnp.concatenate([x.reshape(offers, -1) for x in offered], axis=1)
    flat_ox = jnp.pad(flat_ox, ((0, 0), (0, -flat_ox.shape[1] % num_devices)))
    slices_owx = flat_ox.reshape(offers, num_devices, -1)
    slices_wox = _to_all(slices_owx.swapaxes(0, 1), group)
    return slices_wox.reshape(-1, slices_wox.shape[-1])


def gather_wanted(
    offers_px: Float[Array, "p x"],
    offered: list[Array],
    want_wc: Int[Array, "w c"],
    group: AxisNames,
) -> list[Array]:
    """Return the copies from the slices of all offers, the second part of
    `exchange_copies`. `offered` has the shapes of an expert's weights."""
    w, copies = want_wc.shape
    wanted_wcx = pick(offers_px, want_wc.reshape(-1)).reshape(w, copies, -1)
    ends = np.cumsum([x[0].size for x in offered])
    whole_cx = _to_all(wanted_wcx, group).swapaxes(0, 1)
    whole_cx = whole_cx.reshape(copies, -1)[:, : ends[-1]]
    parts = jnp.split(whole_cx, ends[:-1], axis=1)
    return [part.reshape(copies, *x.shape[1:]) for part, x in zip(parts, offered)]


def gather_sharded(
    own: ExpertWeights, placement: Placement, mesh_layout: MeshLayout
) -> tuple[ExpertWeights, None]:
    """Return slots that are gathered from all devices' slices of the experts."""
    table_p, group = placement.slot_to_expert_lp, mesh_layout.owner_axes

    def gather(part_exx: Array, width_dim: int) -> Array:
        slices_pxx = pick(part_exx, table_p)
        if not group:
            return slices_pxx
        return jax.lax.all_to_all(
            slices_pxx, group, split_axis=0, concat_axis=width_dim, tiled=True
        )

    return {n: gather(own[n], width_dim(SLOT_DIMS[n])) for n in own}, None


STORES = {
    "owned": keep_owned,
    "transient": gather_copies,
    "resident": gather_copies,
    "sharded": gather_sharded,
}
"""Functions from own experts to slots, inside shard_map, by store. The second result is
what of other devices' experts arrives first, or None."""


@jax.custom_vjp
def pick(
    row_qx: Float[Array, "q ..."], index_s: Int[Array, " s"]
) -> Float[Array, "s ..."]:
    """Return row[index], and zeros where the index is -1.

    The gradient is summed in float32 and in a fixed order (sum_by_row).
    """
    taken_sx = row_qx[jnp.maximum(index_s, 0)]
    is_real_s = (index_s >= 0).reshape(-1, *(1,) * (row_qx.ndim - 1))
    return jnp.where(is_real_s, taken_sx, 0)


def _pick_forward(row_qx, index_s):
    return pick(row_qx, index_s), (index_s, jnp.arange(row_qx.shape[0]))


def _pick_backward(saved, d_taken_sx):
    index_s, row_q = saved
    d_row_qx = sum_by_row(d_taken_sx, index_s, len(row_q))
    return d_row_qx.astype(d_taken_sx.dtype), None


pick.defvjp(_pick_forward, _pick_backward)


def sum_by_row(
    d_sx: Float[Array, "s ..."], index_s: Int[Array, " s"], num_rows: int
) -> Float[Array, "q ..."]:
    """Return the sum of the entries of each row, in float32 at least and in a fixed
    order: row q sums the entries whose index is q, and entries at -1 count nowhere.

    Entries are multiplied with a 0/1 matrix in their own dtype. All products are exact,
    and sums are in float32, so that 16-bit entries need no float32 copy and use tensor
    cores. On a CPU, float32 entries of MIN_SEGMENTS rows or more are added in the order
    of `index_s` instead, which takes s additions in place of q x s products. On a GPU a
    scatter would add in a random order.
    """
    wide = jnp.promote_types(d_sx.dtype, jnp.float32)
    is_wide = d_sx.dtype == wide
    if is_wide and num_rows >= MIN_SEGMENTS and device_here().platform == "cpu":
        zeros_qx = jnp.zeros((num_rows, *d_sx.shape[1:]), wide)
        row_s = jnp.where(index_s < 0, num_rows, index_s)
        zeros_qx, row_s, d_sx = varying_alike(zeros_qx, row_s, d_sx)
        return zeros_qx.at[row_s].add(d_sx, mode="drop")
    hit_qs = (jnp.arange(num_rows)[:, None] == index_s).astype(d_sx.dtype)
    return jnp.tensordot(
        hit_qs,
        d_sx,
        axes=1,
        precision=jax.lax.Precision.HIGHEST if is_wide else None,
        preferred_element_type=wide,
    )


def _to_all(chunk_wx: Array, group: AxisNames) -> Array:
    """Send the i-th chunk to device i of the group; return the chunks from all."""
    if not group:
        return chunk_wx
    return jax.lax.all_to_all(chunk_wx, group, split_axis=0, concat_axis=0, tiled=True)
