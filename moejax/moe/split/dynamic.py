"""Dynamic replication: copies of experts, made for the loads of each micro-batch.

    load_e -> placement of this layer and micro-batch, rows_q

Devices with too many rows are paired with devices that have too few. A giver hands a
taker rows of some of its own experts, and copies of these experts. Each taker has one
giver, so a taker needs at most as many slots for copies as a device owns experts. With
that many slots all devices get the mean, up to one row, however skewed the load is.
With fewer slots (Layout.copies_per_device, offers_per_device) the largest grants are
kept and the other rows stay with the owner. If even so a device would be fuller than
the fullest is without copies, no copies are made.

The algorithm is that of MoonEP's planner, as in Megatron-LM's kernel for virtual
experts. The definition, in NumPy, is moejax.plan.dynamic_replication.
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
    """Pairs of devices, of which the giver hands over some of its rows."""

    giver_w: Int[Array, " w"]
    """Device that gives rows to each device; the device itself if none does."""
    quota_w: Int[Array, " w"]
    """Number of rows that each device should get from its giver."""


@jax.named_scope("dynamic")
def pair(
    load_e: Int[Array, " e"], placement: Placement, layout: Layout
) -> tuple[Placement, Int[Array, " q"]]:
    """Return a placement with copies of experts that balances these loads, and the
    number of rows of its q-th slot.

    Owners are those of `placement`; copies in it are dropped. The new placement has no
    tables for water-filling (color_lq, num_colors_l stay as they were).
    """
    w, own = layout.num_devices, layout.experts_per_device
    owned_wi = placement.gathered_le.reshape(w, own)
    load_wi = load_e[owned_wi]
    pairs = _pair_devices(jnp.sum(load_wi, axis=1, dtype=jnp.int32))
    given_wi = _grant_rows(pairs, load_wi)
    is_giver_vw = pairs.giver_w == jnp.arange(w)[:, None]

    offered_wi = _sum_by_giver(is_giver_vw, given_wi)
    is_offered_wi = offered_wi > 0
    is_offered_wi &= _is_among_largest(offered_wi, layout.offers_per_device)
    given_wi = jnp.where(is_offered_wi[pairs.giver_w], given_wi, 0)
    is_kept_wi = given_wi > 0
    is_kept_wi &= _is_among_largest(given_wi, layout.copies_per_device)
    given_wi = jnp.where(is_kept_wi, given_wi, 0)

    kept_wi = load_wi - _sum_by_giver(is_giver_vw, given_wi)
    after_w = jnp.sum(kept_wi + given_wi, axis=1, dtype=jnp.int32)
    is_better = jnp.max(after_w) <= jnp.max(jnp.sum(load_wi, axis=1, dtype=jnp.int32))
    given_wi, is_kept_wi = is_better * given_wi, is_better & is_kept_wi
    kept_wi = jnp.where(is_better, kept_wi, load_wi)
    index_wc = true_indices(is_kept_wi, layout.copies_per_device)
    is_copy_wc = index_wc >= 0
    rows_wc = jnp.where(is_copy_wc, _take(given_wi, index_wc), 0)
    expert_wc = jnp.where(is_copy_wc, _take(owned_wi[pairs.giver_w], index_wc), EMPTY)
    offer_wo = true_indices(is_offered_wi, layout.offers_per_device)
    first_offer_w = pairs.giver_w * layout.offers_per_device
    offer_wi = (jnp.cumsum(is_offered_wi, axis=1, dtype=jnp.int32) - 1)[pairs.giver_w]
    want_wc = first_offer_w[:, None] + _take(offer_wi, index_wc)
    copy_c = own + jnp.arange(layout.copies_per_device)
    own_i = jnp.broadcast_to(jnp.arange(own), (w, own))
    fill_wc = jnp.where(is_copy_wc, copy_c, EMPTY)
    row_p = jnp.concatenate([owned_wi, expert_wc], axis=1).reshape(-1)
    rows_p = jnp.concatenate([kept_wi, rows_wc], axis=1).reshape(-1)
    tables = tables_by_expert(row_p, layout)
    placement = placement.replace(
        slot_to_expert_lp=row_p,
        offer_lwo=offer_wo,
        want_lwc=jnp.where(is_copy_wc, want_wc, EMPTY),
        fill_lws=jnp.concatenate([own_i, fill_wc], axis=1),
        **tables,
    )
    return placement, rows_p[tables["slot_lq"]]


def _pair_devices(load_w: Int[Array, " w"]) -> _Pairs:
    """Pair givers with takers of rows, so that every device would have the mean number
    of rows.

    In each step the fullest device gives the emptiest all rows that it lacks. A giver
    that is then below the mean becomes a taker itself.
    """
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


def _grant_rows(pairs: _Pairs, load_wi: Int[Array, "w i"]) -> Int[Array, "w i"]:
    """Return how many rows of its giver's i-th expert each device gets.

    In each step, and for all givers at once, the taker with the largest open quota gets
    rows of the giver's expert with the largest load.
    """
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


def _sum_by_giver(is_giver_vw, given_wi):
    """Return how many rows of its i-th expert each device v gives away, [v, i]."""
    return jnp.sum(
        jnp.where(is_giver_vw[:, :, None], given_wi, 0), axis=1, dtype=jnp.int32
    )


def _is_among_largest(rows_wi, limit: int):
    """Return whether each value is among the `limit` largest of its row.

    If values are equal, the first counts as larger.
    """
    index_i = jnp.arange(rows_wi.shape[1])
    one, other = rows_wi[:, :, None], rows_wi[:, None, :]
    is_before_wii = (other > one) | ((other == one) & (index_i < index_i[:, None]))
    return jnp.sum(is_before_wii, axis=2, dtype=jnp.int32) < limit


def true_indices(is_wi, size: int):
    """Return the indices i at which each row is true, ascending, filled up with -1 to
    `size` entries."""
    rank_wi = jnp.where(is_wi, jnp.cumsum(is_wi, axis=1, dtype=jnp.int32) - 1, EMPTY)
    hit_wxi = rank_wi[:, None, :] == jnp.arange(size)[:, None]
    index_i = jnp.arange(is_wi.shape[1], dtype=jnp.int32)
    index_wx = jnp.sum(jnp.where(hit_wxi, index_i, 0), axis=2, dtype=jnp.int32)
    return jnp.where(jnp.any(hit_wxi, axis=2), index_wx, EMPTY)


def _take(value_wi, index_wx):
    """Return value[w, index[w, x]]; an index of -1 reads the first value."""
    return jnp.take_along_axis(value_wi, jnp.maximum(index_wx, 0), axis=1)


def tables_by_expert(row_p, layout: Layout) -> dict[str, Array]:
    """Return a placement's tables by expert, for one layer's slots `row_p`."""
    key_p = jnp.where(row_p < 0, layout.num_experts, row_p)
    slot_q = jnp.argsort(key_p, stable=True).astype(jnp.int32)
    expert_q, device_q = row_p[slot_q], slot_q // layout.slots_per_device
    index_q = jnp.arange(len(row_p), dtype=jnp.int32)
    is_new_q = jnp.append(True, expert_q[1:] != expert_q[:-1])
    is_there_q = is_new_q | jnp.append(True, device_q[1:] != device_q[:-1])
    first_q, here_q = (
        jax.lax.cummax(jnp.where(starts_q, index_q, 0))
        for starts_q in (is_new_q, is_there_q)
    )
    return {
        "slot_lq": slot_q,
        "expert_lq": expert_q,
        "replica_lq": index_q - first_q,
        "local_lq": index_q - here_q,
    }
