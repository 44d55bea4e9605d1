"""One round of the exchange: tokens to the slots of their choices, and results back.

A token crosses a link once: it makes one row for each destination that has slots of its
choices. A *card* travels with each row: the gates of the token's choices, and their
slots there. The receiver copies the row to each of these slots, experts compute, and
the sum of the results, weighted with the gates, returns as one row.

    token 0 chose slots 0, 2 and 3; token 1 slot 3        (2 devices, 2 slots each)
    from device 1 to device 0:   row 0, card: slot 0
    stays on device 1:           rows 0 and 1, slots 2 and 3, and slot 3
    at device 1, by slot:        2: row 0    3: row 0, row 1 | rows of device 0

Levels of the way are the same function, applied to the rows that arrive: from a device
to the nodes, and from there to the devices of a node (`Layout.has_levels`). Rows that
are at their destination already stay out of the buffers.

With Layout.align_rows the rows of each slot begin at a multiple of it where experts
compute them. Rows between slots have no source, and are zero:

    rows of 3 slots, by slot:      0 0 0 0 0 | 1 1 | 2
    with a multiple of 4:          0 0 0 0 0 - - - | 1 1 - - | 2 - - -
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax.kernels import varying_alike, zeros_varying_as
from moejax.kernels.permute import combine_rows, gather_rows, sum_rows
from moejax.moe.exchange.manifest import EMPTY, Manifest, window_of_choices
from moejax.moe.exchange.schedules import find_schedule
from moejax.moe.exchange.transport import padded
from moejax.moe.mesh_roles import MeshLayout, index_along
from moejax.plan.layout import Layout

ROWS = "rows"
"""Checkpoint name of rows and cards that have arrived, and of results. The remat policy
'dispatch' saves them, so that the backward pass repeats no exchange."""

Experts = Callable[..., Array]
"""Signature of experts(x_md, rows_s, weights) -> y_md, which computes rows by slot."""


class Window(NamedTuple):
    """The rows that one round carries, and the buffers for them."""

    begin_uf: Int[Array, "u f"]
    """Number of the first row from each source to each destination."""
    end_uf: Int[Array, "u f"]
    """Number of the row behind the last one."""
    rows: tuple[int, ...]
    """Rows of a device's buffer for each destination, at each level."""
    computed: int
    """Rows that a device computes, zero rows between slots not counted."""


class Level(NamedTuple):
    """One hop of rows: the destinations among which a device chooses."""

    num: int
    """Number of destinations."""
    slots: int
    """Number of slots of each."""
    rows: int
    """Number of rows of the buffer for each."""
    own: Array | None
    """Number of the destination to which the device itself belongs, whose rows stay out
    of the buffer; None where it carries them too."""
    out: Callable[[Array], Array]
    """Function from the chunks for all destinations [f, c, ..] to those of all
    senders."""
    back: Callable[[Array], Array]
    """Function from results for all senders to those of the chunks that `out` sent."""


def compute_window(
    x_nd: Float[Array, "n d"],
    gate_nk: Float[Array, "n k"],
    weights: dict[str, Array],
    sent: Manifest,
    window: Window,
    *,
    experts: Experts,
    mesh_layout: MeshLayout,
    gates_input: bool = False,
) -> Float[Array, "n d"]:
    """Return the contribution of one window's rows to the layer's output: for each
    token the sum of its choices' results times their gates, in float32.

    With `gates_input` gates multiply the rows that experts compute, not the results.
    The layer's output is the sum over windows.
    """
    layout = mesh_layout.layout
    sources = find_schedule(mesh_layout).sources(mesh_layout)
    me = index_along(sources)
    edges = window.begin_uf[me], window.end_uf[me]
    slot_nk, place_nk = window_of_choices(sent, *edges, layout)
    levels = _levels(sent, window, mesh_layout)
    compute = partial(
        _compute,
        num_rows=layout.num_sorted_rows(window.computed),
        weights=weights,
        experts=experts,
        mesh_layout=mesh_layout,
        gates_input=gates_input,
    )
    y_nd = _travel(
        x_nd, slot_nk, gate_nk, levels, compute, _implementation(layout), place_nk
    )
    return jax.lax.psum(y_nd, mesh_layout.tensor_axes) if layout.is_local else y_nd


