"""Copies near the tokens of their experts, where links between nodes are slow.

A search for balance puts copies of the fullest experts anywhere. Here copies are chosen
first by the rows that they keep on their node (`with_near_copies`); the search then
changes what it must.
"""

import numpy as np

from moejax.balance.policies.micromoe.asymmetric import Slots
from moejax.balance.policies.micromoe.density import device_holds
from moejax.perf.traffic import Dealing, pair_rows, rows_by_slot
from moejax.plan.expert_plan import EMPTY


def with_near_copies(
    slots: Slots, may_copy_we: np.ndarray, load_me: np.ndarray
) -> np.ndarray:
    """Return the slots [w, s] with copies in the free ones, each on the node where it
    keeps most rows from leaving, until none keeps any.

    `load_me` are the rows of each expert by node of their tokens. A replica is taken to
    compute a mean device's rows at most: where tokens of a node choose an expert more
    often, a second replica there keeps the rest. On its node a copy goes to the device
    with the fewest rows, if each expert's replicas share its rows evenly.
    """
    row_ws = np.where(slots.is_free_ws, EMPTY, slots.row_ws)
    (num_devices, _), (nodes, e) = row_ws.shape, load_me.shape
    mean = load_me.sum() / num_devices
    held_we = device_holds(row_ws.reshape(-1), e, num_devices)
    while True:
        room_w = ((row_ws == EMPTY) & slots.is_free_ws).any(axis=1)
        may_hold_we = room_w[:, None] & ~held_we & may_copy_we
        may_hold_me = may_hold_we.reshape(nodes, -1, e).any(axis=1)
        replicas_me = held_we.reshape(nodes, -1, e).sum(axis=1)
        kept_me = np.clip(load_me - replicas_me * mean, 0, mean) * may_hold_me
        if not kept_me.any():
            return row_ws
        node, expert = np.unravel_index(kept_me.argmax(), kept_me.shape)
        share_e = load_me.sum(axis=0) / replicas_me.sum(axis=0)
        level_w = np.where(held_we, share_e, 0.0).sum(axis=1)
        is_there_w = np.arange(num_devices) // (num_devices // nodes) == node
        level_w[~(is_there_w & may_hold_we[:, expert])] = np.inf
        device = int(level_w.argmin())
        is_room_s = (row_ws[device] == EMPTY) & slots.is_free_ws[device]
        row_ws[device, is_room_s.argmax()] = expert
        held_we[device, expert] = True


def far_share(row_p: np.ndarray, load_we: np.ndarray, nodes: int) -> float:
    """Return the share of all rows that leave the node of their tokens, where the exact
    split deals its rows nearest first."""
    w = len(load_we)
    how = Dealing((w, nodes))
    pair_ww = pair_rows(rows_by_slot(load_we, row_p, w, "water_filling", how))
    node_mm = pair_ww.reshape(nodes, w // nodes, nodes, w // nodes).sum(axis=(1, 3))
    return 1 - np.trace(node_mm) / node_mm.sum()
