"""Dynamic replication in NumPy: which experts a device computes beside its own in this
micro-batch, so that every device has the mean of the rows, to one row.

Devices with too few rows are paired with those that have too many: each takes all that
it lacks from one sender, so it needs no more copies than the sender owns experts. (The
planner of MoonEP and of Megatron-LM's virtual experts, from its published description.)

    device             0            1         4 experts with 9, 1, 2, 0 rows: mean 6
    own experts      0   1        2   3
    slots          0  1  -  -   2  3  0  -    device 0 gives 4 rows of expert 0
    rows           5  1         2  0  4

This is the definition; moejax.moe.split.dynamic must give the same bits.
"""

from typing import NamedTuple

import numpy as np

from moejax.plan.expert_plan import EMPTY
from moejax.plan.layout import Layout


class Paired(NamedTuple):
    """Expert of each slot, int32 [p], and its rows, int [p]."""

    row_p: np.ndarray
    rows_p: np.ndarray


def pair(load_e: np.ndarray, owned_e: np.ndarray, layout: Layout) -> Paired:
    """Slots for whole loads, summed over sources, of experts owned as `owned_e` says.

    A device's own experts are in its first slots, then copies by position in `owned_e`,
    then empty slots. Where offers_per_device and copies_per_device are the own experts,
    device w has exactly total // w rows, the first total % w one more. With less it
    keeps the fullest, and what it cannot offer or hold stays at its owner. One that was
    to give more than it had too many, and takes from another, could then end fuller
    than any at home: nothing moves in that case.
    """
    w, s = layout.num_devices, layout.slots_per_device
    load_wi = np.asarray(load_e, np.int64)[owned_e].reshape(w, -1)
    own = load_wi.shape[1]
    given_wid = _given(load_wi, quotas(load_wi.sum(axis=1)))
    given_wid = _kept(given_wid, layout)
    if _after(load_wi, given_wid).max() > load_wi.sum(axis=1).max():
        given_wid = np.zeros_like(given_wid)
    row_ds = np.full((w, s), EMPTY, np.int32)
    rows_ds = np.zeros((w, s), np.int64)
    row_ds[:, :own] = owned_e.reshape(w, own)
    rows_ds[:, :own] = load_wi - given_wid.sum(axis=2)
    given_de = given_wid.reshape(w * own, w).T
    for device, given_e in enumerate(given_de):
        place = np.flatnonzero(given_e)
        copies = slice(own, own + len(place))
        row_ds[device, copies] = owned_e[place]
        rows_ds[device, copies] = given_e[place]
    return Paired(row_ds.reshape(-1), rows_ds.reshape(-1))


def quotas(rows_w: np.ndarray) -> np.ndarray:
    """Rows that device o gives device r, int [o, r]: w - 1 times, the one with most too
    many gives the one with most too few all that it lacks, though it then lack some
    itself. So nobody takes from two. Ties: the lowest number."""
    w = len(rows_w)
    total = int(rows_w.sum())
    balance_w = rows_w - total // w - (np.arange(w) < total % w)
    quota_or = np.zeros((w, w), np.int64)
    for _ in range(w - 1):
        o, r = balance_w.argmax(), balance_w.argmin()
        if balance_w[o] > 0:
            quota_or[o, r] = -balance_w[r]
            balance_w[o] += balance_w[r]
            balance_w[r] = 0
    return quota_or


def _given(load_wi: np.ndarray, quota_wd: np.ndarray) -> np.ndarray:
    """Rows of its i-th expert that device w gives d, [w, i, d]: the fullest expert to
    the largest quota, as much as fits, until none is left. Ties: the lowest number."""
    w, own = load_wi.shape
    left_wi, quota_wd = load_wi.copy(), quota_wd.copy()
    given_wid = np.zeros((w, own, w), np.int64)
    sender = np.arange(w)
    for _ in range(w + own):  # each time a quota or an expert is used up
        i, d = left_wi.argmax(axis=1), quota_wd.argmax(axis=1)
        moved_w = np.minimum(left_wi[sender, i], quota_wd[sender, d])
        given_wid[sender, i, d] += moved_w
        left_wi[sender, i] -= moved_w
        quota_wd[sender, d] -= moved_w
    return given_wid


def _after(load_wi: np.ndarray, given_wid: np.ndarray) -> np.ndarray:
    """Rows of each device, [w]."""
    return (load_wi - given_wid.sum(axis=2)).sum(axis=1) + given_wid.sum(axis=(0, 1))


def _kept(given_wid: np.ndarray, layout: Layout) -> np.ndarray:
    """What the budgets allow: of an owner's experts the offers_per_device with most
    rows given, of those a receiver's copies_per_device with most rows. Ties: the lowest
    number."""
    w, own, _ = given_wid.shape
    offered_wi = _largest(given_wid.sum(axis=2), layout.offers_per_device)
    given_ed = (given_wid * offered_wi[:, :, None]).reshape(w * own, w)
    kept_de = _largest(given_ed.T, layout.copies_per_device)
    return (given_ed * kept_de.T).reshape(w, own, w)


def _largest(value_wx: np.ndarray, count: int) -> np.ndarray:
    """Whether a value is among the `count` largest of its row, bool [w, x]."""
    order_wx = np.argsort(-value_wx, axis=1, kind="stable")
    is_largest_wx = np.zeros(value_wx.shape, bool)
    np.put_along_axis(is_largest_wx, order_wx[:, :count], True, axis=1)
    return is_largest_wx