def _levels(sent: Manifest, window: Window, mesh_layout: MeshLayout) -> list[Level]:
    """Return the hops of a window's rows, the slowest first; none where no row
    travels."""
    layout, peers = mesh_layout.layout, mesh_layout.peer_axes
    if not layout.sends_rows:
        return []
    num_rows = len(sent.slot_nk)
    if layout.has_levels:
        levels, slots = [], layout.num_slots
        for axes, rows in zip((peers[:1], peers[1:]), window.rows):
            num = jax.lax.axis_size(axes)
            slots //= num
            send = partial(padded, count_w=None, incoming_w=None, axis=axes)
            stays = layout.keeps_home_rows and rows < num_rows
            own = index_along(axes) if stays else None
            levels.append(Level(num, slots, rows, own, send, send))
            num_rows = num * rows + stays * num_rows
        return levels
    # A buffer with a place for every token holds those that stay too: then rows lie
    # together, and need not be put together.
    stays = layout.keeps_home_rows and window.rows[0] < num_rows
    schedule, own = find_schedule(mesh_layout), index_along(peers)
    begin_uf, end_uf = (
        jnp.minimum(edge_uf, sent.rows_uf)
        for edge_uf in (window.begin_uf, window.end_uf)
    )
    count_uf = end_uf - begin_uf
    if stays:
        is_home_uf = jnp.eye(layout.num_devices, dtype=bool)
        count_uf = jnp.where(is_home_uf, 0, count_uf)
    me = index_along(schedule.sources(mesh_layout))
    counts = count_uf[me], count_uf[:, own]
    return [
        Level(
            num=layout.num_devices,
            slots=layout.slots_per_device,
            rows=window.rows[0],
            own=own if stays else None,
            out=lambda rows: schedule.out(rows, *counts, mesh_layout),
            back=lambda rows: schedule.back(rows, *counts[::-1], mesh_layout),
        )
    ]


