"""The manifest of an exchange: how many rows each device sends to each slot.

It takes one all_gather of int32 counts and one sort. Rows are sorted by expert. A split
then cuts each expert's rows into one block per replica, and the blocks are put in the
order of their slots.

    expert        0 0 0 0 0 1 2 2        expert 0 has slots 0 and 3, 2 + 3 rows
    slot          0 0 3 3 3 1 2 2
    by slot       0 0 1 2 2 3 3 3
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from moejax.moe.exchange.schedules import find_schedule
from moejax.moe.mesh_roles import MeshLayout, index_along
from moejax.moe.split.divide import divide
from moejax.moe.types import Placement
from moejax.plan.layout import Layout

EMPTY = -1


@struct.dataclass
class Manifest:
    """Integer tables of one exchange, which say where each row goes.

    Assignments are numbered a = token * k + choice.
    """

    assignment_a: Int[Array, " a"]
    """Assignments in the order of their slots; within a slot first choices come first,
    then lower tokens."""
    peer_nk: Int[Array, "n k"]
    """Device that computes each choice, -1 if none does."""
    offset_nk: Int[Array, "n k"]
    """Position of the choice among this device's rows for that peer."""
    first_w: Int[Array, " w"]
    """Index in assignment_a of the first row for each peer."""
    counts_up: Int[Array, "u p"]
    """Number of rows from every source to every slot, the same on all devices of the
    group. Without a tensor axis the sources are the group's devices, otherwise its
    different sets of tokens."""
    bound: Int[Array, ""]
    """Lower bound on the rows of the group's fullest device, for any split over these
    replicas."""


