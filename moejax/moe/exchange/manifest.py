"""The manifest of an exchange: which slot computes each choice of each token.

It takes two all_gathers of int32 counts and one sort. Choices are sorted by expert. A
split then cuts each expert's choices into one block per replica.

    expert        0 0 0 0 0 1 2 2        expert 0 has slots 0 and 3, 2 + 3 choices
    slot          0 0 3 3 3 1 2 2

Which choices are in which block is free. Where that saves rows, a choice has a *wish*:
the replica on a device that the token's other choices need anyway, or may share. Wishes
are met as far as the split's numbers allow, and other choices fill the rest.

A token sends one *row* to each destination that has a slot of its choices: a device or,
where rows travel in two levels, a node. Rows for one destination are in the order of
tokens. Round 0 carries the first of them: as many as fit into its buffer, and into the
buffers behind it, of devices that compute them or pass them on. All devices know the
counts of all sources, so they agree.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from moejax.moe.exchange.schedules import find_schedule
from moejax.moe.mesh_roles import Axes, MeshLayout, index_along
from moejax.moe.split.deal import find_active
from moejax.moe.split.divide import divide
from moejax.moe.types import Placement
from moejax.plan.layout import Layout

EMPTY = -1


@struct.dataclass
class Manifest:
    """Integer tables of one exchange, which say where each row goes.

    `f` counts the destinations of the first level: devices, or nodes
    (Layout.has_levels). Tables of sources are the same on all devices of the group.
    Without a tensor axis the sources are the group's devices, otherwise its different
    sets of tokens.
    """

    slot_nk: Int[Array, "n k"]
    """Slot that computes each choice, -1 if none does."""
    rank_nk: Int[Array, "n k"]
    """Number of rows before that of each choice, among this source's rows for the same
    destination."""
    counts_up: Int[Array, "u p"]
    """Number of choices from every source for every slot."""
    rows_uw: Int[Array, "u w"]
    """Number of tokens of every source with a choice on every device."""
    rows_uf: Int[Array, "u f"]
    """Number of rows from every source to every destination."""
    first_uf: Int[Array, "u f"]
    """Number of these that round 0 carries."""
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
    layout.rows_per_slot choices go from one source to one slot, and first choices take
    precedence among an expert's.
    """
    layout, n = mesh_layout.layout, len(expert_nk)
    e = layout.num_experts
    if layout.exchange == "capacity" and layout.sends_rows:
        kept = layout.slots_per_device * layout.rows_per_slot
        assert layout.rows_per_peer >= min(n, kept), (layout.rows_per_peer, n, kept)
    sources = find_schedule(mesh_layout).sources(mesh_layout)
    count_e = jnp.sum(
        expert_nk.reshape(-1)[:, None] == jnp.arange(e), axis=0, dtype=jnp.int32
    )
    counts_ue = _of_all(count_e, sources)
    quota_uq, bound, placement = divide(counts_ue, placement, layout)

    # 1. The slot of each choice.
    kept_uq = length_uq = quota_uq
    if layout.exchange == "capacity":
        kept_uq = jnp.minimum(quota_uq, layout.rows_per_slot)
        length_uq = _append_dropped(kept_uq, quota_uq, placement.expert_lq, e)
    slot_q = placement.slot_lq
    counts_up = jnp.zeros_like(kept_uq).at[:, slot_q].set(kept_uq, unique_indices=True)
    me = index_along(sources)
    wish_nk = None
    if layout.gathers_choices:
        wish_nk = _wishes(expert_nk, kept_uq[me], placement, mesh_layout)
    slot_nk = _slots(expert_nk, wish_nk, kept_uq[me], length_uq[me], slot_q)

    # 2. The rows of each destination, and how many of them go in round 0.
    choices_nw = _choices_at(slot_nk, layout)
    rows_nw = jnp.minimum(choices_nw, 1)
    rows_uw = None  # without levels they are those of the destinations
    if layout.has_levels:
        rows_uw = _of_all(jnp.sum(rows_nw, axis=0, dtype=jnp.int32), sources)
    rows_nf = rows_nw.reshape(n, layout.num_destinations, -1).max(axis=2)
    args = rows_nw, choices_nw, rows_uw, counts_up, mesh_layout
    fits_nf, rows_to_nf = _fits_in_first(*args)
    first_f = jnp.sum(jnp.where(fits_nf, rows_nf, 0), axis=0, dtype=jnp.int32)
    both_u2f = _of_all(jnp.stack([rows_to_nf[-1], first_f]), sources)
    rows_uf, first_uf = both_u2f[:, 0], both_u2f[:, 1]
    sent = Manifest(
        slot_nk=slot_nk,
        rank_nk=jnp.take_along_axis(
            rows_to_nf - rows_nf, _destinations(slot_nk, layout), axis=1
        ),
        counts_up=counts_up,
        rows_uw=rows_uf if rows_uw is None else rows_uw,
        rows_uf=rows_uf,
        first_uf=first_uf,
        bound=bound,
    )
    return sent, placement