def _travel(
    x_nd: Float[Array, "n d"],
    slot_nk: Int[Array, "n k"],
    gate_nk: Float[Array, "n k"],
    levels: list[Level],
    compute: Callable[..., Array],
    implementation: str,
    place_nk: Int[Array, "n k"] | None = None,
) -> Float[Array, "n d"]:
    """Return, for each token or row, the sum of its choices' results times their gates.

    Choices whose slot is -1 add nothing. `place_nk` are the places of the choices' rows
    in the chunks of the first level, where these are known.
    """
    if not levels:
        return compute(x_nd, slot_nk, gate_nk)
    level, *behind = levels
    n, k = slot_nk.shape
    with jax.named_scope("dispatch"):
        at_nk = jnp.where(slot_nk < 0, EMPTY, slot_nk // level.slots % level.num)
        stays_nk = jnp.zeros_like(at_nk, bool)
        if level.own is not None:
            stays_nk = at_nk == level.own
            at_nk = jnp.where(stays_nk, EMPTY, at_nk)
        if place_nk is None:
            place_nk = _places(at_nk, level.num)
        source_m, position_nj = _pack(at_nk, place_nk, level)
        send_md = gather_rows(
            x_nd, source_m, position_nj, implementation=implementation
        )
        card_mj = _cards(at_nk, slot_nk, gate_nk, source_m, position_nj, level)
        x_vcd, card_vcj = (
            checkpoint_name(level.out(rows.reshape(level.num, level.rows, -1)), ROWS)
            for rows in (send_md, card_mj)
        )
        x_rd = x_vcd.reshape(-1, x_vcd.shape[2])
        gate_rk, slot_rk = _read_cards(card_vcj.reshape(-1, 2 * k))
        if level.own is not None:
            x_rd = jnp.concatenate([x_nd, x_rd])
            gate_rk = jnp.concatenate([gate_nk, gate_rk])
            own_nk = jnp.where(stays_nk, slot_nk, EMPTY)
            slot_rk = jnp.concatenate([own_nk, slot_rk])
    y_rd = _travel(x_rd, slot_rk, gate_rk, behind, compute, implementation)
    with jax.named_scope("combine"):
        num_own = len(y_rd) - math.prod(x_vcd.shape[:2])
        y_md = level.back(y_rd[num_own:].reshape(x_vcd.shape))
        y_md = y_md.reshape(-1, y_md.shape[2])
        if level.own is not None:
            # A token's own sum is one more row, behind those that came back.
            own_n = jnp.where(stays_nk.any(axis=1), jnp.arange(n), EMPTY)
            own_row_n1 = jnp.where(own_n < 0, EMPTY, len(y_md) + own_n)[:, None]
            position_nj = jnp.concatenate([own_row_n1, position_nj], axis=1)
            source_m = jnp.concatenate([source_m, own_n])
            y_md = jnp.concatenate([y_md, y_rd[:num_own]])
        return sum_rows(y_md, position_nj, source_m, implementation=implementation)


def _places(at_nk: Int[Array, "n k"], num_destinations: int) -> Int[Array, "n k"]:
    """Return, for each choice, the number of earlier tokens with a choice at the same
    destination."""
    has_nf = jnp.any(at_nk[:, :, None] == jnp.arange(num_destinations), axis=1)
    before_nf = jnp.cumsum(has_nf, axis=0, dtype=jnp.int32) - has_nf
    return jnp.take_along_axis(before_nf, jnp.maximum(at_nk, 0), axis=1)


def _pack(
    at_nk: Int[Array, "n k"], place_nk: Int[Array, "n k"], level: Level
) -> tuple[Int[Array, " m"], Int[Array, "n j"]]:
    """Return the token in each row of the send buffer, -1 if it is empty, and the rows
    of each token: one for each destination of its choices, and -1 for the rest.

    `place_nk` are the rows' places in the chunks of their destinations. j is the
    smaller one of the numbers of choices and of destinations.
    """
    k = at_nk.shape[1]
    row_nk = jnp.where(at_nk < 0, EMPTY, level.rows * at_nk + place_nk)
    if k <= level.num:  # the first choice of each destination has its row
        is_again_nkk = at_nk[:, :, None] == at_nk[:, None, :]
        is_again_nkk &= jnp.tri(k, k=-1, dtype=bool)
        position_nj = jnp.where(jnp.any(is_again_nkk, axis=2), EMPTY, row_nk)
    else:
        is_at_nkf = at_nk[:, :, None] == jnp.arange(level.num)
        position_nj = jnp.where(is_at_nkf, row_nk[:, :, None], EMPTY).max(axis=1)
    row_a = position_nj.reshape(-1)
    token_a = jnp.arange(len(row_a), dtype=jnp.int32) // position_nj.shape[1]
    return _invert(row_a, token_a, level.num * level.rows), position_nj


def _invert(
    row_a: Int[Array, " a"], name_a: Int[Array, " a"], num_rows: int
) -> Int[Array, " m"]:
    """Return the name of the entry that has each of `num_rows` rows, -1 for rows that
    none has. Entries of row -1 have none."""
    beyond_a = num_rows + jnp.arange(len(row_a), dtype=jnp.int32)  # dropped
    empty_m = zeros_varying_as(row_a, (num_rows,), jnp.int32) + EMPTY
    return empty_m.at[jnp.where(row_a < 0, beyond_a, row_a)].set(
        name_a, mode="drop", unique_indices=True
    )


def _cards(at_nk, slot_nk, gate_nk, source_m, position_nj, level: Level):
    """Return what travels beside each row, [m, 2k]: the gates of its token's choices,
    and their slots plus 1, or 0 for a choice that lies elsewhere.

    Slots below 2^24 are exact in float32, and so one collective carries both.
    """
    gate_mk = gather_rows(gate_nk, source_m, position_nj, implementation="xla")
    token_m = jnp.maximum(source_m, 0)
    chunk_m1 = (jnp.arange(len(source_m)) // level.rows)[:, None]
    is_here_mk = (source_m >= 0)[:, None] & (at_nk[token_m] == chunk_m1)
    slot_mk = jnp.where(is_here_mk, slot_nk[token_m] + 1, 0)
    return jnp.concatenate([gate_mk, slot_mk.astype(gate_mk.dtype)], axis=1)


def _read_cards(card_rj: Float[Array, "r 2k"]):
    """Return the gates and slots that `_cards` wrote, [r, k] each; slot -1 for none."""
    gate_rk, slot_rk = jnp.split(card_rj, 2, axis=1)
    return gate_rk, jax.lax.stop_gradient(slot_rk).astype(jnp.int32) - 1


def _compute(
    x_rd: Float[Array, "r d"],
    slot_rk: Int[Array, "r k"],
    gate_rk: Float[Array, "r k"],
    *,
    num_rows: int,
    weights: dict[str, Array],
    experts: Experts,
    mesh_layout: MeshLayout,
    gates_input: bool,
) -> Float[Array, "r d"]:
    """Return, for each row, the sum of the results of its slots on this device, each
    times its gate. Experts compute `num_rows` rows, those between slots included."""
    layout = mesh_layout.layout
    implementation = _implementation(layout)
    k = slot_rk.shape[1]
    # Where shards of an expert have the same rows, their gradients are summed here: of
    # rows that came, not of those in slots, which are up to k times as many.
    x_rd, *_ = varying_alike(x_rd, *weights.values())
    rows_s, assignment_m, position_rk = sort_by_slot(slot_rk, num_rows, mesh_layout)
    source_m = assignment_m if k == 1 else assignment_m // k  # -1 stays -1
    with jax.named_scope("dispatch"):
        x_md = gather_rows(
            x_rd,
            source_m,
            position_rk,
            implementation=implementation,
        )
        if gates_input:
            gate_a1, position_a1 = (
                value.reshape(-1, 1) for value in (gate_rk, position_rk)
            )
            gate_m1 = gather_rows(
                gate_a1, assignment_m, position_a1, implementation="xla"
            )
            x_md *= gate_m1.astype(x_md.dtype)
    # Without the barrier XLA:GPU computes the last product twice where results are
    # kept: once into the place where they are kept, and once to be used.
    y_md = jax.lax.optimization_barrier(experts(x_md, rows_s, weights))
    y_md = checkpoint_name(y_md, ROWS)
    with jax.named_scope("combine"):
        if gates_input:
            return sum_rows(y_md, position_rk, source_m, implementation=implementation)
        return combine_rows(
            y_md, gate_rk, position_rk, assignment_m, implementation=implementation
        )


@jax.named_scope("dispatch")
def sort_by_slot(slot_rk: Int[Array, "r k"], num_rows: int, mesh_layout: MeshLayout):
    """Sort the choices of a device's slots by slot, those of a slot in the order of
    rows.

    Return the number of choices of each slot [s], rounded up to the multiple that the
    layout aligns slots to; the choice r * k + .. in each of `num_rows` places, -1 where
    there is none; and the place of each choice [r, k], -1 for choices of other devices.
    """
    layout = mesh_layout.layout
    s, align = layout.slots_per_device, layout.align_rows
    local_rk = slot_rk - s * index_along(mesh_layout.peer_axes)
    local_rk = jnp.where((local_rk >= 0) & (local_rk < s), local_rk, EMPTY)
    has_rs = jnp.any(local_rk[:, :, None] == jnp.arange(s), axis=1)
    end_rs = jnp.cumsum(has_rs, axis=0, dtype=jnp.int32)
    rows_s = -(-end_rs[-1] // align) * align
    first_s = jnp.cumsum(rows_s, dtype=jnp.int32) - rows_s
    place_rs = first_s + end_rs - 1
    position_rk = jnp.take_along_axis(place_rs, jnp.maximum(local_rk, 0), axis=1)
    position_rk = jnp.where(local_rk < 0, EMPTY, position_rk)
    choice_a = jnp.arange(local_rk.size, dtype=jnp.int32)
    assignment_m = _invert(position_rk.reshape(-1), choice_a, num_rows)
    return rows_s, assignment_m, position_rk


def _implementation(layout: Layout) -> str:
    """Return the implementation of the row kernels that the layout asks for."""
    return "xla" if layout.kernels == "plain" else "auto"