@jax.named_scope("manifest")
def manifest(
    expert_nk: Int[Array, "n k"], placement: Placement, mesh_layout: MeshLayout
) -> tuple[Manifest, Placement]:
    """Decide the way of each row of one layer: return the tables of its exchange.

    Also return the placement with the replicas that the split made, or unchanged if the
    split makes none. `mesh_layout` is the one of the exchange, in which a domain is one
    device (MeshLayout.exchanged).

    A choice of -1 goes nowhere. In capacity mode (GShard, section 3.2) at most
    layout.rows_per_slot rows go from one device to one slot, and first choices take
    precedence among an expert's rows.
    """
    layout, (n, k) = mesh_layout.layout, expert_nk.shape
    s, e, sources = (
        layout.slots_per_device,
        layout.num_experts,
        find_schedule(mesh_layout).sources(mesh_layout),
    )
    expert_a = jnp.where(expert_nk < 0, e, expert_nk).T.reshape(-1)
    order_a = jnp.argsort(expert_a, stable=True).astype(jnp.int32)
    count_e = jnp.sum(expert_a[:, None] == jnp.arange(e), axis=0, dtype=jnp.int32)
    counts_ue = count_e[None]
    if sources:
        counts_ue = jax.lax.all_gather(count_e, sources, to="invarying")
    quota_uq, bound, placement = divide(counts_ue, placement, layout)

    slot_q = placement.slot_lq
    kept_uq = length_uq = quota_uq
    if layout.exchange == "capacity":
        kept_uq = jnp.minimum(quota_uq, layout.rows_per_slot)
        length_uq = _append_dropped(kept_uq, quota_uq, placement.expert_lq, e)
    counts_up = jnp.zeros_like(kept_uq).at[:, slot_q].set(kept_uq, unique_indices=True)
    me = index_along(sources)
    count_p, kept_q = counts_up[me], kept_uq[me]

    block_a, within_a = _locate_in_blocks(length_uq[me], n * k)
    first_p = jnp.cumsum(count_p) - count_p
    rank_a = first_p[slot_q[block_a]] + within_a
    is_sent_a = (jnp.arange(n * k) < jnp.sum(count_e)) & (within_a < kept_q[block_a])
    peer_a = jnp.where(is_sent_a, slot_q[block_a] // s, EMPTY)

    count_w = count_p.reshape(-1, s).sum(axis=1)
    first_w = jnp.cumsum(count_w) - count_w
    offset_a = rank_a - first_w[peer_a]
    assignment_a = order_a % n * k + order_a // n
    beyond_a = n * k + jnp.arange(n * k)  # out of bounds: unsent choices are dropped
    target_a = jnp.where(is_sent_a, rank_a, beyond_a)
    sent = Manifest(
        assignment_a=jnp.zeros_like(order_a)
        .at[target_a]
        .set(assignment_a, mode="drop", unique_indices=True),
        peer_nk=_by_assignment(peer_a, assignment_a).reshape(n, k),
        offset_nk=_by_assignment(offset_a, assignment_a).reshape(n, k),
        first_w=first_w,
        counts_up=counts_up,
        bound=bound,
    )
    return sent, placement


def fullest_pair(sent: Manifest, layout: Layout) -> Int[Array, ""]:
    """Return the largest number of rows that one source has for one device, or for one
    of the chunks of those that stay (Layout.home_chunks).

    All devices of the group get the same number.
    """
    pair_uw = _pairs(sent, layout)
    if layout.home_chunks > 1:
        own_uw = -(-pair_uw // layout.home_chunks)
        pair_uw = jnp.where(_is_home(layout), own_uw, pair_uw)
    return jnp.max(pair_uw)


def pair_to_fit(sent: Manifest, layout: Layout) -> Int[Array, ""]:
    """Return the number of rows per peer that the buffer of round 0 should carry.

    It is that of the fullest pair. Some splits fill the buffer with rows that stay on
    their device (Layout.yields_home_rows, moejax.moe.split.deal). Then a device's rows
    for itself do not count, because they would grow with any buffer.
    """
    if layout.num_devices == 1 or not layout.yields_home_rows:
        return fullest_pair(sent, layout)
    return jnp.max(jnp.where(_is_home(layout), 0, _pairs(sent, layout)))


def rows_here(sent: Manifest, mesh_layout: MeshLayout) -> Int[Array, ""]:
    """Return the number of rows that this device computes, with whole experts or with
    its shards of them."""
    rows_w = jnp.sum(_pairs(sent, mesh_layout.layout), axis=0)
    return rows_w[index_along(mesh_layout.peer_axes)]


def num_dropped(expert_nk: Int[Array, "n k"], sent_nk: Int[Array, "n k"]):
    """Count the choices that capacity mode drops: they have an expert but no peer.

    `sent_nk` are the choices' peers (Manifest.peer_nk).
    """
    return jnp.sum((expert_nk >= 0) & (sent_nk < 0), dtype=jnp.int32)


def _pairs(sent: Manifest, layout: Layout) -> Int[Array, "u w"]:
    """Return the number of rows from each source to each device."""
    pair_uw = sent.counts_up.reshape(-1, layout.num_devices, layout.slots_per_device)
    return jnp.sum(pair_uw, axis=-1)


def _is_home(layout: Layout) -> Array:
    """Return whether rows from each source to each device stay there, bool [u, w]."""
    per_device = layout.num_sources // layout.num_devices
    return jnp.repeat(jnp.eye(layout.num_devices, dtype=bool), per_device, axis=0)


def _append_dropped(kept_uq, quota_uq, expert_q, num_experts: int):
    """Return the lengths of the blocks of rows for each slot. The last block of an
    expert is extended by its dropped rows.

    Rows are in order of choice, so second choices are dropped before first ones.
    """
    expert_q = jnp.where(expert_q < 0, num_experts, expert_q)
    dropped_ue = (
        jnp.zeros((len(kept_uq), num_experts + 1), jnp.int32)
        .at[:, expert_q]
        .add(quota_uq - kept_uq)
    )
    is_last_q = jnp.append(expert_q[1:] != expert_q[:-1], True)
    return kept_uq + jnp.where(is_last_q, dropped_ue[:, expert_q], 0)


def _locate_in_blocks(length_q: Int[Array, " q"], total: int):
    """Return the block of each of `total` positions, and the position in that block,
    for blocks of these lengths laid end to end."""
    first_q = jnp.cumsum(length_q) - length_q
    begins_a = jnp.zeros(total, jnp.int32).at[first_q].add(1, mode="drop")
    block_a = jnp.cumsum(begins_a) - 1
    return block_a, jnp.arange(total, dtype=jnp.int32) - first_q[block_a]


def _by_assignment(value_a: Int[Array, " a"], assignment_a: Int[Array, " a"]):
    """Reorder values from the order of experts to the order of assignments."""
    return jnp.zeros_like(value_a).at[assignment_a].set(value_a, unique_indices=True)
