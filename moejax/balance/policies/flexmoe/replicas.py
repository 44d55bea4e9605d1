"""Replicas of one layer while a policy adjusts them in place, and loads of devices.

An expert's rows are split evenly over its replicas. Each load of a device is therefore
linear in the device's shares q = (replicas of e on it) / (replicas of e). Arrays over
experts have one more entry at the end, so that EMPTY = -1 indexes an expert without
load or owner.
"""

import dataclasses

import numpy as np

from moejax.plan.expert_plan import EMPTY


@dataclasses.dataclass
class Replicas:
    """Slots of one layer and the loads that follow, in rows over the mean device's."""

    row_ws: np.ndarray
    """Expert in each slot of each device."""
    device_p: np.ndarray
    """Device of each slot."""
    here_ww: np.ndarray
    """Unit matrix."""
    held_ew: np.ndarray
    """Number of replicas of each expert on each device."""
    replicas_e: np.ndarray
    """Number of replicas of each expert."""
    share_e: np.ndarray
    """Rows of one replica (cap_e of Alg. 2), over those of the mean device."""
    unit_kew: np.ndarray
    """Amount by which a whole expert on the device raises `rows_kw`."""
    time_ew: np.ndarray
    """Amount by which a whole expert on the device raises `time_w`."""
    rows_kw: np.ndarray
    """Rows computed, received from others and sent to others, over the rows that the
    mean device computes."""
    time_w: np.ndarray
    """Time of each device's own compute and exchanges (Eq. 5 of FlexMoE)."""
    is_own_ew: np.ndarray
    """Whether each device owns each expert."""
    copies_w: np.ndarray
    """Number of different experts of other owners that each device holds."""
    away_e: np.ndarray
    """Number of devices besides its owner that hold each expert."""
    offers_w: np.ndarray
    """Number of its own experts that each device gives to others."""
    row_sec: np.ndarray
    """Times of the mean device's rows: computed three times, exchanged four times."""
    sync_oc: np.ndarray
    """Time of synchronisation by a plan's offers and copies. The shape is one more than
    the budgets."""