def window_of_choices(
    sent: Manifest, begin_f: Int[Array, " f"], end_f: Int[Array, " f"], layout: Layout
) -> tuple[Int[Array, "n k"], Int[Array, "n k"]]:
    """Return the slot of each choice whose row is one of those numbered begin .. end of
    its destination, and -1 for other choices; and the place of its row among these."""
    at_nk = _destinations(sent.slot_nk, layout)
    place_nk = sent.rank_nk - begin_f[at_nk]
    is_inside_nk = (place_nk >= 0) & (sent.rank_nk < end_f[at_nk])
    return jnp.where(is_inside_nk, sent.slot_nk, EMPTY), place_nk


def fullest_pair(sent: Manifest, layout: Layout) -> Int[Array, ""]:
    """Return the number of rows per peer that the buffers of round 0 should carry: the
    largest number that one device has for one other. All devices get the same.

    Where rows travel in two levels, a device has those of all sources that it passes
    on. Rows for the device itself do not count where they stay out of the buffers, or
    where the split gives them what room there is (Layout.yields_home_rows).
    """
    w, rows_uw = layout.num_devices, sent.rows_uw
    if not layout.sends_rows:
        return jnp.int32(0)
    if layout.has_levels:
        # From the device with the source's index in the node of the other device.
        nodes, per_node = layout.num_nodes, w // layout.num_nodes
        rows_iw = rows_uw.reshape(nodes, per_node, w).sum(axis=0)
        is_home_iw = jnp.arange(w) % per_node == jnp.arange(per_node)[:, None]
        is_home_iw &= layout.keeps_home_rows
        return jnp.max(jnp.where(is_home_iw, 0, rows_iw))
    if not (layout.keeps_home_rows or layout.yields_home_rows):
        return jnp.max(rows_uw)
    is_home_uw = jnp.repeat(jnp.eye(w, dtype=bool), len(rows_uw) // w, axis=0)
    return jnp.max(jnp.where(is_home_uw, 0, rows_uw))


def rows_here(sent: Manifest, mesh_layout: MeshLayout) -> Int[Array, ""]:
    """Return the number of rows that this device computes, one for each token and slot,
    with whole experts or with its shards of them."""
    rows_w = jnp.sum(_at_devices(sent.counts_up, mesh_layout.layout), axis=0)
    return rows_w[index_along(mesh_layout.peer_axes)]


def num_dropped(expert_nk: Int[Array, "n k"], slot_nk: Int[Array, "n k"]):
    """Count the choices that capacity mode drops: they have an expert but no slot."""
    return jnp.sum((expert_nk >= 0) & (slot_nk < 0), dtype=jnp.int32)


def _fits_in_first(rows_nw, choices_nw, rows_uw, counts_up, mesh_layout: MeshLayout):
    """Return whether round 0 carries a row of each token to each destination, if there
    is one, bool [n, f]: it and all before it fit. Also return the number of rows up to
    and with that of each token, [n, f].

    Rows for each of w devices fit if their choices are among those that it computes,
    and if they fit into the buffer to it. Where devices pass rows on, that is the
    buffer of the one that sources of the same index share.
    """
    layout, w = mesh_layout.layout, mesh_layout.layout.num_devices
    room_w = _room(_at_devices(counts_up, layout), layout.rows_per_device)
    choices_to_nw, rows_to_nw = jnp.split(
        _up_to(jnp.concatenate([choices_nw, rows_nw], axis=1)), 2, axis=1
    )
    fits_nw = choices_to_nw <= room_w
    if layout.is_local:
        return fits_nw, rows_to_nw
    limit_w, keeps = jnp.full(w, layout.rows_per_peer), layout.keeps_home_rows
    nodes = layout.num_relayed
    per_node, own = w // nodes, index_along(mesh_layout.peer_axes)
    if layout.has_levels:
        passed_uw = rows_uw.reshape(nodes, per_node, w)[:, own % per_node]
        limit_w = _room(passed_uw, layout.rows_per_peer)
    in_buffer_nw = rows_to_nw <= limit_w
    if keeps:
        in_buffer_nw |= jnp.arange(w) % per_node == own % per_node
    fits_nw &= in_buffer_nw
    if not layout.has_levels:
        return fits_nw, rows_to_nw
    fits_nf, rows_nf = (
        value_nw.reshape(-1, nodes, per_node) for value_nw in (fits_nw, rows_nw)
    )
    rows_to_nf = _up_to(rows_nf.max(axis=2))
    in_buffer_nf = rows_to_nf <= layout.rows_per_node
    if keeps:
        in_buffer_nf |= jnp.arange(nodes) == own // per_node
    return fits_nf.all(axis=2) & in_buffer_nf, rows_to_nf


def _room(value_uw: Int[Array, "u w"], capacity: int) -> Int[Array, " w"]:
    """Return the largest number to which each column's values can be cut so that their
    sum is at most `capacity`.

    The cut sum is the smallest, over i, of the i smallest values and (u - i) times the
    number, which gives a limit on the number for each i; the loosest one holds.
    """
    sorted_uw = jnp.sort(value_uw, axis=0)
    before_uw = jnp.cumsum(sorted_uw, axis=0, dtype=jnp.int32) - sorted_uw
    others_u1 = (len(value_uw) - jnp.arange(len(value_uw), dtype=jnp.int32))[:, None]
    room_w = jnp.max((capacity - before_uw) // others_u1, axis=0)
    total_w = jnp.sum(value_uw, axis=0, dtype=jnp.int32)
    return jnp.where(total_w <= capacity, np.iinfo(np.int32).max, room_w)


def _choices_at(slot_nk, layout: Layout) -> Int[Array, "n w"]:
    """Return how many choices of each token lie on each device."""
    device_nk = jnp.where(slot_nk < 0, EMPTY, slot_nk // layout.slots_per_device)
    is_at_nkw = device_nk[:, :, None] == jnp.arange(layout.num_devices)
    return jnp.sum(is_at_nkw, axis=1, dtype=jnp.int32)


def _destinations(slot_nk, layout: Layout) -> Int[Array, "n k"]:
    """Return the destination of each choice, and 0 for choices without a slot."""
    return jnp.maximum(slot_nk, 0) // (layout.num_slots // layout.num_destinations)


def _at_devices(counts_up, layout: Layout) -> Int[Array, "u w"]:
    """Return the number of choices from each source at each device."""
    counts_uws = counts_up.reshape(len(counts_up), layout.num_devices, -1)
    return jnp.sum(counts_uws, axis=2, dtype=jnp.int32)


def _up_to(value_nw: Array) -> Array:
    """Return the sum of each column's values up to each row, which is included."""
    return jnp.cumsum(value_nw, axis=0, dtype=jnp.int32)


def _of_all(value: Array, sources: Axes) -> Array:
    """Return the values of all sources, stacked; the same on all their devices."""
    if not sources:
        return value[None]
    return jax.lax.all_gather(value, sources, to="invarying")


def _slots(
    expert_nk: Int[Array, "n k"],
    wish_nk: Int[Array, "n k"] | None,
    kept_q: Int[Array, " q"],
    length_q: Int[Array, " q"],
    slot_q: Int[Array, " q"],
) -> Int[Array, "n k"]:
    """Return the slot of each choice of one source, -1 for choices that go nowhere.

    The q-th slot gets `length_q` choices of its expert: first those that wish it
    (`_wishes`), then others: unmet wishes before choices without one, and first choices
    before second ones. It computes the first `kept_q` of them.
    """
    n, k = expert_nk.shape
    num_slots, index_a = len(slot_q), jnp.arange(n * k, dtype=jnp.int32)
    none = np.iinfo(np.int32).max
    expert_a = jnp.where(expert_nk < 0, none, expert_nk).T.reshape(-1)
    key_a = expert_a
    if wish_nk is not None:  # wishes of an expert stand before its other choices
        wish_a = jnp.where(wish_nk < 0, num_slots, wish_nk).T.reshape(-1)
        key_a = expert_nk.T.reshape(-1) * (num_slots + 1) + wish_a
        key_a = jnp.where(expert_a == none, none, key_a)
    order_a = jnp.argsort(key_a, stable=True).astype(jnp.int32)
    is_sent_a = expert_a[order_a] < none
    if wish_nk is None:
        block_a, within_a = _locate_in_blocks(length_q, n * k)
        is_sent_a &= within_a < kept_q[block_a]
    else:
        key_a, wish_a = key_a[order_a], wish_a[order_a]
        is_new_a = jnp.append(True, key_a[1:] != key_a[:-1])
        rank_a = index_a - jax.lax.cummax(jnp.where(is_new_a, index_a, 0))
        is_met_a = rank_a < jnp.append(length_q, 0)[wish_a]
        met_q = (
            jnp.zeros_like(length_q)
            .at[wish_a]
            .add(is_met_a.astype(jnp.int32), mode="drop")
        )
        other_a = jnp.cumsum(~is_met_a, dtype=jnp.int32) - 1
        block_a, _ = _locate_in_blocks(length_q - met_q, n * k)
        block_a = jnp.where(is_met_a, wish_a, block_a[jnp.maximum(other_a, 0)])
    slot_a = jnp.where(is_sent_a, slot_q[block_a], EMPTY)
    assignment_a = order_a % n * k + order_a // n
    slot_a = jnp.zeros_like(slot_a).at[assignment_a].set(slot_a, unique_indices=True)
    return slot_a.reshape(n, k)


def _wishes(
    expert_nk: Int[Array, "n k"],
    quota_q: Int[Array, " q"],
    placement: Placement,
    mesh_layout: MeshLayout,
) -> Int[Array, "n k"]:
    """Return the index q of the slot that each choice wishes, -1 for none.

    A device is *needed* by a token that has a choice which no other device computes;
    its own device is needed anyway. A choice wishes a needed device, else the one that
    may compute most of the token's choices, if that is more than one. Where rows travel
    to nodes first, these are chosen in the same way, and then their devices.
    """
    layout, k = mesh_layout.layout, expert_nk.shape[1]
    e, w = layout.num_experts, layout.num_devices
    expert_q, device_q, _ = find_active(placement, layout)
    expert_q = jnp.where((quota_q > 0) & (placement.expert_lq >= 0), expert_q, e)
    index_q = jnp.arange(len(quota_q), dtype=jnp.int32)
    slot_ew = jnp.full((e, w), EMPTY, jnp.int32)
    slot_ew = slot_ew.at[expert_q, device_q].max(index_q, mode="drop")
    slot_nkw = jnp.where(expert_nk[..., None] < 0, EMPTY, slot_ew[expert_nk])
    can_nkw = slot_nkw >= 0
    is_free_nk = jnp.sum(can_nkw, axis=2, dtype=jnp.int32) > 1

    def worth(can_nkx):
        """Return the rank of each destination for the choices of a token."""
        num = can_nkx.shape[2]
        is_only_nk1 = jnp.sum(can_nkx, axis=2, keepdims=True, dtype=jnp.int32) == 1
        needed_nx = jnp.any(can_nkx & is_only_nk1, axis=1)
        if layout.tensor is None:
            own = index_along(mesh_layout.peer_axes) // (w // num)
            needed_nx |= jnp.arange(num) == own
        shared_nx = jnp.sum(can_nkx, axis=1, dtype=jnp.int32)
        return jnp.where(needed_nx, k + 1, shared_nx)

    worth_nw = worth(can_nkw)
    is_worth_nw = worth_nw > 1
    if layout.has_levels:
        nodes = layout.num_nodes
        can_nkf = can_nkw.reshape(*expert_nk.shape, nodes, -1).any(axis=3)
        worth_nf = jnp.repeat(worth(can_nkf), w // nodes, axis=1)
        is_worth_nw |= worth_nf > 1
        worth_nw += (k + 2) * worth_nf
    worth_nkw = jnp.where(can_nkw & is_worth_nw[:, None], worth_nw[:, None], EMPTY)
    best_nk1 = jnp.argmax(worth_nkw, axis=2, keepdims=True)
    wish_nk = jnp.take_along_axis(slot_nkw, best_nk1, axis=2)[..., 0]
    is_wish_nk = is_free_nk & (jnp.max(worth_nkw, axis=2) >= 0)
    return jnp.where(is_wish_nk, wish_nk, EMPTY)


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
