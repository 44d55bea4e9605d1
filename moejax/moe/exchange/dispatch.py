"""Rows to their experts and back, on one device of a group.

    dispatch(x_nd)       a window of rows to the slots' devices, sorted by slot there
    combine(y_md)        the same rows back, weighted and summed per token

The manifest (moejax.moe.exchange.manifest) says who sends how much to whom.

A *window* is `rows` rows per peer from `start` on, of each peer's rows in slot order.
Round 0 is one window; `moejax.moe.exchange.rounds` adds later ones until nothing is
left.

    device 0 has rows for slots 0 0 0 1 | 2 3 3      (2 devices, 2 slots each, c = 3)
    window 0..3:     to device 0: 0 0 0   to device 1: 2 3 3
    window 3..6:     to device 0: 1 - -   to device 1: - - -
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax.kernels.permute import combine_rows, gather_rows
from moejax.moe.exchange.manifest import EMPTY, Manifest
from moejax.moe.exchange.schedules import find_schedule
from moejax.moe.mesh_roles import MeshLayout, index_along
from moejax.plan.layout import Layout

ROWS = "rows"
"""Name of what has travelled: the remat policy 'dispatch' saves it, so that the
backward pass repeats no exchange."""


class Window(NamedTuple):
    start: int | Int[Array, ""]
    rows: int


@struct.dataclass
class Receipt:
    """How to bring the rows of one window home."""

    position_nk: Int[Array, "n k"]
    """Row of each choice in the send buffer, -1 when it is not in this window."""
    assignment_m: Int[Array, " m"]
    """Assignment in each row of the send buffer, -1 when empty."""
    arrival_m: Int[Array, " m"]
    """Row of the receive buffer that is j-th by slot, -1 past the last."""
    sorted_m1: Int[Array, "m 1"]
    """Inverse of arrival_m, -1 for empty rows."""
    count_w: Int[Array, " w"]
    """Rows of this window for each peer."""
    incoming_v: Int[Array, " v"]
    """Rows from each sender: the peers, and with expert shards more of them."""


@jax.named_scope("dispatch")
def dispatch(
    x_nd: Float[Array, "n d"],
    sent: Manifest,
    window: Window,
    mesh_layout: MeshLayout,
) -> tuple[Float[Array, "m d"], Int[Array, " s"], Receipt]:
    """Rows of this window at their slots' device, sorted by slot, and rows per slot."""
    layout = mesh_layout.layout
    receipt, rows_s = make_receipt(sent, window, mesh_layout)
    k = sent.peer_nk.shape[1]
    token_m = jnp.where(receipt.assignment_m < 0, EMPTY, receipt.assignment_m // k)
    gather = partial(gather_rows, implementation=_moves(layout))
    send_md = gather(x_nd, token_m, receipt.position_nk)
    send_wcd = send_md.reshape(-1, window.rows, x_nd.shape[1])
    counts = (receipt.count_w, receipt.incoming_v)
    arrived_vcd = find_schedule(mesh_layout).out(send_wcd, *counts, mesh_layout)
    arrived_md = checkpoint_name(arrived_vcd.reshape(-1, x_nd.shape[1]), ROWS)
    if not _is_sorted(layout):
        arrived_md = gather(arrived_md, receipt.arrival_m, receipt.sorted_m1)
    return arrived_md, rows_s, receipt


@jax.named_scope("combine")
def combine(
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"],
    receipt: Receipt,
    mesh_layout: MeshLayout,
) -> Float[Array, "n d"]:
    """Results back at their tokens, summed with their gates (in float32)."""
    layout = mesh_layout.layout
    if not _is_sorted(layout):
        sorted_m, arrival_m1 = receipt.sorted_m1[:, 0], receipt.arrival_m[:, None]
        y_md = gather_rows(y_md, sorted_m, arrival_m1, implementation=_moves(layout))
    y_vcd = y_md.reshape(layout.num_senders, -1, y_md.shape[1])
    counts = (receipt.incoming_v, receipt.count_w)
    back_wcd = find_schedule(mesh_layout).back(y_vcd, *counts, mesh_layout)
    back_md = checkpoint_name(back_wcd.reshape(-1, y_md.shape[1]), ROWS)
    tables = receipt.position_nk, receipt.assignment_m
    y_nd = combine_rows(back_md, gate_nk, *tables, implementation=_moves(layout))
    return jax.lax.psum(y_nd, mesh_layout.tensor_axes) if layout.is_local else y_nd


def make_receipt(
    sent: Manifest, window: Window, mesh_layout: MeshLayout
) -> tuple[Receipt, Int[Array, " s"]]:
    """Integers of one window: pure arithmetic on the manifest, no communication."""
    layout = mesh_layout.layout
    w, s = layout.num_devices, layout.slots_per_device
    start, rows = window
    source = index_along(find_schedule(mesh_layout).sources(mesh_layout))
    owner = index_along(mesh_layout.peer_axes)
    pair_uws = sent.counts_up.reshape(-1, w, s)
    count_w, first_w = pair_uws[source].sum(axis=-1), sent.first_w
    peer_nk = sent.peer_nk
    if layout.is_local:  # of all devices' rows those of this one
        count_w, first_w = count_w[owner][None], first_w[owner][None]
        peer_nk = jnp.where(peer_nk == owner, 0, EMPTY)

    row_c = jnp.arange(rows, dtype=jnp.int32)
    index_wc = first_w[:, None] + start + row_c
    real_wc = start + row_c < count_w[:, None]
    last = sent.assignment_a.shape[0] - 1
    assignment_wc = sent.assignment_a[jnp.minimum(index_wc, last)]
    assignment_m = jnp.where(real_wc, assignment_wc, EMPTY).reshape(-1)
    inside_nk = (sent.place_nk >= start) & (sent.place_nk < start + rows)
    inside_nk &= peer_nk >= 0
    position_nk = peer_nk * rows + sent.place_nk - start

    windows = layout.num_windows
    piece = rows // windows
    counts_vs = jnp.repeat(pair_uws[:, owner], windows, axis=0)
    start_v1 = start + (jnp.arange(len(counts_vs)) % windows * piece)[:, None]
    end_vs = jnp.cumsum(counts_vs, axis=1)
    end_vs, begin_vs = (
        jnp.clip(edge_vs - start_v1, 0, piece)
        for edge_vs in (end_vs, end_vs - counts_vs)
    )
    arrival_m, sorted_m1 = _sort_arrivals(begin_vs, end_vs, piece)
    part_vs = end_vs - begin_vs
    receipt = Receipt(
        position_nk=jnp.where(inside_nk, position_nk, EMPTY),
        assignment_m=assignment_m,
        arrival_m=arrival_m,
        sorted_m1=sorted_m1,
        count_w=jnp.clip(count_w - start, 0, rows),
        incoming_v=jnp.sum(part_vs, axis=1),
    )
    return receipt, jnp.sum(part_vs, axis=0)


def _moves(layout: Layout) -> str:
    return "xla" if layout.kernels == "plain" else "auto"


def _is_sorted(layout: Layout) -> bool:
    """Whether rows arrive by slot: from one sender alone."""
    return layout.num_senders == 1


def _sort_arrivals(
    begin_ws: Int[Array, "w s"], end_ws: Int[Array, "w s"], rows: int
) -> tuple[Int[Array, " m"], Int[Array, "m 1"]]:
    """Rows arrive by (sender, slot) and are wanted by (slot, sender): both
    permutations. `w` counts senders here.

    begin/end are where a slot's rows lie within its sender's chunk of `rows` rows.
    """
    w, s = begin_ws.shape
    part_sw = (end_ws - begin_ws).T
    last_sw = jnp.cumsum(part_sw.reshape(-1)).reshape(s, w)
    first_sw = last_sw - part_sw

    row_m = jnp.arange(w * rows, dtype=jnp.int32)
    segment_m = jnp.sum(row_m[:, None] >= last_sw.reshape(-1), axis=1, dtype=jnp.int32)
    real_m = segment_m < s * w
    segment_m = jnp.minimum(segment_m, s * w - 1)
    slot_m, peer_m = segment_m // w, segment_m % w
    within_m = row_m - first_sw[slot_m, peer_m]
    arrival_m = peer_m * rows + begin_ws[peer_m, slot_m] + within_m

    row_c = jnp.arange(rows, dtype=jnp.int32)
    slot_wc = jnp.sum(row_c[:, None] >= end_ws[:, None, :], axis=2, dtype=jnp.int32)
    here_wc = slot_wc < s
    slot_wc = jnp.minimum(slot_wc, s - 1)
    peer_w1 = jnp.arange(w)[:, None]
    sorted_wc = first_sw[slot_wc, peer_w1] + row_c - begin_ws[peer_w1, slot_wc]
    sorted_m1 = jnp.where(here_wc, sorted_wc, EMPTY).reshape(-1, 1)
    return jnp.where(real_m, arrival_m, EMPTY), sorted_m1
