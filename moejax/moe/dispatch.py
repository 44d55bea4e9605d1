"""Rows to their experts and back, on one device of a group.

    dispatch(x_nd)       a window of rows to the slots' devices, sorted by slot there
    combine(y_md)        the same rows back, weighted and summed per token

The manifest (moejax.moe.manifest) says who sends how much to whom.

A *window* is `rows` rows per peer from `start` on, of each peer's rows in slot order.
Round 0 is one window; `moejax.moe.exchange` adds later ones until nothing is left.

    device 0 has rows for slots 0 0 0 1 | 2 3 3      (2 devices, 2 slots each, c = 3)
    window 0..3:     to device 0: 0 0 0   to device 1: 2 3 3
    window 3..6:     to device 0: 1 - -   to device 1: - - -
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax.axes import AxisNames
from moejax.kernels.permute import combine_rows, gather_rows
from moejax.layout import Layout
from moejax.moe.manifest import EMPTY, Manifest
from moejax.moe.transport import TRANSPORTS

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
    incoming_w: Int[Array, " w"]


@jax.named_scope("dispatch")
def dispatch(
    x_nd: Float[Array, "n d"],
    sent: Manifest,
    window: Window,
    layout: Layout,
    axis: AxisNames,
) -> tuple[Float[Array, "m d"], Int[Array, " s"], Receipt]:
    """Rows of this window at their slots' device, sorted by slot, and rows per slot."""
    receipt, rows_s = receipt_of(sent, window, layout, axis)
    k = sent.peer_nk.shape[1]
    token_m = jnp.where(receipt.assignment_m < 0, EMPTY, receipt.assignment_m // k)
    send_md = gather_rows(x_nd, token_m, receipt.position_nk)
    arrived_md = _send(send_md, receipt.count_w, receipt.incoming_w, layout, axis)
    if layout.num_devices == 1:  # already by slot
        return arrived_md, rows_s, receipt
    return (
        gather_rows(arrived_md, receipt.arrival_m, receipt.sorted_m1),
        rows_s,
        receipt,
    )


@jax.named_scope("combine")
def combine(
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"],
    receipt: Receipt,
    layout: Layout,
    axis: AxisNames,
) -> Float[Array, "n d"]:
    """Results back at their tokens, summed with their gates (in float32)."""
    if layout.num_devices > 1:
        sorted_m, arrival_m1 = receipt.sorted_m1[:, 0], receipt.arrival_m[:, None]
        y_md = gather_rows(y_md, sorted_m, arrival_m1)
    home_md = _send(y_md, receipt.incoming_w, receipt.count_w, layout, axis)
    return combine_rows(home_md, gate_nk, receipt.position_nk, receipt.assignment_m)


def receipt_of(
    sent: Manifest, window: Window, layout: Layout, axis: AxisNames
) -> tuple[Receipt, Int[Array, " s"]]:
    """Integers of one window: pure arithmetic on the manifest, no communication."""
    w, s = layout.num_devices, layout.slots_per_device
    start, rows = window
    me = 0 if w == 1 else jax.lax.axis_index(axis)
    count_w = sent.counts_wp.reshape(w, w, s).sum(axis=-1)[me]

    row_c = jnp.arange(rows, dtype=jnp.int32)
    index_wc = sent.first_w[:, None] + start + row_c
    real_wc = start + row_c < count_w[:, None]
    last = sent.assignment_a.shape[0] - 1
    assignment_wc = sent.assignment_a[jnp.minimum(index_wc, last)]
    assignment_m = jnp.where(real_wc, assignment_wc, EMPTY).reshape(-1)
    inside_nk = (sent.place_nk >= start) & (sent.place_nk < start + rows)
    inside_nk &= sent.peer_nk >= 0
    position_nk = sent.peer_nk * rows + sent.place_nk - start

    counts_ws = sent.counts_wp.reshape(w, w, s)[:, me]
    end_ws = jnp.cumsum(counts_ws, axis=1)
    end_ws, begin_ws = (
        jnp.clip(edge_ws - start, 0, rows) for edge_ws in (end_ws, end_ws - counts_ws)
    )
    arrival_m, sorted_m1 = _sort_arrivals(begin_ws, end_ws, rows)
    part_ws = end_ws - begin_ws
    receipt = Receipt(
        position_nk=jnp.where(inside_nk, position_nk, EMPTY),
        assignment_m=assignment_m,
        arrival_m=arrival_m,
        sorted_m1=sorted_m1,
        count_w=jnp.clip(count_w - start, 0, rows),
        incoming_w=jnp.sum(part_ws, axis=1),
    )
    return receipt, jnp.sum(part_ws, axis=0)


def _sort_arrivals(
    begin_ws: Int[Array, "w s"], end_ws: Int[Array, "w s"], rows: int
) -> tuple[Int[Array, " m"], Int[Array, "m 1"]]:
    """Rows arrive by (peer, slot) and are wanted by (slot, peer): both permutations.

    begin/end are where a slot's rows lie within its peer's chunk of `rows` rows.
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


def _send(rows_md, count_w, incoming_w, layout: Layout, axis: AxisNames):
    w, d = layout.num_devices, rows_md.shape[-1]
    send = TRANSPORTS[layout.transport]
    arrived_wcd = send(rows_md.reshape(w, -1, d), count_w, incoming_w, axis)
    return checkpoint_name(arrived_wcd.reshape(-1, d), ROWS)
