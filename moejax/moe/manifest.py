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

from moejax.axes import AxisNames
from moejax.layout import Layout
from moejax.moe.split import SPLITS
from moejax.types import Placement

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
    counts_wp: Int[Array, "w p"]
    """Rows from every device of the group to every slot, equal on all of them."""
    dropped: Int[Array, ""]
    """Choices of this device that capacity mode dropped."""
    bound: Int[Array, ""]
    """No split over these replicas leaves the group's fullest device fewer rows."""


@jax.named_scope("manifest")
def manifest(
    expert_nk: Int[Array, "n k"], placement: Placement, layout: Layout, axis: AxisNames
) -> tuple[Manifest, Placement]:
    """The manifest of one layer's placement, and the placement with the replicas that
    the split made: the same one, if it makes none.

    An expert of -1 goes nowhere. In capacity mode (GShard, section 3.2) at most
    layout.rows_per_slot rows go from one device to one slot; of an expert's rows the
    first choices go first.
    """
    n, k = expert_nk.shape
    w, s, e = layout.num_devices, layout.slots_per_device, layout.num_experts
    expert_a = jnp.where(expert_nk < 0, e, expert_nk).T.reshape(-1)
    order_a = jnp.argsort(expert_a, stable=True).astype(jnp.int32)
    count_e = jnp.sum(expert_a[:, None] == jnp.arange(e), axis=0, dtype=jnp.int32)
    counts_we = count_e[None] if w == 1 else jax.lax.all_gather(count_e, axis)
    quota_wq, bound, placement = SPLITS[layout.split](counts_we, placement, layout)

    slot_q = placement.slot_lq
    kept_wq = length_wq = quota_wq
    if layout.exchange == "capacity":
        kept_wq = jnp.minimum(quota_wq, layout.rows_per_slot)
        length_wq = _with_dropped_last(kept_wq, quota_wq, placement.expert_lq, e)
    counts_wp = jnp.zeros_like(kept_wq).at[:, slot_q].set(kept_wq, unique_indices=True)
    me = 0 if w == 1 else jax.lax.axis_index(axis)
    count_p, quota_q, kept_q = counts_wp[me], quota_wq[me], kept_wq[me]

    block_a, within_a = _blocks(length_wq[me], n * k)
    first_p = jnp.cumsum(count_p) - count_p
    rank_a = first_p[slot_q[block_a]] + within_a
    is_sent_a = (jnp.arange(n * k) < jnp.sum(count_e)) & (within_a < kept_q[block_a])
    peer_a = jnp.where(is_sent_a, slot_q[block_a] // s, EMPTY)

    count_w = count_p.reshape(w, s).sum(axis=1)
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
        counts_wp=counts_wp,
        dropped=jnp.sum(quota_q - kept_q),
        bound=bound,
    )
    return sent, placement


def fullest_pair(sent: Manifest, layout: Layout) -> Int[Array, ""]:
    """Most rows that one device of the group has for one other, known to all."""
    pair_ww = sent.counts_wp.reshape(-1, layout.num_devices, layout.slots_per_device)
    return jnp.max(jnp.sum(pair_ww, axis=-1))


def pair_to_fit(sent: Manifest, layout: Layout) -> Int[Array, ""]:
    """What a buffer of round 0 should hold. Where rows at home yield to the buffer
    (moejax.moe.deal), a device's rows for itself do not count: they would grow with
    whatever it holds."""
    if layout.num_devices == 1 or not layout.yields_home_rows:
        return fullest_pair(sent, layout)
    pair_ww = sent.counts_wp.reshape(-1, layout.num_devices, layout.slots_per_device)
    is_home_ww = jnp.eye(layout.num_devices, dtype=bool)
    return jnp.max(jnp.where(is_home_ww, 0, jnp.sum(pair_ww, axis=-1)))


def rows_here(sent: Manifest, layout: Layout, axis: AxisNames) -> Int[Array, ""]:
    """Rows that this device computes."""
    rows_w = jnp.sum(sent.counts_wp, axis=0).reshape(layout.num_devices, -1).sum(axis=1)
    return rows_w[0 if layout.num_devices == 1 else jax.lax.axis_index(axis)]


def _with_dropped_last(kept_wq, quota_wq, expert_q, num_experts: int):
    """Lengths of blocks such that what is dropped of an expert stands behind the rows
    of its last replica: none of its first choices before a second one."""
    expert_q = jnp.where(expert_q < 0, num_experts, expert_q)
    dropped_we = (
        jnp.zeros((len(kept_wq), num_experts + 1), jnp.int32)
        .at[:, expert_q]
        .add(quota_wq - kept_wq)
    )
    is_last_q = jnp.append(expert_q[1:] != expert_q[:-1], True)
    return kept_wq + jnp.where(is_last_q, dropped_we[:, expert_q], 0)


def _blocks(length_q: Int[Array, " q"], total: int):
    """Of blocks laid end to end: each place's block, and its place within that."""
    first_q = jnp.cumsum(length_q) - length_q
    begins_a = jnp.zeros(total, jnp.int32).at[first_q].add(1, mode="drop")
    block_a = jnp.cumsum(begins_a) - 1
    return block_a, jnp.arange(total, dtype=jnp.int32) - first_q[block_a]


def _home(value_a: Int[Array, " a"], assignment_a: Int[Array, " a"]):
    """Values by expert back in the order of assignments."""
    return jnp.zeros_like(value_a).at[assignment_a].set(value_a, unique_indices=True)
