"""Dispatch and combine: one window of rows to their experts and back.

    dispatch(x_nd)    send a window of rows to the slots' devices, sorted by slot there
    combine(y_md)     send the same rows back, weight them and sum them per token

The manifest (moejax.moe.exchange.manifest) says how many rows each device sends to each
slot. Each peer's rows are in slot order. A *window* is the rows start .. start + rows
of every peer. Round 0 is one window; `moejax.moe.exchange.rounds` adds later ones until
no rows are left.

    device 0 has rows for slots 0 0 0 1 | 2 3 3      (2 devices, 2 slots each, c = 3)
    window 0..3:     to device 0: 0 0 0   to device 1: 2 3 3
    window 3..6:     to device 0: 1 - -   to device 1: - - -

With Layout.home_chunks there are further chunks behind those of all devices, for rows
that a device computes itself. No collective carries them. Device 0 with 2 chunks:

    window 0..3:     to device 0: 0 0 0   to device 1: 2 3 3   stay: 1 - -

With Layout.align_rows the rows of each slot begin at a multiple of it where experts
compute them. Rows between slots have no source, and are zero. With a multiple of 4:

    device 0 receives the first window of both devices:   0 0 0 | 0 1 1
    in slot order, for its experts:                       0 0 0 0 1 1 - -
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
"""Checkpoint name of rows that have travelled. The remat policy 'dispatch' saves them,
so that the backward pass repeats no exchange."""


class Window(NamedTuple):
    """Range of each peer's rows that one round carries. Of the rows that stay on their
    device it is home_chunks times as many, from home_chunks times as far."""

    start: int | Int[Array, ""]
    """Position of the first row."""
    rows: int
    """Number of rows per peer."""


@struct.dataclass
class Receipt:
    """Index tables of one window, with which results are sent back to their tokens."""

    position_nk: Int[Array, "n k"]
    """Row of each choice in the send buffer, -1 if it is not in this window."""
    assignment_m: Int[Array, " m"]
    """Assignment in each row of the send buffer, -1 if the row is empty."""
    arrival_m: Int[Array, " m"]
    """Row of the receive buffer that is m-th in slot order, -1 where none is."""
    sorted_m1: Int[Array, "m 1"]
    """Place in slot order of each row of the receive buffer, -1 for empty rows."""
    count_w: Int[Array, " w"]
    """Number of rows in this window for each peer."""
    incoming_v: Int[Array, " v"]
    """Number of rows from each sender. Senders are the peers; if experts have shards,
    there are more of them."""


@jax.named_scope("dispatch")
def dispatch(
    x_nd: Float[Array, "n d"],
    sent: Manifest,
    window: Window,
    mesh_layout: MeshLayout,
) -> tuple[Float[Array, "m d"], Int[Array, " s"], Receipt]:
    """Send the rows of a window to the devices of their slots.

    Return the rows that arrived here, sorted by slot, the number of rows per slot, and
    the receipt for `combine`. Where the layout aligns slots, zero rows at the end of a
    slot count as its rows.
    """
    layout = mesh_layout.layout
    receipt, rows_s = make_receipt(sent, window, mesh_layout)
    k = sent.peer_nk.shape[1]
    token_m = jnp.where(receipt.assignment_m < 0, EMPTY, receipt.assignment_m // k)
    gather = partial(gather_rows, implementation=_implementation(layout))
    send_md = gather(x_nd, token_m, receipt.position_nk)
    num_chunks = len(receipt.count_w) + layout.home_chunks - 1
    send_xcd = send_md.reshape(num_chunks, -1, x_nd.shape[1])
    send_wcd, stay_xcd = _split(send_xcd, len(receipt.count_w))
    counts = (receipt.count_w, receipt.incoming_v)
    arrived_vcd = find_schedule(mesh_layout).out(send_wcd, *counts, mesh_layout)
    arrived_md = checkpoint_name(_join(arrived_vcd, stay_xcd), ROWS)
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
    """Send results back to their tokens, and sum them with their gates, in float32."""
    layout = mesh_layout.layout
    if not _is_sorted(layout):
        sorted_m, arrival_m1 = receipt.sorted_m1[:, 0], receipt.arrival_m[:, None]
        tables = sorted_m, arrival_m1
        y_md = gather_rows(y_md, *tables, implementation=_implementation(layout))
    y_xcd = y_md.reshape(layout.num_chunks, -1, y_md.shape[1])
    y_vcd, stay_xcd = _split(y_xcd, layout.num_senders)
    counts = (receipt.incoming_v, receipt.count_w)
    back_wcd = find_schedule(mesh_layout).back(y_vcd, *counts, mesh_layout)
    back_md = checkpoint_name(_join(back_wcd, stay_xcd), ROWS)
    tables = receipt.position_nk, receipt.assignment_m
    y_nd = combine_rows(
        back_md, gate_nk, *tables, implementation=_implementation(layout)
    )
    return jax.lax.psum(y_nd, mesh_layout.tensor_axes) if layout.is_local else y_nd


def make_receipt(
    sent: Manifest, window: Window, mesh_layout: MeshLayout
) -> tuple[Receipt, Int[Array, " s"]]:
    """Return the index tables of one window, and the number of rows per slot here.

    They are computed from the manifest alone, without communication. Rows per slot are
    rounded up to the multiple that the layout aligns slots to. `x` counts the chunks of
    a buffer: one for each peer (or sender), and the further ones of rows that stay.
    """
    layout = mesh_layout.layout
    w, s, align = layout.num_devices, layout.slots_per_device, layout.align_rows
    start, rows = window
    source = index_along(find_schedule(mesh_layout).sources(mesh_layout))
    owner = index_along(mesh_layout.peer_axes)
    pair_uws = sent.counts_up.reshape(-1, w, s)

    # Send side: the assignment in each row of the send buffer.
    count_w, first_w = pair_uws[source].sum(axis=-1), sent.first_w
    peer_nk = sent.peer_nk
    if layout.is_local:  # keep only the rows that this device's experts compute
        count_w, first_w = count_w[owner][None], first_w[owner][None]
        peer_nk = jnp.where(peer_nk == owner, 0, EMPTY)
    row_c = jnp.arange(rows, dtype=jnp.int32)
    sent_from_x1 = _starts(start, window, owner, layout)
    count_x, first_x = (_with_home(x, owner, layout) for x in (count_w, first_w))
    index_xc = first_x[:, None] + sent_from_x1 + row_c
    real_xc = sent_from_x1 + row_c < count_x[:, None]
    last = sent.assignment_a.shape[0] - 1
    assignment_xc = sent.assignment_a[jnp.minimum(index_xc, last)]
    assignment_m = jnp.where(real_xc, assignment_xc, EMPTY).reshape(-1)

    # Receive side: within a sender's chunk of `piece` rows, those of a slot are
    # begin .. end.
    windows = layout.num_windows
    piece = rows // windows
    counts_vs = jnp.repeat(pair_uws[:, owner], windows, axis=0)
    start_v1 = start + (jnp.arange(len(counts_vs)) % windows * piece)[:, None]
    counts_xs = _with_home(counts_vs, owner, layout)
    from_x1 = _starts(start_v1, window, owner, layout)
    end_xs = jnp.cumsum(counts_xs, axis=1)
    end_xs, begin_xs = (
        jnp.clip(edge_xs - from_x1, 0, piece)
        for edge_xs in (end_xs, end_xs - counts_xs)
    )

    # From arrival order (sender, slot) to slot order (slot, sender), in which each slot
    # begins at a multiple of `align`: a segment is the rows of one sender for one slot.
    num_x = len(begin_xs)
    part_sx = (end_xs - begin_xs).T
    last_sx = jnp.cumsum(part_sx.reshape(-1)).reshape(s, num_x)
    if align > 1:
        rows_s = jnp.sum(part_sx, axis=1)
        gap_s = _round_up(rows_s, align) - rows_s
        last_sx += (jnp.cumsum(gap_s) - gap_s)[:, None]
    first_sx = last_sx - part_sx
    row_m = jnp.arange(layout.num_sorted_rows(rows), dtype=jnp.int32)
    segment_m = jnp.sum(row_m[:, None] >= last_sx.reshape(-1), axis=1, dtype=jnp.int32)
    real_m = segment_m < s * num_x
    segment_m = jnp.minimum(segment_m, s * num_x - 1)
    slot_m, sender_m = segment_m // num_x, segment_m % num_x
    within_m = row_m - first_sx[slot_m, sender_m]
    arrival_m = sender_m * piece + begin_xs[sender_m, slot_m] + within_m
    if align > 1:  # a row between slots comes before the next slot's first
        real_m &= within_m >= 0

    # The inverse: the place in slot order of each row that arrives.
    row_c = jnp.arange(piece, dtype=jnp.int32)
    slot_xc = jnp.sum(row_c[:, None] >= end_xs[:, None, :], axis=2, dtype=jnp.int32)
    here_xc = slot_xc < s
    slot_xc = jnp.minimum(slot_xc, s - 1)
    sender_x1 = jnp.arange(num_x)[:, None]
    sorted_xc = first_sx[slot_xc, sender_x1] + row_c - begin_xs[sender_x1, slot_xc]
    sorted_m1 = jnp.where(here_xc, sorted_xc, EMPTY).reshape(-1, 1)
    arrival_m = jnp.where(real_m, arrival_m, EMPTY)

    part_xs = end_xs - begin_xs
    real_x = jnp.clip(count_x[:, None] - sent_from_x1, 0, rows)[:, 0]

    # The row of each choice in the send buffer. Rows that stay fill the chunk of this
    # device, and then those behind all peers.
    room = rows
    if layout.home_chunks > 1:
        is_home_nk = peer_nk == owner
        start = jnp.where(is_home_nk, layout.home_chunks * start, start)
        room = jnp.where(is_home_nk, layout.home_chunks * rows, rows)
    inside_nk = (sent.offset_nk >= start) & (sent.offset_nk < start + room)
    inside_nk &= peer_nk >= 0
    chunk_nk = peer_nk
    if layout.home_chunks > 1:
        is_beyond_nk = is_home_nk & (sent.offset_nk - start >= rows)
        chunk_nk = jnp.where(is_beyond_nk, w - 1, peer_nk)
    position_nk = chunk_nk * rows + sent.offset_nk - start
    position_nk = jnp.where(inside_nk, position_nk, EMPTY)

    count_w = _split(real_x, len(count_w))[0]
    incoming_v = _split(jnp.sum(part_xs, axis=1), len(counts_vs))[0]
    rows_s = jnp.sum(part_xs, axis=0)
    if align > 1:
        rows_s = _round_up(rows_s, align)
    if align > 1 and _is_sorted(layout):
        # A single sender lays its rows where experts compute them, so that no second
        # permutation aligns slots.
        assignment_m = _look_up(assignment_m, arrival_m)
        position_nk = _look_up(sorted_m1[:, 0], position_nk)
    receipt = Receipt(
        position_nk, assignment_m, arrival_m, sorted_m1, count_w, incoming_v
    )
    return receipt, rows_s


def _look_up(table_m: Array, row: Array) -> Array:
    """Return the table's entries of these rows; -1 where the row is."""
    return jnp.where(row >= 0, table_m[jnp.maximum(row, 0)], EMPTY)