def start(
    load_we: np.ndarray, row_p: np.ndarray, per_row_sec: np.ndarray, sync_oc: np.ndarray
) -> Replicas:
    """Return the replicas of the slots `row_p` under a load.

    `per_row_sec` is `row_sec` of a single row.
    """
    w, num_experts = load_we.shape
    mean = load_we.sum() / w or 1.0
    row_ws = row_p.reshape(w, -1).copy()
    load_ew = np.zeros((num_experts + 1, w))
    load_ew[:-1] = load_we.T / mean
    held_ew = np.zeros((num_experts + 1, w), int)
    np.add.at(held_ew, (row_ws, np.arange(w)[:, None]), 1)
    replicas_e = np.append(held_ew[:-1].sum(axis=1), 1)
    load_e = load_ew.sum(axis=1)
    all_ew = np.broadcast_to(load_e[:, None], load_ew.shape)
    unit_kew = np.stack([all_ew, all_ew - load_ew, -load_ew])
    rows_kw = np.einsum("kew,ew->kw", unit_kew, held_ew / replicas_e[:, None])
    rows_kw[2] += load_ew.sum(axis=0)
    is_own_ew = np.ones((num_experts + 1, w), bool)
    is_own_ew[:-1] = (
        np.arange(w) == (np.arange(num_experts) * w // num_experts)[:, None]
    )
    is_copy_ew = (held_ew > 0) & ~is_own_ew
    away_e = is_copy_ew.sum(axis=1)
    row_sec = mean * per_row_sec
    return Replicas(
        row_ws,
        device_p=np.repeat(np.arange(w), row_ws.shape[1]),
        here_ww=np.eye(w),
        held_ew=held_ew,
        replicas_e=replicas_e,
        share_e=load_e / replicas_e,
        unit_kew=unit_kew,
        time_ew=np.einsum("k,kew->ew", row_sec, unit_kew[:2]),
        rows_kw=rows_kw,
        time_w=row_sec @ rows_kw[:2],
        is_own_ew=is_own_ew,
        copies_w=is_copy_ew.sum(axis=0),
        away_e=away_e,
        offers_w=(away_e[:-1] > 0).reshape(w, -1).sum(axis=1),
        row_sec=row_sec,
        sync_oc=sync_oc,
    )


def may_hold(state: Replicas, expert_x, num_copies: int, freed_xw=0) -> np.ndarray:
    """Return whether each device may get a replica of each expert, bool [x, w].

    Once `freed_xw` of its copies are gone, a device holds at most `num_copies`, and the
    owner's offers stay within the budget.
    """
    is_new_xw = (state.held_ew[expert_x] == 0) & ~state.is_own_ew[expert_x]
    has_room_xw = state.copies_w - freed_xw < num_copies
    return ~is_new_xw | (has_room_xw & may_offer(state, expert_x)[:, None])


def may_offer(state: Replicas, expert_x) -> np.ndarray:
    """Return whether the owner of each expert offers it already or has room to."""
    w = len(state.row_ws)
    owner_x = expert_x * w // (len(state.replicas_e) - 1)  # EMPTY: any, is never new
    has_room_x = state.offers_w[owner_x] < len(state.sync_oc) - 1
    return (state.away_e[expert_x] > 0) | has_room_x


def is_freed(state: Replicas, where) -> np.ndarray:
    """Return whether a device holds one copy less after it gives up one replica."""
    return (state.held_ew[where] == 1) & ~state.is_own_ew[where]


def may_exchange(state: Replicas, full: int, num_copies: int) -> np.ndarray:
    """Return whether slot i of device `full` may exchange its expert with slot p, bool
    [i, p]."""
    mine_i, other_p = state.row_ws[full], state.row_ws.reshape(-1)
    device_p = state.device_p
    is_new_iw = (state.held_ew[mine_i] == 0) & ~state.is_own_ew[mine_i]
    is_new_p = (state.held_ew[other_p, full] == 0) & ~state.is_own_ew[other_p, full]
    left_p = num_copies - state.copies_w[device_p]
    left_i = num_copies - state.copies_w[full] + is_freed(state, (mine_i, full))
    has_room_p = left_p + is_freed(state, (other_p, device_p)) > 0
    goes_ip = ~is_new_iw[:, device_p]
    goes_ip |= may_offer(state, mine_i)[:, None] & has_room_p
    comes_ip = ~is_new_p | (may_offer(state, other_p) & (left_i > 0)[:, None])
    return goes_ip & comes_ip & (device_p != full)


def put(state: Replicas, device: int, slot: int, expert: int) -> None:
    """Put `expert` into a slot in place of the expert there; EMPTY may be either."""
    for e, change in ((int(state.row_ws[device, slot]), -1), (expert, 1)):
        if e == EMPTY:
            state.held_ew[e, device] += change
            continue
        old_share_w, was_held = share(state, e), state.held_ew[e, device] > 0
        was_away = state.away_e[e] > 0
        state.held_ew[e, device] += change
        state.replicas_e[e] += change
        state.rows_kw += state.unit_kew[:, e] * (share(state, e) - old_share_w)
        state.share_e[e] = state.unit_kew[0, e, 0] / max(state.replicas_e[e], 1)
        if not state.is_own_ew[e, device]:
            num_new = int(state.held_ew[e, device] > 0) - int(was_held)
            state.copies_w[device] += num_new
            state.away_e[e] += num_new
            owner = state.is_own_ew[e].argmax()
            state.offers_w[owner] += int(state.away_e[e] > 0) - int(was_away)
    state.row_ws[device, slot] = expert
    state.time_w = state.row_sec @ state.rows_kw[:2]


def share(state: Replicas, expert: int) -> np.ndarray:
    """Return the share q of an expert on each device.

    It is 0 in the middle of an exchange, while no slot has the expert.
    """
    return state.held_ew[expert] / max(state.replicas_e[expert], 1)
