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

Where a layout deals nearest first (`Layout.deals_near`), steps 2 and 3 are made within
each node first: as many rows of an expert as the node's devices have, or as its
replicas there need, whichever is less. Only the others leave the node.

What a device keeps of one replica, others must send to other ones. Where whole buffers
travel, so that the fullest pair decides (`Layout.deals_evenly`), step 1 is left out if
that pair is less full without it.
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
    expert_q, device_q, is_active_q = find_active(placement, layout)
    here_q = jnp.where(is_active_q, counts_we[device_q, expert_q], 0)
    local_q = _count_local_rows(counts_we, here_q, rows_q, placement, layout)
    args = counts_we, rows_q, expert_q, device_q, layout
    dealt_qw = _deal(local_q, *args)
    if layout.deals_evenly:
        without_qw = _deal(jnp.zeros_like(local_q), *args)
        fullest, least = (_fullest_pair(x, device_q) for x in (dealt_qw, without_qw))
        dealt_qw = jnp.where(fullest <= least, dealt_qw, without_qw)
    return dealt_qw.T


def _fullest_pair(dealt_qw: Int[Array, "q w"], device_q) -> Int[Array, ""]:
    """Return the most rows that one device gives to another."""
    w = dealt_qw.shape[1]
    pair_ww = jnp.zeros((w, w), jnp.int32).at[device_q].add(dealt_qw)
    return jnp.max(jnp.where(jnp.eye(w, dtype=bool), 0, pair_ww))


def _deal(
    local_q: Int[Array, " q"], counts_we, rows_q, expert_q, device_q, layout: Layout
) -> Int[Array, "q w"]:
    """Return the rows of each slot from each source, where the q-th slot has `local_q`
    from its own device."""
    # Arrays are [q, w], because XLA gathers and scatters whole rows of an array at
    # once, and columns element by element.
    is_here_qw = device_q[:, None] == jnp.arange(layout.num_devices)
    left_ew = counts_we.T.at[expert_q, device_q].add(-local_q)
    dealt_qw = jnp.where(is_here_qw, local_q[:, None], 0)
    args = left_ew, rows_q - local_q, expert_q, device_q
    nodes = (layout.num_nodes, 1) if layout.deals_near else (1,)
    return dealt_qw + _divided(*args, nodes)


def share_out(
    counts_ie: Int[Array, "i e"], rows_q: Int[Array, " q"], expert_q: Int[Array, " q"]
) -> Int[Array, "i q"]:
    """Return the number of rows that each source of one device sends to each slot, when
    the device's rows for each slot are given: about as many from each."""
    no_device_q = jnp.zeros_like(expert_q)
    return _divided(counts_ie.T, rows_q, expert_q, no_device_q, (1,)).T


def _divided(left_ew, left_q, expert_q, device_q, levels) -> Int[Array, "q w"]:
    """Return the rows of each slot from each source, which no source keeps, within the
    nodes of each level first: steps 2 and 3."""
    divided_qw = jnp.zeros((len(left_q), left_ew.shape[1]), jnp.int32)
    for nodes in levels:
        near = _Nodes.of(expert_q, device_q, left_ew.shape[1], nodes)
        for step in (_shares, _overlap):
            step_qw = step(left_ew, left_q, near)
            left_ew = left_ew.at[expert_q].add(-step_qw)
            left_q = left_q - jnp.sum(step_qw, axis=1, dtype=jnp.int32)
            divided_qw += step_qw
    return divided_qw


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


class _Nodes(NamedTuple):
    """Runs of consecutive devices, within which rows are dealt."""

    expert_q: Int[Array, " q"]
    node_q: Int[Array, " q"]
    """Node of the q-th slot."""
    first_q: Int[Array, " q"]
    """First of the slots of the same expert on the same node."""
    is_near_qw: Array
    """Whether each device is on the node of the q-th slot, bool [q, w]."""
    num: int
    """Number of nodes."""

    @classmethod
    def of(cls, expert_q, device_q, num_devices: int, num: int) -> "_Nodes":
        """Return `num` nodes of equally many devices, and the slots on them."""
        node_q = device_q // (num_devices // num)
        index_q = jnp.arange(len(expert_q), dtype=jnp.int32)
        is_new_q = (jnp.diff(expert_q) != 0) | (jnp.diff(node_q) != 0)
        first_q = jax.lax.cummax(jnp.where(jnp.append(True, is_new_q), index_q, 0))
        node_w = jnp.arange(num_devices) // (num_devices // num)
        return cls(expert_q, node_q, first_q, node_q[:, None] == node_w, num)

    def up_to(self, value_ew: Int[Array, "e w"]) -> Int[Array, "e w"]:
        """Return sums over the devices of a node, up to each device and with it."""
        value_emi = value_ew.reshape(len(value_ew), self.num, -1)
        sums_emi = jnp.cumsum(value_emi, axis=2, dtype=jnp.int32)
        return sums_emi.reshape(value_ew.shape)


def _shares(left_ew, left_q, near: _Nodes) -> Int[Array, "q w"]:
    """Divide the remaining rows of each source among the slots of their expert on its
    node, in proportion to the slots' remaining room, rounded down."""
    shape, at_q = (len(left_ew), near.num), (near.expert_q, near.node_q)
    total_em = jnp.sum(left_ew.reshape(*shape, -1), axis=2, dtype=jnp.int32)
    if near.num > 1:  # on one node all rows find room, and room all rows
        room_em = jnp.zeros(shape, jnp.int32).at[at_q].add(left_q)
        total_em = jnp.maximum(total_em, room_em)
    total_q = total_em[at_q]
    share_qw = _product_over(left_ew[near.expert_q], left_q[:, None], total_q[:, None])
    return jnp.where(near.is_near_qw, share_qw, 0)


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


def _overlap(left_ew, left_q, near: _Nodes) -> Int[Array, "q w"]:
    """Return the rows from each source to each slot that remain after `_shares`.

    The rows of an expert and node are laid out on one line twice, by source and by
    slot. A source sends to a slot as many rows as their intervals overlap.
    """
    end_ew = near.up_to(left_ew)
    end_q = jnp.cumsum(left_q, dtype=jnp.int32)
    end_q1 = (end_q - (end_q - left_q)[near.first_q])[:, None]
    begin_q1 = end_q1 - left_q[:, None]
    end_qw, begin_qw = end_ew[near.expert_q], (end_ew - left_ew)[near.expert_q]
    rows_qw = jnp.minimum(end_qw, end_q1) - jnp.maximum(begin_qw, begin_q1)
    return jnp.where(near.is_near_qw, jnp.maximum(rows_qw, 0), 0)
