"""MicroMoE's plans (FineMoE, arXiv 2511.16947, section 6): replicas that intersect, so
that an exact split can even out what each micro-batch brings.

    symmetric     no load is known: a Cayley graph of the devices (`balance.graphs`)
    asymmetric    copies where the forecast load needs them (`balance.placing`)

Every device keeps its own experts in either, and only the others it holds are copies.
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
from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import EMPTY, ExpertPlan
from moejax.plan.layout import Layout

CLEARLY = 0.01
"""Rows, over the mean device's, by which a plan's densest set must be less dense to
take the current one's place."""


class Room(NamedTuple):
    """A layer's slots, and the most that a device may give and hold of copies."""

    num_devices: int
    slots_per_device: int
    max_offers: int
    max_copies: int


def plan(
    load_lwe: np.ndarray, layout: Layout, cost: CostModel, current: ExpertPlan
) -> ExpertPlan:
    """Per layer, from the load of the whole group; costs do not count. Symmetric where
    there is no load at all."""
    budgets = (layout.experts_per_device, layout.slots_per_device)
    if layout.has_copies:
        budgets = (layout.offers_per_device, layout.copies_per_device)
    room = Room(layout.num_devices, layout.slots_per_device, *budgets)
    rows = []
    for load_we, current_p in zip(load_lwe, current.slot_to_expert_lp, strict=True):
        load_e = load_we.sum(axis=0)
        if not load_e.any():
            rows.append(symmetric(layout.num_experts, room))
        elif current.is_logical:
            rows.append(replaced(load_e, room, current_p))
        else:
            rows.append(_from_home(load_e, room)[0])
    return ExpertPlan(np.stack(rows), layout.num_experts)


def asymmetric(
    load_e: np.ndarray, num_devices: int, slots_per_device: int
) -> np.ndarray:
    """Slots [p] int32 for a load (of any unit, not all zero) summed over devices, with
    as many copies as there are slots. The experts are a multiple of the devices."""
    room = Room(num_devices, slots_per_device, len(load_e), slots_per_device)
    return _from_home(np.asarray(load_e, float), room)[0]


def symmetric(num_experts: int, room: Room) -> np.ndarray:
    """Slots [p] of a Cayley graph within the budgets; slots of no use stay empty."""
    num_devices, slots_per_device, max_offers, max_copies = room
    own = num_experts // num_devices
    copies = min(slots_per_device - own, max_copies, max_offers * (num_devices - 1))
    filled_p = graphs.symmetric(num_experts, num_devices, own + copies, max_offers)
    row_ws = np.full((num_devices, slots_per_device), EMPTY, np.int32)
    row_ws[:, : own + copies] = filled_p.reshape(num_devices, -1)
    return row_ws.reshape(-1)


def replaced(load_e: np.ndarray, room: Room, current_p: np.ndarray) -> np.ndarray:
    """As `_replaced` says; once for the layouts of a question that differ in nothing
    that counts."""
    tables = np.asarray(load_e, np.float64), np.asarray(current_p, np.int32)
    return _replaced(*(table.tobytes() for table in tables), room)


@functools.lru_cache(maxsize=512)
def _replaced(load_e: bytes, current_p: bytes, room: Room) -> np.ndarray:
    """The plan that a search from `current_p` ends at, or one from home where that ends
    uneven; `current_p` itself where neither is clearly better, and where it has no
    copies and needs none."""
    load_e, current_p = np.frombuffer(load_e), np.frombuffer(current_p, np.int32)
    current_ws = current_p.reshape(room.num_devices, -1)
    may_copy_e = _offered(load_e, room)
    slots = _with_free_slots(current_ws, may_copy_e, room)
    if slots is None:
        return _from_home(load_e, room)[0]
    has_copies = np.count_nonzero(current_p != EMPTY) > len(load_e)
    own_rows_w = load_e.reshape(room.num_devices, -1).sum(axis=1)
    if not has_copies and own_rows_w.max() <= (1 + EVEN) * own_rows_w.mean():
        return current_p
    task = drifting(load_e, room.num_devices)
    row_ws, score = improved(slots, may_copy_e, task)
    if has_copies and score > 1 + EVEN:
        fresh_p, fresh_score = _from_home(load_e, room)
        if fresh_score < score:
            row_ws, score = fresh_p.reshape(current_ws.shape), fresh_score
    if has_copies and score > scored(current_ws, task)[0] - CLEARLY:
        return current_p
    return row_ws.reshape(-1)


def _from_home(load_e: np.ndarray, room: Room) -> tuple[np.ndarray, float]:
    """Slots [p] that a search from no copies ends at, and their score."""
    num_devices, slots_per_device = room.num_devices, room.slots_per_device
    home_ws = np.full((num_devices, slots_per_device), EMPTY, np.int32)
    own_we = np.arange(len(load_e), dtype=np.int32).reshape(num_devices, -1)
    home_ws[:, : own_we.shape[1]] = own_we
    may_copy_e = _offered(load_e, room)
    slots = _with_free_slots(home_ws, may_copy_e, room)
    row_ws, score = improved(slots, may_copy_e, drifting(load_e, num_devices))
    return row_ws.reshape(-1), score


def _offered(load_e: np.ndarray, room: Room) -> np.ndarray:
    """Whether an expert may have copies, bool [e]: the fullest of each owner's."""
    load_wj = load_e.reshape(room.num_devices, -1)
    order_wj = np.argsort(-load_wj, axis=1, kind="stable")
    is_offered_wj = np.zeros(load_wj.shape, bool)
    np.put_along_axis(is_offered_wj, order_wj[:, : room.max_offers], True, axis=1)
    return is_offered_wj.reshape(-1)


def _with_free_slots(
    row_ws: np.ndarray, may_copy_e: np.ndarray, room: Room
) -> Slots | None:
    """Which slots hold copies or may. None if a device lacks an expert of its own, has
    one twice, or holds copies that the budgets forbid."""
    own = len(may_copy_e) // room.num_devices
    is_empty_ws = row_ws == EMPTY
    is_own_ws = row_ws // own == np.arange(room.num_devices)[:, None]
    is_copy_ws = ~is_own_ws & ~is_empty_ws
    num_copies_w1 = is_copy_ws.sum(axis=1, keepdims=True)
    sorted_ws = np.sort(row_ws, axis=1)
    is_twice_ws = (np.diff(sorted_ws, axis=1) == 0) & (sorted_ws[:, 1:] != EMPTY)
    if (
        is_twice_ws.any()
        or (is_own_ws.sum(axis=1) < own).any()
        or not may_copy_e[row_ws[is_copy_ws]].all()
        or num_copies_w1.max() > room.max_copies
    ):
        return None
    num_empty_ws = np.cumsum(is_empty_ws, axis=1)
    is_room_ws = is_empty_ws & (num_empty_ws <= room.max_copies - num_copies_w1)
    return Slots(row_ws, is_copy_ws | is_room_ws)
