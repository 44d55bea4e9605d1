"""MicroMoE's policy (arXiv 2511.16947, section 6): devices share replicas with several
others, so that an exact split can even out the load of each micro-batch.

    symmetric     no load is known: a Cayley graph of the devices (`symmetric.py`)
    asymmetric    copies where the forecast load needs them (`asymmetric.py`)

In both kinds of plan every device keeps its own experts, and all others that it holds
are copies. Where rows cross slow links between nodes one by one (Layout.deals_near),
copies lie near the tokens of their experts, as far as balance allows (`near.py`).
"""

import functools
from typing import NamedTuple

import numpy as np

from moejax.balance.policies.micromoe import symmetric as graphs
from moejax.balance.policies.micromoe.asymmetric import (
    EVEN,
    Slots,
    drifting,
    improved,
    scored,
)
from moejax.balance.policies.micromoe.near import far_share, with_near_copies
from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import EMPTY, ExpertPlan, Needs
from moejax.plan.layout import Layout

CLEARLY = 0.01
"""Smallest difference of scores, in rows over the mean device's, or of the shares of
rows that leave their node, by which a new plan must be better than the current one to
replace it."""
NODE_COPIES = 2
"""Number of experts that each node sends to others, and takes from them, with which
devices get even. On a recorded GPT whose three fullest of 32 experts have two thirds of
the rows, device max/mean was 1.05 at most with two, 1.36 with one and 2.60 without, on
two and four nodes of 16 devices (docs/decisions/0042)."""
EVEN_ENOUGH = 1.01
"""Score at which no copy moves away from its tokens to even out devices."""


class Room(NamedTuple):
    """Limits on the slots and copies of one layer."""

    num_devices: int
    slots_per_device: int
    max_offers: int
    """Largest number of its own experts that a device can give to others."""
    max_copies: int
    """Largest number of copies that a device can hold."""
    num_nodes: int = 1
    """Number of nodes between which copies travel apart (Layout.num_copy_nodes)."""
    max_node_offers: int = 0
    """Largest number of its experts that a node can give to others."""
    max_node_copies: int = 0
    """Largest number of experts that a node can take from others."""


def plan(
    load_lwe: np.ndarray, layout: Layout, cost: CostModel, current: ExpertPlan
) -> ExpertPlan:
    """Return a plan for the load of the whole group, without regard to costs.

    A layer without any load gets a symmetric plan.
    """
    limits = (layout.experts_per_device, layout.slots_per_device)
    if layout.has_copies:
        offers, copies, *of_nodes = Needs.budgets(layout)
        limits = (offers, copies, layout.num_copy_nodes, *of_nodes)
    room = Room(layout.num_devices, layout.slots_per_device, *limits)
    rows = []
    for load_we, current_p in zip(load_lwe, current.slot_to_expert_lp, strict=True):
        load_e = load_we.sum(axis=0)
        if not load_e.any():
            rows.append(symmetric(layout.num_experts, room))
        elif current.is_logical:
            rows.append(replaced(load_e, room, current_p))
        else:
            rows.append(_from_home(load_e, room)[0])
        if layout.deals_near and load_e.any():
            rows[-1] = nearest(load_we, layout.num_nodes, room, rows[-1], current_p)
    return ExpertPlan(np.stack(rows), layout.num_experts)


