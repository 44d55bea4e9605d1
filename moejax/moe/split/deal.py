"""Dealing of rows: from rows per slot to rows from each source to each slot.

Both margins are exact: the rows of each slot, and the rows of each source.

1. Rows stay on their device, as far as its replica has room and, with a tensor axis,
   the buffer of round 0.
2. Each source divides its other rows among the replicas of their expert, in proportion
   to the rows that these still need, rounded down. All pairs of devices then have about
   equally many rows, and the fullest pair decides the number of rounds.
3. The few rows that are left are laid out twice on one line, by source and by replica.
   Overlapping parts are the rows from that source to that replica (FineMoE,
   arXiv 2511.16947, Algorithm 1, without its loops):

    sources     |0 0 0 0|1 1|3 3 3|
    replicas    |a a|b b b b b|c c|        0 -> a 2, b 2; 1 -> b 2; 3 -> b 1, c 2
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.moe.types import Placement
from moejax.plan.layout import Layout

SHARE_BITS = 15
"""Number of bits to which factors are cut, so that their products fit into int32."""


class Division(NamedTuple):
    """Result of a split: how many rows go from each source to each slot."""

    quota_wq: Int[Array, "w q"]
    """Rows from each source device to the q-th slot."""
    bound: Int[Array, ""]
    """Lower bound on the rows of the fullest device, for any split over these replicas;
    the mean, for splits that compute no better one."""
    placement: Placement
    """Placement with the replicas that the split made. Splits that make none return it
    unchanged."""


def deal(
    counts_we: Int[Array, "w e"],
    rows_q: Int[Array, " q"],
    placement: Placement,
    layout: Layout,
) -> Int[Array, "w q"]:
    """Return the number of rows that each source device sends to each slot, when the
    number of rows of each slot is given.

    Over the slots of an expert, `rows_q` must sum to its load. If a device has several
    slots of an expert, all but the first must have no rows.
    """
    # Arrays are [q, w], because XLA gathers and scatters whole rows of an array at
    # once, and columns element by element.
    expert_q, device_q, is_active_q = find_active(placement, layout)
    here_q = jnp.where(is_active_q, counts_we[device_q, expert_q], 0)
    local_q = _count_local_rows(counts_we, here_q, rows_q, placement, layout)
    is_here_qw = device_q[:, None] == jnp.arange(layout.num_devices)

    left_ew = counts_we.T.at[expert_q, device_q].add(-local_q)
    left_q = rows_q - local_q
    first_q = jnp.arange(len(expert_q)) - placement.replica_lq
    dealt_qw = jnp.where(is_here_qw, local_q[:, None], 0)

    share_qw = _shares(left_ew, left_q, expert_q)
    left_ew = left_ew.at[expert_q].add(-share_qw)
    left_q = left_q - jnp.sum(share_qw, axis=1, dtype=jnp.int32)
    rest_qw = _overlap(left_ew, left_q, expert_q, first_q)
    return (dealt_qw + share_qw + rest_qw).T


def find_active(placement: Placement, layout: Layout):
    """Return the expert of the q-th slot (0 for an empty one), its device, and whether
    it is active: not empty, and the first slot of its expert on that device."""
    expert_q = jnp.maximum(placement.expert_lq, 0)
    device_q = placement.slot_lq // layout.slots_per_device
    return expert_q, device_q, (placement.expert_lq >= 0) & (placement.local_lq == 0)


def _count_local_rows(counts_we, here_q, rows_q, placement: Placement, layout: Layout):
    """Return how many rows stay on their device, for the q-th slot.

    Where rows that stay are in a buffer too (Layout.keeps_home_rows), the buffer from a
    device to itself also carries those that step 2 keeps on the device. These get room
    first.
    """
    if layout.keeps_home_rows:
        return jnp.minimum(here_q, rows_q)
    expert_q = jnp.maximum(placement.expert_lq, 0)
    load_q = jnp.sum(counts_we, axis=0, dtype=jnp.int32)[expert_q]
    is_active_q = find_active(placement, layout)[2].astype(jnp.int32)
    share_q = _product_over(here_q, rows_q, load_q) + is_active_q
    max_q = jnp.minimum(here_q, rows_q)
    slot_q, shape = placement.slot_lq, (2, layout.num_devices, layout.slots_per_device)
    both_p = jnp.zeros((2, len(slot_q)), jnp.int32)
    both_p = both_p.at[:, slot_q].set(jnp.stack([max_q, share_q]))
    max_ws, share_ws = both_p.reshape(shape)
    before_ws = jnp.cumsum(max_ws, axis=1, dtype=jnp.int32) - max_ws
    room_w1 = layout.rows_per_peer - jnp.sum(
        share_ws, axis=1, keepdims=True, dtype=jnp.int32
    )
    stays_ws = jnp.clip(room_w1 - before_ws, 0, max_ws)
    return stays_ws.reshape(-1)[slot_q]


def _shares(left_ew, left_q, expert_q) -> Int[Array, "q w"]:
    """Divide the remaining rows of each source among the slots of their expert, in
    proportion to the slots' remaining room, rounded down."""
    load_q = jnp.sum(left_ew, axis=1, dtype=jnp.int32)[expert_q]
    return _product_over(left_ew[expert_q], left_q[:, None], load_q[:, None])


def _product_over(x, y, total):
    """Return x * y / total, rounded down, for y <= total; 0 if total is 0.

    The factors are cut to SHARE_BITS bits, so the result may be a little too small, but
    never too large.
    """
    low, x_low = _excess_bits(total), _excess_bits(x)
    share = (x >> x_low) * (y >> low) // ((total >> low) + 1)
    return share << x_low


def _excess_bits(value):
    """Return the number of bits by which a value is longer than SHARE_BITS."""
    return jnp.maximum(32 - SHARE_BITS - jax.lax.clz(value), 0)


def _overlap(left_ew, left_q, expert_q, first_q) -> Int[Array, "q w"]:
    """Return the rows from each source to each slot that remain after `_shares`.

    The rows of an expert are laid out on one line twice, by source and by slot. A
    source sends to a slot as many rows as their intervals overlap.
    """
    end_ew = jnp.cumsum(left_ew, axis=1, dtype=jnp.int32)
    end_q = jnp.cumsum(left_q, dtype=jnp.int32)
    end_q1 = (end_q - (end_q - left_q)[first_q])[:, None]
    begin_q1 = end_q1 - left_q[:, None]
    end_qw, begin_qw = end_ew[expert_q], (end_ew - left_ew)[expert_q]
    return jnp.maximum(jnp.minimum(end_qw, end_q1) - jnp.maximum(begin_qw, begin_q1), 0)
