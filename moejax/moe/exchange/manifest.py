"""Who sends how much to whom: int32 only, one all_gather, one sort.

Rows are sorted by expert; a split then cuts each expert's rows into one block per
replica, and the blocks are put in the order of their slots.

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
    """All integers of one exchange; assignment a = n * k + choice, token-major."""

    assignment_a: Int[Array, " a"]
    """Assignments by slot; within a slot first choices first, then by token."""
    peer_nk: Int[Array, "n k"]
    """Device of the choice; -1 where it goes nowhere."""
    place_nk: Int[Array, "n k"]
    """Position among this device's rows for that peer."""
    first_w: Int[Array, " w"]
    """Where each peer's rows begin in assignment_a."""
    counts_up: Int[Array, "u p"]
    """Rows from every source to every slot, equal on all devices of the group. Sources
    are its devices; with a tensor axis, its different sets of tokens."""
    bound: Int[Array, ""]
    """No split over these replicas leaves the group's fullest device fewer rows."""


@jax.named_scope("manifest")
def manifest(
    expert_nk: Int[Array, "n k"], placement: Placement, mesh_layout: MeshLayout
) -> tuple[Manifest, Placement]:
    """The manifest of one layer's placement, and the placement with the replicas that
    the split made: the same one, if it makes none. `mesh_layout` is as rows see it
    (MeshLayout.exchanged).

    An expert of -1 goes nowhere. In capacity mode (GShard, section 3.2) at most
    layout.rows_per_slot rows go from one device to one slot; of an expert's rows the
    first choices go first.
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
        length_uq = _with_dropped_last(kept_uq, quota_uq, placement.expert_lq, e)
    counts_up = jnp.zeros_like(kept_uq).at[:, slot_q].set(kept_uq, unique_indices=True)
    me = index_along(sources)
    count_p, kept_q = counts_up[me], kept_uq[me]

    block_a, within_a = _blocks(length_uq[me], n * k)
    first_p = jnp.cumsum(count_p) - count_p
    rank_a = first_p[slot_q[block_a]] + within_a
    is_sent_a = (jnp.arange(n * k) < jnp.sum(count_e)) & (within_a < kept_q[block_a])
    peer_a = jnp.where(is_sent_a, slot_q[block_a] // s, EMPTY)

    count_w = count_p.reshape(-1, s).sum(axis=1)
    first_w = jnp.cumsum(count_w) - count_w
    place_a = rank_a - first_w[peer_a]
    assignment_a = order_a % n * k + order_a // n
    beyond_a = n * k + jnp.arange(n * k)  # what goes nowhere falls off the end
    target_a = jnp.where(is_sent_a, rank_a, beyond_a)
    sent = Manifest(
        assignment_a=jnp.zeros_like(order_a)
        .at[target_a]
        .set(assignment_a, mode="drop", unique_indices=True),
        peer_nk=_home(peer_a, assignment_a).reshape(n, k),
        place_nk=_home(place_a, assignment_a).reshape(n, k),
        first_w=first_w,
        counts_up=counts_up,
        bound=bound,
    )
    return sent, placement


def fullest_pair(sent: Manifest, layout: Layout) -> Int[Array, ""]:
    """Most rows that one source has for one device, known to all of the group."""
    return jnp.max(_pairs(sent, layout))


def pair_to_fit(sent: Manifest, layout: Layout) -> Int[Array, ""]:
    """What a buffer of round 0 should hold. Where rows at home yield to the buffer
    (moejax.moe.split.deal), a device's rows for itself do not count: they would grow
    with whatever it holds."""
    if layout.num_devices == 1 or not layout.yields_home_rows:
        return fullest_pair(sent, layout)
    per_device = layout.num_sources // layout.num_devices
    is_home_ww = jnp.eye(layout.num_devices, dtype=bool)
    is_home_uw = jnp.repeat(is_home_ww, per_device, axis=0)
    return jnp.max(jnp.where(is_home_uw, 0, _pairs(sent, layout)))


def rows_here(sent: Manifest, mesh_layout: MeshLayout) -> Int[Array, ""]:
    """Rows that this device computes: of experts whole, or of its shards of them."""
    rows_w = jnp.sum(_pairs(sent, mesh_layout.layout), axis=0)
    return rows_w[index_along(mesh_layout.peer_axes)]


def num_dropped(expert_nk: Int[Array, "n k"], sent_nk: Int[Array, "n k"]):
    """Choices that go nowhere, by the peers they were sent to: capacity mode's."""
    return jnp.sum((expert_nk >= 0) & (sent_nk < 0), dtype=jnp.int32)


def _pairs(sent: Manifest, layout: Layout) -> Int[Array, "u w"]:
    pair_uw = sent.counts_up.reshape(-1, layout.num_devices, layout.slots_per_device)
    return jnp.sum(pair_uw, axis=-1)


def _with_dropped_last(kept_uq, quota_uq, expert_q, num_experts: int):
    """Lengths of blocks such that what is dropped of an expert stands behind the rows
    of its last replica: none of its first choices before a second one."""
    expert_q = jnp.where(expert_q < 0, num_experts, expert_q)
    dropped_ue = (
        jnp.zeros((len(kept_uq), num_experts + 1), jnp.int32)
        .at[:, expert_q]
        .add(quota_uq - kept_uq)
    )
    is_last_q = jnp.append(expert_q[1:] != expert_q[:-1], True)
    return kept_uq + jnp.where(is_last_q, dropped_ue[:, expert_q], 0)


def _blocks(length_q: Int[Array, " q"], total: int):
    """Of blocks laid end to end: each place's block, and its place within that."""
    first_q = jnp.cumsum(length_q) - length_q
    begins_a = jnp.zeros(total, jnp.int32).at[first_q].add(1, mode="drop")
    block_a = jnp.cumsum(begins_a) - 1
    return block_a, jnp.arange(total, dtype=jnp.int32) - first_q[block_a]


def _home(value_a: Int[Array, " a"], assignment_a: Int[Array, " a"]):
    """Values by expert back in the order of assignments."""
    return jnp.zeros_like(value_a).at[assignment_a].set(value_a, unique_indices=True)
