"""Replicas made from the loads of the very micro-batch: every device computes the mean.

    load_e -> placement of this layer and micro-batch, rows_q

Devices with too many rows are paired with devices that have too few: a giver hands a
taker rows of some of its own experts, and with them copies of those. Each taker has
one giver, so it never needs more slots for copies than a device owns experts, and then
all devices have the mean to one row, however skewed the load is. With fewer slots
(Layout.copies_per_device, offers_per_device) the largest grants are kept and the rest
stays with the owner; and everything, where that would leave a device fuller than home.

After MoonEP's planner, as Megatron-LM's kernel for virtual experts has it. The
definition, in NumPy, is moejax.plan.dynamic_replication.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.kernels import varying_alike
from moejax.moe.types import Placement
from moejax.plan.layout import Layout

EMPTY = -1


class _Pairs(NamedTuple):
    giver_w: Int[Array, " w"]
    """Who gives to each device; itself where nobody does."""
    quota_w: Int[Array, " w"]
    """Rows that it is to get."""


@jax.named_scope("dynamic")
def pair(
    load_e: Int[Array, " e"], placement: Placement, layout: Layout
) -> tuple[Placement, Int[Array, " q"]]:
    """The placement with copies, and rows of its q-th slot. `placement` says who owns
    which expert; its own copies, if it has any, are forgotten."""
    w, own = layout.num_devices, layout.experts_per_device
    owned_wi = placement.owned_le.reshape(w, own)
    load_wi = load_e[owned_wi]
    pairs = _paired(jnp.sum(load_wi, axis=1, dtype=jnp.int32))
    given_wi = _granted(pairs, load_wi)
    is_giver_vw = pairs.giver_w == jnp.arange(w)[:, None]

    given_away_wi = _by_giver(is_giver_vw, given_wi)
    is_offered_wi = (given_away_wi > 0) & _is_among(
        given_away_wi, layout.offers_per_device
    )
    given_wi = jnp.where(is_offered_wi[pairs.giver_w], given_wi, 0)
    is_kept_wi = (given_wi > 0) & _is_among(given_wi, layout.copies_per_device)
    given_wi = jnp.where(is_kept_wi, given_wi, 0)

    kept_wi = load_wi - _by_giver(is_giver_vw, given_wi)
    after_w = jnp.sum(kept_wi + given_wi, axis=1, dtype=jnp.int32)
    is_better = jnp.max(after_w) <= jnp.max(jnp.sum(load_wi, axis=1, dtype=jnp.int32))
    given_wi, is_kept_wi = is_better * given_wi, is_better & is_kept_wi
    kept_wi = jnp.where(is_better, kept_wi, load_wi)
    index_wc = _compacted(is_kept_wi, layout.copies_per_device)
    rows_wc = jnp.where(index_wc < 0, 0, _taken(given_wi, index_wc))
    expert_wc = jnp.where(
        index_wc < 0, EMPTY, _taken(owned_wi[pairs.giver_w], index_wc)
    )
    offer_wo = _compacted(is_offered_wi, layout.offers_per_device)
    first_offer_w = pairs.giver_w * layout.offers_per_device
    offer_wi = (jnp.cumsum(is_offered_wi, axis=1, dtype=jnp.int32) - 1)[pairs.giver_w]
    want_wc = first_offer_w[:, None] + _taken(offer_wi, index_wc)
    copy_c = own + jnp.arange(layout.copies_per_device)
    own_i = jnp.broadcast_to(jnp.arange(own), (w, own))
    fill_wc = jnp.where(index_wc < 0, EMPTY, copy_c)
    row_p = jnp.concatenate([owned_wi, expert_wc], axis=1).reshape(-1)
    rows_p = jnp.concatenate([kept_wi, rows_wc], axis=1).reshape(-1)
    tables = _by_expert(row_p, layout)
    placement = placement.replace(
        slot_to_expert_lp=row_p,
        offer_lwo=offer_wo,
        want_lwc=jnp.where(index_wc < 0, EMPTY, want_wc),
        fill_lws=jnp.concatenate([own_i, fill_wc], axis=1),
        **tables,
    )
    return placement, rows_p[tables["slot_lq"]]


def _paired(load_w: Int[Array, " w"]) -> _Pairs:
    """The fullest gives the emptiest all that this lacks, until nobody lacks: a giver
    that gave too much is a taker then."""
    w, total = len(load_w), jnp.sum(load_w, dtype=jnp.int32)
    device_w = jnp.arange(w, dtype=jnp.int32)
    mean_w = total // w + (device_w < total % w)

    def step(_, state):
        balance_w, giver_w, quota_w = state
        giver, taker = jnp.argmax(balance_w), jnp.argmin(balance_w)
        lack = jnp.where(balance_w[giver] > 0, -balance_w[taker], 0)
        giver_w = giver_w.at[taker].set(
            jnp.where(lack > 0, giver, giver_w[taker]).astype(jnp.int32)
        )
        balance_w = balance_w.at[giver].add(-lack).at[taker].add(lack)
        return balance_w, giver_w, quota_w.at[taker].add(lack)

    state = varying_alike(load_w - mean_w, device_w, jnp.zeros_like(load_w))
    _, giver_w, quota_w = jax.lax.fori_loop(0, w - 1, step, state)
    return _Pairs(giver_w, quota_w)


def _granted(pairs: _Pairs, load_wi: Int[Array, "w i"]) -> Int[Array, "w i"]:
    """Rows that each device gets of its giver's i-th expert: the largest quota takes of
    the largest load, again and again, all givers at once."""
    w, own = load_wi.shape
    device_w = jnp.arange(w)
    is_taker_vw = (pairs.giver_w == device_w[:, None]) & (pairs.giver_w != device_w)

    def step(_, state):
        quota_w, left_wi, given_wi = state
        taker_w = jnp.argmax(jnp.where(is_taker_vw, quota_w, -1), axis=1)
        expert_w = jnp.argmax(left_wi, axis=1)
        quota_of_w = jnp.where(jnp.any(is_taker_vw, axis=1), quota_w[taker_w], 0)
        rows_w = jnp.minimum(quota_of_w, left_wi[device_w, expert_w])
        return (
            quota_w.at[taker_w].add(-rows_w),
            left_wi.at[device_w, expert_w].add(-rows_w),
            given_wi.at[taker_w, expert_w].add(rows_w),
        )

    state = varying_alike(pairs.quota_w, load_wi, jnp.zeros_like(load_wi))
    return jax.lax.fori_loop(0, w + own, step, state)[2]


def _by_giver(is_giver_vw, given_wi):
    """What each device gives away of its own experts, [v, i]."""
    return jnp.sum(
        jnp.where(is_giver_vw[:, :, None], given_wi, 0), axis=1, dtype=jnp.int32
    )


def _is_among(rows_wi, limit: int):
    """Whether it is one of the `limit` largest of its row, of equals the first."""
    index_i = jnp.arange(rows_wi.shape[1])
    one, other = rows_wi[:, :, None], rows_wi[:, None, :]
    is_before_wii = (other > one) | ((other == one) & (index_i < index_i[:, None]))
    return jnp.sum(is_before_wii, axis=2, dtype=jnp.int32) < limit


def _compacted(is_wi, size: int):
    """Indices i of what is true, rising, in `size` places; -1 in the rest."""
    place_wi = jnp.where(is_wi, jnp.cumsum(is_wi, axis=1, dtype=jnp.int32) - 1, EMPTY)
    hit_wxi = place_wi[:, None, :] == jnp.arange(size)[:, None]
    index_i = jnp.arange(is_wi.shape[1], dtype=jnp.int32)
    index_wx = jnp.sum(jnp.where(hit_wxi, index_i, 0), axis=2, dtype=jnp.int32)
    return jnp.where(jnp.any(hit_wxi, axis=2), index_wx, EMPTY)


def _taken(value_wi, index_wx):
    return jnp.take_along_axis(value_wi, jnp.maximum(index_wx, 0), axis=1)


def _by_expert(row_p, layout: Layout) -> dict[str, Array]:
    """Tables of Placement for slots that hold no expert twice on one device."""
    key_p = jnp.where(row_p < 0, layout.num_experts, row_p)
    slot_q = jnp.argsort(key_p, stable=True).astype(jnp.int32)
    expert_q = row_p[slot_q]
    index_q = jnp.arange(len(row_p), dtype=jnp.int32)
    is_new_q = jnp.append(True, expert_q[1:] != expert_q[:-1])
    first_q = jax.lax.cummax(jnp.where(is_new_q, index_q, 0))
    return {
        "slot_lq": slot_q,
        "expert_lq": expert_q,
        "replica_lq": index_q - first_q,
        "local_lq": jnp.zeros_like(slot_q),
    }
