"""Top-up: water-filling over a plan's replicas, and a few copies of experts for a
micro-batch in which these leave a device above the limit; int32.

    load_e -> placement of this layer and micro-batch, rows_q

Rows move along shortest paths of devices to devices below the limit, and where there is
no path, the emptiest device gets a copy of an expert of the fullest one. The
definition, in NumPy, is moejax.plan.top_up. Tables here are dense, [e, w]: a search
reads whole rows and columns of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from moejax.kernels import varying_alike
from moejax.moe.split import water_filling as water
from moejax.moe.split.deal import find_active
from moejax.moe.split.dynamic import tables_by_expert
from moejax.moe.types import Placement
from moejax.plan.layout import Layout
from moejax.plan.top_up import STEPS_PER_DEVICE, max_rows

EMPTY = -1


class ToppedUp(NamedTuple):
    """Placement with the copies of a micro-batch, and the rows of its slots."""

    placement: Placement
    rows_q: Int[Array, " q"]
    """Rows of the q-th slot of `placement`."""
    bound: Int[Array, ""]
    """Lower bound on the rows of the fullest device: that of water-filling, or the mean
    where there are copies."""


class _State(NamedTuple):
    """Rows of each expert on each device, and the copies made so far."""

    rows_ew: Int[Array, "e w"]
    is_held_ew: Bool[Array, "e w"]
    level_w: Int[Array, " w"]
    offer_e: Int[Array, " e"]
    """Offer of each expert, counted over all devices; -1 for none."""
    num_offers_w: Int[Array, " w"]
    num_copies_w: Int[Array, " w"]
    offer_wo: Int[Array, "w o"]
    want_wc: Int[Array, "w c"]
    expert_wc: Int[Array, "w c"]
    steps: Int[Array, ""]
    is_stuck: Bool[Array, ""]
    """Whether there is neither a path nor a copy that budgets allow."""


@jax.named_scope("top_up")
def top_up(
    load_e: Int[Array, " e"],
    placement: Placement,
    layout: Layout,
    tolerance: Int[Array, ""],
) -> ToppedUp:
    """Return a placement with the copies that these loads need, and the rows of its
    slots.

    The last `top_up_copies` slots of each device are for copies (`Layout.topped_up`).
    Its tables offer_lwo and want_lwc are those of the copies: offers are slots of the
    plan. The placement has no tables for water-filling (color_lq, num_colors_l stay as
    they were).
    """
    w, e = layout.num_devices, layout.num_experts
    filling = water.fill(load_e, placement, layout, tolerance)
    expert_q, device_q, is_active_q = find_active(placement, layout)
    total = jnp.sum(load_e, dtype=jnp.int32)
    limit = max_rows(total, layout)

    rows_q = jnp.where(is_active_q, filling.rows_q, 0)
    rows_ew = jnp.zeros((e, w), jnp.int32).at[expert_q, device_q].add(rows_q)
    slot_q = jnp.where(is_active_q, placement.slot_lq % layout.slots_per_device, EMPTY)
    slot_ew = jnp.full((e, w), EMPTY, jnp.int32).at[expert_q, device_q].max(slot_q)
    none_wo = jnp.full((w, layout.top_up_offers), EMPTY, jnp.int32)
    none_wc = jnp.full((w, layout.top_up_copies), EMPTY, jnp.int32)
    zero_w = jnp.zeros(w, jnp.int32)
    start = _State(
        rows_ew=rows_ew,
        is_held_ew=slot_ew >= 0,
        level_w=jnp.sum(rows_ew, axis=0, dtype=jnp.int32),
        offer_e=jnp.full(e, EMPTY, jnp.int32),
        num_offers_w=zero_w,
        num_copies_w=zero_w,
        offer_wo=none_wo,
        want_wc=none_wc,
        expert_wc=none_wc,
        steps=jnp.int32(0),
        is_stuck=jnp.bool_(False),
    )
    start = _State(*varying_alike(*start))

    def goes_on(state: _State):
        is_above = jnp.max(state.level_w) > limit
        return is_above & ~state.is_stuck & (state.steps < STEPS_PER_DEVICE * w)

    def step(state: _State):
        hops = _search(state, limit)
        is_end_w = (hops.to_w < w) & (state.level_w < limit)
        transfer = jax.lax.cond(
            jnp.any(is_end_w),
            lambda: _find_path(state, hops, _first(is_end_w), limit),
            lambda: _find_copy(state, slot_ew, limit, layout),
        )
        return _apply(state, transfer, slot_ew, layout)

    state = jax.lax.while_loop(goes_on, step, start)
    has_copies = jnp.any(state.num_copies_w > 0)
    bound = jnp.where(has_copies, -(-total // w), filling.bound)
    placement = _with_copies(placement, state, layout)
    expert_q, device_q, is_active_q = find_active(placement, layout)
    rows_q = jnp.where(is_active_q, state.rows_ew[expert_q, device_q], 0)
    return ToppedUp(placement, rows_q, bound)


def _first(is_w: Bool[Array, " w"]) -> Int[Array, ""]:
    """Return the index of the first true entry."""
    return jnp.argmax(is_w).astype(jnp.int32)


class _Hops(NamedTuple):
    """Minimum number of moves from a device above the limit."""

    to_w: Int[Array, " w"]
    """.. to each device; w if it was not reached."""
    of_e: Int[Array, " e"]
    """.. before one that moves rows of each expert; w if none does."""


def _search(state: _State, limit) -> _Hops:
    """Search breadth-first from all devices above the limit for one below it."""
    (e, w), level_w = state.rows_ew.shape, state.level_w
    has_rows_ew = state.rows_ew > 0

    def goes_on(found):
        to_w, _, _, has_grown = found
        return has_grown & ~jnp.any((to_w < w) & (level_w < limit))

    def step(found):
        to_w, of_e, hops, _ = found
        gives_e = jnp.any(has_rows_ew & (to_w == hops), axis=1)
        is_new_w = jnp.any(state.is_held_ew & gives_e[:, None], axis=0) & (to_w == w)
        of_e = jnp.where(gives_e, jnp.minimum(of_e, hops), of_e)
        return jnp.where(is_new_w, hops + 1, to_w), of_e, hops + 1, jnp.any(is_new_w)

    to_w = jnp.where(level_w > limit, 0, w).astype(jnp.int32)
    start = to_w, jnp.full(e, w, jnp.int32), jnp.int32(0), jnp.bool_(True)
    start = varying_alike(*start, level_w)[:4]
    to_w, of_e, _, _ = jax.lax.while_loop(goes_on, step, start)
    return _Hops(to_w, of_e)


class _Transfer(NamedTuple):
    """Rows that move along a path of devices, from its last device to its first, and
    the copy that is made for it if there is one."""

    expert_i: Int[Array, " i"]
    """Expert of each move."""
    device_i: Int[Array, " i+1"]
    """Devices of the path."""
    length: Int[Array, ""]
    """Number of moves; further entries count for nothing."""
    amount: Int[Array, ""]
    """Number of rows; 0 if there is neither a path nor a copy."""
    holder: Int[Array, ""]
    """Device that offers the expert that is copied; -1 if nothing is."""


def _find_path(state: _State, hops: _Hops, end, limit) -> _Transfer:
    """Return a shortest path to the device `end`, and as many rows as it can carry."""
    num_devices, level_w = len(hops.to_w), state.level_w

    def back(i, path):
        expert_i, device_i, amount = path
        device = device_i[i]
        hop = hops.to_w[device] - 1
        is_on_path_e = state.is_held_ew[:, device] & (hops.of_e == hop)
        expert = jnp.argmax(is_on_path_e).astype(jnp.int32)
        rows_w = state.rows_ew[expert]
        giver = jnp.argmax((rows_w > 0) & (hops.to_w == hop)).astype(jnp.int32)
        amount = jnp.minimum(amount, rows_w[giver])
        return expert_i.at[i].set(expert), device_i.at[i + 1].set(giver), amount

    expert_i = jnp.zeros(num_devices, jnp.int32)
    device_i = jnp.zeros(num_devices + 1, jnp.int32).at[0].set(end)
    start = varying_alike(expert_i, device_i, limit - level_w[end], level_w)[:3]
    length = hops.to_w[end]
    expert_i, device_i, amount = jax.lax.fori_loop(0, length, back, start)
    amount = jnp.minimum(amount, level_w[device_i[length]] - limit)
    transfer = expert_i, device_i, length, amount, jnp.int32(EMPTY)
    return _Transfer(*varying_alike(*transfer))


def _find_copy(state: _State, slot_ew, limit, layout: Layout) -> _Transfer:
    """Return rows of the fullest device for a copy on the emptiest one, if budgets
    allow it."""
    w, rows_ew, level_w = layout.num_devices, state.rows_ew, state.level_w
    giver = jnp.argmax(level_w).astype(jnp.int32)
    excess_w = jnp.maximum(level_w - limit, 0)
    room_w = jnp.maximum(limit - level_w, 0)
    may_offer_ew = (slot_ew >= 0) & (state.num_offers_w < layout.top_up_offers)
    has_offer_e = (state.offer_e >= 0) | jnp.any(may_offer_ew, axis=1)
    may_give_e = has_offer_e & (rows_ew[:, giver] > 0)
    may_take_w = jnp.any(~state.is_held_ew & may_give_e[:, None], axis=0)
    may_take_w &= state.num_copies_w < layout.top_up_copies
    room_w = jnp.where(may_take_w, room_w, 0)
    taker = jnp.argmax(room_w).astype(jnp.int32)
    room = room_w[taker]

    over_ew = jnp.minimum(rows_ew, excess_w)
    is_last = state.num_copies_w[taker] + 1 == layout.top_up_copies
    given_e = jnp.where(is_last, rows_ew[:, giver], over_ew[:, giver])
    amount_e = jnp.minimum(given_e, room)
    amount_e = jnp.where(may_give_e & ~state.is_held_ew[:, taker], amount_e, 0)
    is_best_e = amount_e == jnp.max(amount_e)
    over_e = jnp.sum(over_ew, axis=1, dtype=jnp.int32)
    expert = jnp.argmax(jnp.where(is_best_e, over_e, EMPTY)).astype(jnp.int32)
    num_offers_w = jnp.where(may_offer_ew[expert], state.num_offers_w, layout.num_slots)
    holder = jnp.argmin(num_offers_w).astype(jnp.int32)

    expert_i = jnp.zeros(w, jnp.int32).at[0].set(expert)
    device_i = jnp.zeros(w + 1, jnp.int32).at[0].set(taker).at[1].set(giver)
    amount = jnp.where(room > 0, amount_e[expert], 0)
    holder = jnp.where(room > 0, holder, EMPTY)
    transfer = expert_i, device_i, jnp.int32(1), amount, holder
    return _Transfer(*varying_alike(*transfer))


def _apply(state: _State, moved: _Transfer, slot_ew, layout: Layout) -> _State:
    """Move the rows of a transfer, and note its copy and a new offer."""
    e, offers, copies = layout.num_experts, layout.top_up_offers, layout.top_up_copies
    end, source = moved.device_i[0], moved.device_i[moved.length]
    expert, holder, amount = moved.expert_i[0], moved.holder, moved.amount
    is_move_i = jnp.arange(len(moved.expert_i)) < moved.length
    rows_i = jnp.where(is_move_i, amount, 0)
    rows_ew = state.rows_ew.at[moved.expert_i, moved.device_i[:-1]].add(rows_i)
    rows_ew = rows_ew.at[moved.expert_i, moved.device_i[1:]].add(-rows_i)

    is_copy = holder >= 0
    is_new = is_copy & (state.offer_e[expert] < 0)
    new_offer = holder * offers + state.num_offers_w[holder]
    offer = jnp.where(is_new, new_offer, state.offer_e[expert])
    # Indices out of bounds are dropped.
    expert_at = jnp.where(is_copy, expert, e)
    offer_at = jnp.where(is_new, state.num_offers_w[holder], offers)
    copy_at = jnp.where(is_copy, state.num_copies_w[end], copies)
    slot = slot_ew[expert, holder]
    return _State(
        rows_ew=rows_ew,
        is_held_ew=state.is_held_ew.at[expert_at, end].set(True, mode="drop"),
        level_w=state.level_w.at[source].add(-amount).at[end].add(amount),
        offer_e=state.offer_e.at[expert_at].set(offer, mode="drop"),
        num_offers_w=state.num_offers_w.at[holder].add(is_new.astype(jnp.int32)),
        num_copies_w=state.num_copies_w.at[end].add(is_copy.astype(jnp.int32)),
        offer_wo=state.offer_wo.at[holder, offer_at].set(slot, mode="drop"),
        want_wc=state.want_wc.at[end, copy_at].set(offer, mode="drop"),
        expert_wc=state.expert_wc.at[end, copy_at].set(expert, mode="drop"),
        steps=state.steps + 1,
        is_stuck=amount == 0,
    )


def _with_copies(placement: Placement, state: _State, layout: Layout) -> Placement:
    """Return the placement with the copies in the last slots of each device."""
    slot_q = placement.slot_lq
    row_p = jnp.zeros_like(slot_q).at[slot_q].set(placement.expert_lq)
    row_ws = row_p.reshape(layout.num_devices, -1)
    row_ws = row_ws.at[:, -layout.top_up_copies :].set(state.expert_wc)
    return placement.replace(
        offer_lwo=state.offer_wo,
        want_lwc=state.want_wc,
        **tables_by_expert(row_ws.reshape(-1), layout),
    )
