"""Dynamic replication in NumPy: copies of experts that balance one micro-batch.

It chooses which experts each device computes beside its own, so that every device has
the mean number of rows, to one row. Each device with too few rows is paired with one
sender that has too many, and takes all the rows that it lacks from that sender. So it
needs at most as many copies as the sender owns experts. (The planner of MoonEP and of
Megatron-LM's virtual experts, from its published description.)

    device             0            1         4 experts with 9, 1, 2, 0 rows: mean 6
    own experts      0   1        2   3
    slots          0  1  -  -   2  3  0  -    device 0 sends 4 rows of expert 0
    rows           5  1         2  0  4

This is the definition. moejax.moe.split.dynamic runs on devices and must give the same
bits.
"""

from typing import NamedTuple

import numpy as np

from moejax.plan.expert_plan import EMPTY
from moejax.plan.layout import Layout


class Replicas(NamedTuple):
    """Slots of one layer for one micro-batch, and the rows of each."""

    row_p: np.ndarray
    """Expert of each slot, int32 [p]; -1 for an empty one."""
    rows_p: np.ndarray
    """Number of rows of each slot, int [p]."""


def pair(load_e: np.ndarray, owned_e: np.ndarray, layout: Layout) -> Replicas:
    """Return slots and rows that balance the loads of one layer and micro-batch.

    `load_e` is the number of rows of each expert, summed over all sources, and
    `owned_e` the expert at each position of the owners. A device has its own experts in
    its first slots, then copies in the order of their positions, then empty slots.

    Device d ends with total // w rows, and one more if d < total % w, where
    offers_per_device and copies_per_device are both the number of own experts. Smaller
    budgets keep the copies with most rows, and all other rows stay with their owner. A
    device that both sends and receives rows could then end fuller than the fullest
    device without copies; if one does, no row moves at all.
    """
    w, s = layout.num_devices, layout.slots_per_device
    load_wi = np.asarray(load_e, np.int64)[owned_e].reshape(w, -1)
    own = load_wi.shape[1]
    sent_wid = _split_quotas(load_wi, quotas(load_wi.sum(axis=1)))
    sent_wid = _limit_to_budgets(sent_wid, layout)
    if _device_rows(load_wi, sent_wid).max() > load_wi.sum(axis=1).max():
        sent_wid = np.zeros_like(sent_wid)
    row_ds = np.full((w, s), EMPTY, np.int32)
    rows_ds = np.zeros((w, s), np.int64)
    row_ds[:, :own] = owned_e.reshape(w, own)
    rows_ds[:, :own] = load_wi - sent_wid.sum(axis=2)
    received_de = sent_wid.reshape(w * own, w).T
    for device, received_e in enumerate(received_de):
        position = np.flatnonzero(received_e)
        copies = slice(own, own + len(position))
        row_ds[device, copies] = owned_e[position]
        rows_ds[device, copies] = received_e[position]
    return Replicas(row_ds.reshape(-1), rows_ds.reshape(-1))


def quotas(rows_w: np.ndarray) -> np.ndarray:
    """Return the number of rows that device o sends to device r, int [o, r].

    w - 1 times, the device with the largest surplus over its target sends to the device
    with the largest deficit all that this one lacks, even if the sender then lacks rows
    itself. So no device receives from two senders. Ties go to the lowest device number.
    """
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


def _split_quotas(load_wi: np.ndarray, quota_wd: np.ndarray) -> np.ndarray:
    """Return the rows of its i-th expert that device w sends to device d, [w, i, d].

    Every device repeatedly assigns its expert with most rows left to its largest quota
    left, as many rows as both have. Ties go to the lowest number.
    """
    w, own = load_wi.shape
    left_wi, quota_wd = load_wi.copy(), quota_wd.copy()
    sent_wid = np.zeros((w, own, w), np.int64)
    sender = np.arange(w)
    for _ in range(w + own):  # each iteration uses up a quota or an expert
        i, d = left_wi.argmax(axis=1), quota_wd.argmax(axis=1)
        moved_w = np.minimum(left_wi[sender, i], quota_wd[sender, d])
        sent_wid[sender, i, d] += moved_w
        left_wi[sender, i] -= moved_w
        quota_wd[sender, d] -= moved_w
    return sent_wid


def _device_rows(load_wi: np.ndarray, sent_wid: np.ndarray) -> np.ndarray:
    """Return the number of rows of each device after rows were sent, [w]."""
    return (load_wi - sent_wid.sum(axis=2)).sum(axis=1) + sent_wid.sum(axis=(0, 1))


def _limit_to_budgets(sent_wid: np.ndarray, layout: Layout) -> np.ndarray:
    """Return the part of `sent_wid` that the layout's budgets for copies allow.

    An owner offers its offers_per_device experts with most rows to send, and a receiver
    takes the copies_per_device of these that bring it most rows. Ties go to the
    lowest expert number.
    """
    w, own, _ = sent_wid.shape
    is_offered_wi = _is_largest(sent_wid.sum(axis=2), layout.offers_per_device)
    sent_ed = (sent_wid * is_offered_wi[:, :, None]).reshape(w * own, w)
    is_copied_de = _is_largest(sent_ed.T, layout.copies_per_device)
    return (sent_ed * is_copied_de.T).reshape(w, own, w)


def _is_largest(value_wx: np.ndarray, count: int) -> np.ndarray:
    """Return whether a value is among the `count` largest of its row, bool [w, x]."""
    order_wx = np.argsort(-value_wx, axis=1, kind="stable")
    is_largest_wx = np.zeros(value_wx.shape, bool)
    np.put_along_axis(is_largest_wx, order_wx[:, :count], True, axis=1)
    return is_largest_wx