def _starts(start_v1, window: Window, owner, layout: Layout):
    """Return the position of each chunk's first row among the rows of its two devices,
    [x, 1]; `start_v1` has those of the chunks that the collective carries, if no row
    stays."""
    if layout.home_chunks == 1:
        return start_v1
    start_v1 = jnp.broadcast_to(start_v1, (layout.num_senders, 1))
    home_start = layout.home_chunks * window.start
    more_x1 = window.rows * jnp.arange(1, layout.home_chunks)[:, None]
    return jnp.append(start_v1.at[owner].set(home_start), home_start + more_x1, axis=0)


def _with_home(value_w: Array, owner, layout: Layout) -> Array:
    """Return a value of each device for each chunk: chunks of rows that stay have that
    of this device, `owner`."""
    if layout.home_chunks == 1:
        return value_w
    own_x = jnp.repeat(value_w[owner][None], layout.home_chunks - 1, axis=0)
    return jnp.append(value_w, own_x, axis=0)


def _split(chunks_x: Array, num_sent: int) -> tuple[Array, Array | None]:
    """Return the chunks that a collective carries, and those that stay, if any."""
    if len(chunks_x) == num_sent:
        return chunks_x, None
    return chunks_x[:num_sent], chunks_x[num_sent:]


def _join(carried_vcd: Array, stay_xcd: Array | None) -> Array:
    """Return the rows of all chunks, [m, d]."""
    whole_xcd = carried_vcd
    if stay_xcd is not None:
        whole_xcd = jnp.append(carried_vcd, stay_xcd, axis=0)
    return whole_xcd.reshape(-1, carried_vcd.shape[-1])


def _implementation(layout: Layout) -> str:
    """Return the implementation of the row kernels that the layout asks for."""
    return "xla" if layout.kernels == "plain" else "auto"


def _is_sorted(layout: Layout) -> bool:
    """Return whether rows arrive in slot order, as they do from a single sender."""
    return layout.num_senders == 1


def _round_up(rows_s: Int[Array, " s"], multiple: int) -> Int[Array, " s"]:
    """Return numbers of rows rounded up to a multiple."""
    return -(-rows_s // multiple) * multiple
