"""Asymmetric plans: copies of experts where an exact split of a drifting load needs
them, in NumPy.

The score of a plan is the density of its densest set of devices
(`moejax.balance.policies.micromoe.density`). Rows are counted with one standard
deviation of their drift until the plan runs. Every device keeps its own experts; the
search changes the copies in its other slots.

    fill       put the expert with the most rows per replica on the least filled device
    replace    put an expert inside the densest set in place of a copy outside it
    exchange   exchange a copy inside the densest set with one outside it

Changes are compared on a pool of the dense sets found so far. The best change is scored
on all sets, and the densest of these join the pool: a search by cutting planes.

Where links between nodes are slow, the search begins with copies that lie near the
tokens of their experts (`near.py`).
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from moejax.balance.policies.micromoe.density import (
    MAX_DEVICES,
    dense_prefix,
    device_holds,
    in_sets,
    set_sizes,
    subset_sums,
)
from moejax.plan.expert_plan import EMPTY

DRIFT = 0.1
"""Standard deviation of the drift of an expert's rows until the next sample, over its
rows, if these are as many as a mean device's. For other experts it grows with the root
of their rows. On a recorded GPT of 32 experts it was 0.09 to 0.12."""
EVEN = 1e-3
"""Difference from 1 below which a score counts as 1."""
NUM_TRIALS = 24
"""Largest number of changes that are scored on all sets."""
POOL_SIZE, NEW_SETS = 48, 6
"""Largest number of sets in the pool, and of sets that join it at a time."""
NUM_MOVED = 24
"""Number of experts, and of copies, inside the densest set that a change may move: the
fullest ones."""
NUM_DRIFTS = 4
"""Number of drifted loads whose densest sets stand for all sets, where there are too
many to look at each."""
MIN_GAIN = 1e-4
"""Smallest gain of one step of the search."""
NOWHERE = -1
"""Device of a replica that does not exist yet, or no longer."""
NEAR = 0.97
"""Score from which a set beside the densest one counts a little. Changes that do not
change the densest set differ in these sets."""


@dataclasses.dataclass(frozen=True)
class Drifting:
    """Load of one layer over the mean device's, with its drift.

    The last entry of each array is that of EMPTY, 0.
    """

    rows_x: np.ndarray
    """Rows of each expert."""
    variance_x: np.ndarray
    """Variance of the drift of each expert's rows."""
    num_devices: int

    def score(self, rows, variance, size):
        """Return the scores of sets with these rows inside: rows plus one standard
        deviation, per device. The total of all rows does not drift."""
        outside = np.maximum(1 - variance / self.variance_x.sum(), 0)
        return (rows + np.sqrt(np.maximum(variance, 0) * outside)) / size

    @functools.cached_property
    def drawn_ne(self) -> np.ndarray:
        """Samples of the rows of each expert after a drift. The random numbers are the
        same in every call, and come in pairs of opposite signs."""
        rng = np.random.default_rng(0)
        normal_ne = rng.standard_normal((NUM_DRIFTS // 2, len(self.rows_x) - 1))
        drift_ne = np.concatenate([normal_ne, -normal_ne])
        drift_ne *= np.sqrt(self.variance_x[:-1])
        return np.maximum(self.rows_x[:-1] + drift_ne, 0).astype(float)


class Crowds(NamedTuple):
    """A pool of sets of devices under one plan; the last expert x is EMPTY."""

    is_in_kw: np.ndarray
    """Whether each device is in each set."""
    absent_wk: np.ndarray
    """1 for devices that are not in the set, else 0; 0 for NOWHERE, the last."""
    outside_xk: np.ndarray
    """Number of replicas outside the set. An expert with none is inside."""
    rows_k: np.ndarray
    """Rows of the experts inside each set."""
    variance_k: np.ndarray
    """Variance of these rows."""
    size_k: np.ndarray
    """Number of devices in each set."""
    score_k: np.ndarray


class Slots(NamedTuple):
    """Slots of one layer, and which of them the search may change."""

    row_ws: np.ndarray
    """Expert in each slot."""
    is_free_ws: np.ndarray
    """Whether a slot is for copies, so that the search may change it."""


def drifting(load_e: np.ndarray, num_devices: int) -> Drifting:
    """Return a load, which must not be all zero, with its drift."""
    rows_x = np.append(load_e / (load_e.sum() / num_devices), 0).astype(np.float32)
    return Drifting(rows_x, DRIFT**2 * rows_x, num_devices)


def improved(
    slots: Slots, may_copy_we: np.ndarray, task: Drifting, enough: float = 1 + EVEN
) -> tuple[np.ndarray, float]:
    """Fill the free slots with copies, improve them by local search until the score is
    at most `enough`, and return the slots [w, s] and their score. `may_copy_we` says
    which experts each device may hold copies of."""
    row_ws = fill(slots, may_copy_we, task)
    score, pool_kw = scored(row_ws, task)
    for _ in range(NUM_TRIALS):
        if score <= enough:
            break
        crowds = _crowds(row_ws, pool_kw, task)
        score = max(score, float(crowds.score_k.max()))
        current = Slots(row_ws, slots.is_free_ws)
        trial_ws = _best_change(current, crowds, may_copy_we, task)
        if trial_ws is None:
            break
        trial_score, dense_kw = scored(trial_ws, task)
        pool_kw = np.unique(np.concatenate([crowds.is_in_kw, dense_kw]), axis=0)
        known_score = float(_crowds(trial_ws, pool_kw, task).score_k.max())
        trial_score = max(trial_score, known_score)
        if trial_score < score - MIN_GAIN:
            row_ws, score = trial_ws, trial_score
    return row_ws, score


def fill(slots: Slots, may_copy_we: np.ndarray, task: Drifting) -> np.ndarray:
    """Return the slots [w, s] with copies in the free slots, as long as there is an
    expert with rows that fits into one."""
    row_ws = slots.row_ws.copy()
    has_load_e = task.rows_x[:-1] > 0
    held_we = device_holds(row_ws.reshape(-1), len(has_load_e), len(row_ws))
    while True:
        room_w = ((row_ws == EMPTY) & slots.is_free_ws).sum(axis=1)
        allowed_we = ~held_we & (room_w > 0)[:, None] & may_copy_we
        allowed_e = allowed_we.any(axis=0) & has_load_e
        if not allowed_e.any():
            return row_ws
        share_e = task.rows_x[:-1] / held_we.sum(axis=0)
        expert = int(np.where(allowed_e, share_e, -1).argmax())
        filled_w = np.where(held_we, share_e, 0).sum(axis=1)
        device = int(np.where(allowed_we[:, expert], filled_w, np.inf).argmin())
        is_room_s = (row_ws[device] == EMPTY) & slots.is_free_ws[device]
        row_ws[device, is_room_s.argmax()] = expert
        held_we[device, expert] = True


def scored(row_ws: np.ndarray, task: Drifting) -> tuple[float, np.ndarray]:
    """Return the score of a plan, and some of its densest sets, bool [k, w].

    With more than 16 devices only sets that are dense under drawn drifts are looked at,
    and the score is a lower bound.
    """
    held_we = device_holds(row_ws.reshape(-1), len(task.rows_x) - 1, len(row_ws))
    if len(row_ws) > MAX_DEVICES:
        dense = [dense_prefix(held_we, load_e) for load_e in task.drawn_ne]
        dense_kw = np.array(dense)
        return float(_crowds(row_ws, dense_kw, task).score_k.max()), dense_kw
    rows_d, variance_d = (
        subset_sums(held_we, x[:-1]) for x in (task.rows_x, task.variance_x)
    )
    score_d = task.score(rows_d, variance_d, set_sizes(len(row_ws)))
    score = float(score_d.max())
    near_d = np.flatnonzero(score_d > score - 2 * EVEN)
    densest_d = near_d[np.argsort(-score_d[near_d], kind="stable")[:NEW_SETS]]
    return score, in_sets(densest_d, len(row_ws))


def _crowds(row_ws: np.ndarray, is_in_kw: np.ndarray, task: Drifting) -> Crowds:
    """Return the densest sets of a pool, with their rows and scores."""
    num_experts = len(task.rows_x) - 1
    held_we = device_holds(row_ws.reshape(-1), num_experts, len(row_ws))
    absent_wk = np.zeros((len(row_ws) + 1, len(is_in_kw)), np.float32)
    absent_wk[:-1] = ~is_in_kw.T
    outside_xk = np.ones((num_experts + 1, len(is_in_kw)), np.float32)
    # BLAS is avoided: its threads block one another, and the last bits of its results
    # depend on their number.
    expert_q, device_q = np.nonzero(held_we.T)
    begin_e = np.searchsorted(expert_q, np.arange(num_experts))
    outside_xk[:-1] = np.add.reduceat(absent_wk[device_q], begin_e)
    is_inside_xk = (outside_xk == 0).astype(np.float32)
    rows_k = np.einsum("x,xk->k", task.rows_x, is_inside_xk)
    variance_k = np.einsum("x,xk->k", task.variance_x, is_inside_xk)
    size_k = is_in_kw.sum(axis=1).astype(np.float32)
    score_k = task.score(rows_k, variance_k, size_k)
    k = np.argsort(-score_k, kind="stable")[:POOL_SIZE]
    columns = (rows_k[k], variance_k[k], size_k[k], score_k[k])
    return Crowds(is_in_kw[k], absent_wk[:, k], outside_xk[:, k], *columns)


def _best_change(
    slots: Slots, crowds: Crowds, may_copy_we: np.ndarray, task: Drifting
) -> np.ndarray | None:
    """Return the slots [w, s] after the change that lowers the pool's cost most, or
    None if no change lowers it.

    A change puts expert m, which is inside the densest set, into a slot p outside it.
    The expert of slot p moves to the device `from_m` that gave up m. Where the replica
    of m is new, `from_m` is NOWHERE, and the expert of slot p loses a replica.
    """
    row_p, is_free_p = slots.row_ws.reshape(-1), slots.is_free_ws.reshape(-1)
    num_devices, slots_per_device = slots.row_ws.shape
    device_p = np.arange(len(row_p)) // slots_per_device
    is_in_p = crowds.is_in_kw[0][device_p]
    slot_p = np.flatnonzero(is_free_p & ~is_in_p)
    is_inside_x = (crowds.outside_xk[:, 0] == 0) & (task.rows_x > 0)
    is_inside_x[:-1] &= may_copy_we.any(axis=0)
    new_x = _fullest(np.flatnonzero(is_inside_x), task.rows_x)
    copy_q = np.flatnonzero(is_free_p & is_in_p & is_inside_x[row_p])
    copy_q = copy_q[_fullest(np.arange(len(copy_q)), task.rows_x[row_p[copy_q]])]
    expert_m = np.concatenate([new_x, row_p[copy_q]])
    from_m = np.concatenate([np.full(len(new_x), NOWHERE), device_p[copy_q]])
    gone_p, to_p = row_p[slot_p], device_p[slot_p]

    barred_wx = np.zeros((num_devices + 1, len(task.rows_x)), bool)
    barred_wx[:-1, :-1] = device_holds(row_p, may_copy_we.shape[1], num_devices)
    barred_wx[:-1, :-1] |= ~may_copy_we
    allowed_mp = ~barred_wx[to_p][:, expert_m].T & ~barred_wx[from_m][:, gone_p]
    if not allowed_mp.any():
        return None
    cost_mp = _cost(_score_after(crowds, (expert_m, from_m), (gone_p, to_p), task))
    cost_mp[~allowed_mp] = np.inf
    m, p = divmod(int(cost_mp.argmin()), len(slot_p))
    if not cost_mp[m, p] < _cost(crowds.score_k) - MIN_GAIN:
        return None
    changed_p = row_p.copy()
    changed_p[slot_p[p]] = expert_m[m]
    if m >= len(new_x):
        changed_p[copy_q[m - len(new_x)]] = gone_p[p]
    return changed_p.reshape(num_devices, slots_per_device)


def _score_after(crowds: Crowds, moved, met, task: Drifting) -> np.ndarray:
    """Return the scores [m, p, k] of the pool's sets after each change."""
    (expert_m, from_m), (gone_p, to_p) = moved, met
    outside_mk, outside_pk = crowds.outside_xk[expert_m], crowds.outside_xk[gone_p]
    path_mpk = crowds.absent_wk[to_p] - crowds.absent_wk[from_m][:, None]
    gains_mpk = outside_mk[:, None] + path_mpk == 0
    gains_mpk = gains_mpk.astype(np.float32) - (outside_mk == 0)[:, None]
    comes_mpk = outside_pk - path_mpk == 0
    comes_mpk = comes_mpk.astype(np.float32) - (outside_pk == 0)
    rows, variance = (
        sum_k + gains_mpk * x[expert_m, None, None] + comes_mpk * x[gone_p, None]
        for sum_k, x in (
            (crowds.rows_k, task.rows_x),
            (crowds.variance_k, task.variance_x),
        )
    )
    return task.score(rows, variance, crowds.size_k)


def _cost(score_xk: np.ndarray) -> np.ndarray:
    """Return the score of the densest set, plus a little for each other set that is
    almost as dense."""
    near_xk = np.maximum(score_xk - NEAR, 0)
    return score_xk.max(axis=-1) + EVEN * near_xk.sum(axis=-1)


def _fullest(index: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the NUM_MOVED indices with the most rows."""
    return index[np.argsort(-rows[index], kind="stable")[:NUM_MOVED]]