def symmetric(num_experts: int, room: Room) -> np.ndarray:
    """Return the slots [p] of a Cayley graph within the budgets; of one graph for each
    node, if those of nodes are too small.

    Slots beyond the budgets stay empty.
    """
    nodes, row_p = room.num_nodes, _graph(num_experts, room)
    offers, copies = ExpertPlan(row_p[None], num_experts).needs(
        room.num_devices, nodes
    )[2:]
    if offers <= room.max_node_offers and copies <= room.max_node_copies:
        return row_p
    own = num_experts // nodes
    row_p = _graph(own, room._replace(num_devices=room.num_devices // nodes))
    rows = [np.where(row_p == EMPTY, EMPTY, row_p + m * own) for m in range(nodes)]
    return np.concatenate(rows).astype(np.int32)


def _graph(num_experts: int, room: Room) -> np.ndarray:
    """Return the slots [p] of a Cayley graph within the budgets of devices."""
    num_devices, slots_per_device, max_offers, max_copies = room[:4]
    own = num_experts // num_devices
    copies = min(slots_per_device - own, max_copies, max_offers * (num_devices - 1))
    filled_p = graphs.symmetric(num_experts, num_devices, own + copies, max_offers)
    row_ws = np.full((num_devices, slots_per_device), EMPTY, np.int32)
    row_ws[:, : own + copies] = filled_p.reshape(num_devices, -1)
    return row_ws.reshape(-1)


def replaced(load_e: np.ndarray, room: Room, current_p: np.ndarray) -> np.ndarray:
    """Return the slots [p] found by a search from the current ones (see `_replaced`).

    Results are cached, since many layouts of one question differ only in fields that
    are not used here.
    """
    tables = np.asarray(load_e, np.float64), np.asarray(current_p, np.int32)
    return _replaced(*(table.tobytes() for table in tables), room)


@functools.lru_cache(maxsize=512)
def _replaced(load_e: bytes, current_p: bytes, room: Room) -> np.ndarray:
    """Return better slots [p] for a load, found by a search that starts from
    `current_p`.

    Where they are uneven, a search from home is tried too. `current_p` itself is
    returned where no result is clearly better, and where it has no copies and needs
    none.
    """
    load_e, current_p = np.frombuffer(load_e), np.frombuffer(current_p, np.int32)
    current_ws = current_p.reshape(room.num_devices, -1)
    may_copy_we = _may_copy(load_e, room)
    slots = _with_free_slots(current_ws, may_copy_we, room)
    if slots is None:
        return _from_home(load_e, room)[0]
    has_copies = np.count_nonzero(current_p != EMPTY) > len(load_e)
    own_rows_w = load_e.reshape(room.num_devices, -1).sum(axis=1)
    if not has_copies and own_rows_w.max() <= (1 + EVEN) * own_rows_w.mean():
        return current_p
    task = drifting(load_e, room.num_devices)
    row_ws, score = improved(slots, may_copy_we, task)
    if has_copies and score > 1 + EVEN:
        fresh_p, fresh_score = _from_home(load_e, room)
        if fresh_score < score:
            row_ws, score = fresh_p.reshape(current_ws.shape), fresh_score
    if has_copies and score > scored(current_ws, task)[0] - CLEARLY:
        return current_p
    return row_ws.reshape(-1)


def nearest(
    load_we: np.ndarray,
    nodes: int,
    room: Room,
    even_p: np.ndarray,
    current_p: np.ndarray,
) -> np.ndarray:
    """Return the slots [p] from which the fewest rows leave their node: new ones,
    `even_p`, or the current ones, which stay unless others are clearly better. Their
    score is at most EVEN_ENOUGH, or that of `even_p`."""
    tables = np.asarray(load_we, np.float64), *np.asarray([even_p, current_p], np.int32)
    return _nearest(*(table.tobytes() for table in tables), nodes, room)


@functools.lru_cache(maxsize=512)
def _nearest(
    load_we: bytes, even_p: bytes, current_p: bytes, nodes: int, room: Room
) -> np.ndarray:
    """Return the result of `nearest`."""
    load_we = np.frombuffer(load_we).reshape(room.num_devices, -1)
    load_me = load_we.reshape(nodes, -1, load_we.shape[1]).sum(axis=1)
    even_p, current_p = (np.frombuffer(p, np.int32) for p in (even_p, current_p))
    load_e = load_me.sum(axis=0)
    task, may_copy_we = drifting(load_e, room.num_devices), _may_copy(load_e, room)
    shape = room.num_devices, -1
    enough = max(scored(even_p.reshape(shape), task)[0], EVEN_ENOUGH)
    slots = _home_slots(may_copy_we, room)
    near_ws = with_near_copies(slots, may_copy_we, load_me)
    slots = slots._replace(row_ws=near_ws)
    near_ws, score = improved(slots, may_copy_we, task, enough)
    found = [near_ws.reshape(-1)] * (score <= enough) + [even_p]
    best_p, far = min(
        ((p, far_share(p, load_we, nodes)) for p in found),
        key=lambda pair: pair[1],
    )
    if (
        _with_free_slots(current_p.reshape(shape), may_copy_we, room) is not None
        and scored(current_p.reshape(shape), task)[0] <= enough + CLEARLY
        and far_share(current_p, load_we, nodes) < far + CLEARLY
    ):
        return current_p
    return best_p


def _from_home(load_e: np.ndarray, room: Room) -> tuple[np.ndarray, float]:
    """Return the slots [p] found by a search from the home plan, and their score."""
    may_copy_we = _may_copy(load_e, room)
    slots = _home_slots(may_copy_we, room)
    row_ws, score = improved(slots, may_copy_we, drifting(load_e, room.num_devices))
    return row_ws.reshape(-1), score


def _home_slots(may_copy_we: np.ndarray, room: Room) -> Slots:
    """Return the slots of the home plan."""
    num_devices, num_experts = may_copy_we.shape
    own_we = np.arange(num_experts, dtype=np.int32).reshape(num_devices, -1)
    missing = room.slots_per_device - own_we.shape[1]
    home_ws = np.pad(own_we, ((0, 0), (0, missing)), constant_values=EMPTY)
    return _with_free_slots(home_ws, may_copy_we, room)


def _may_copy(load_e: np.ndarray, room: Room) -> np.ndarray:
    """Return whether each device may hold a copy of each expert, bool [w, e].

    The experts with the most rows of each owner may have copies, up to its offers. On
    other nodes those of them with the most rows may, up to the budgets of nodes.
    """
    num_experts, nodes = len(load_e), room.num_nodes
    offered_e = _fullest(load_e, room.num_devices, room.max_offers)
    node_e = np.arange(num_experts) * nodes // num_experts
    is_own_me = node_e == np.arange(nodes)[:, None]
    sent_e = _fullest(np.where(offered_e, load_e, -1), nodes, room.max_node_offers)
    taken_me = np.where(is_own_me | ~sent_e, -1, load_e).ravel()
    taken_me = _fullest(taken_me, nodes, room.max_node_copies).reshape(nodes, -1)
    may_copy_me = offered_e & (is_own_me | (taken_me & sent_e))
    return may_copy_me.repeat(room.num_devices // nodes, axis=0)


def _fullest(load_x: np.ndarray, num_groups: int, most: int) -> np.ndarray:
    """Return whether each entry is one of the `most` largest of its group of
    consecutive ones, bool [x]."""
    load_gi = load_x.reshape(num_groups, -1)
    order_gi = np.argsort(-load_gi, axis=1, kind="stable")
    is_chosen_gi = np.zeros(load_gi.shape, bool)
    np.put_along_axis(is_chosen_gi, order_gi[:, :most], True, axis=1)
    return is_chosen_gi.reshape(-1)


def _with_free_slots(
    row_ws: np.ndarray, may_copy_we: np.ndarray, room: Room
) -> Slots | None:
    """Return the slots, and which of them hold copies or may hold some.

    Return None if a device lacks an expert of its own, has an expert twice, or holds
    copies that the budgets forbid.
    """
    own = may_copy_we.shape[1] // room.num_devices
    is_empty_ws = row_ws == EMPTY
    is_own_ws = row_ws // own == np.arange(room.num_devices)[:, None]
    is_copy_ws = ~is_own_ws & ~is_empty_ws
    num_copies_w1 = is_copy_ws.sum(axis=1, keepdims=True)
    sorted_ws = np.sort(row_ws, axis=1)
    is_twice_ws = (np.diff(sorted_ws, axis=1) == 0) & (sorted_ws[:, 1:] != EMPTY)
    if (
        is_twice_ws.any()
        or (is_own_ws.sum(axis=1) < own).any()
        or not may_copy_we[is_copy_ws.nonzero()[0], row_ws[is_copy_ws]].all()
        or num_copies_w1.max() > room.max_copies
    ):
        return None
    num_empty_ws = np.cumsum(is_empty_ws, axis=1)
    is_room_ws = is_empty_ws & (num_empty_ws <= room.max_copies - num_copies_w1)
    return Slots(row_ws, is_copy_ws | is_room_ws)
