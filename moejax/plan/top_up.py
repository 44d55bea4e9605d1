"""Top-up in NumPy: the exact split over a plan's replicas, and a few copies of experts
where these replicas leave a device too full.

The replicas of a plan come from forecasts, and in most micro-batches they are enough.
Where they are not, two moves alternate until no device is above the limit:

1. Rows move along a shortest path of devices, from one above the limit to one below it,
   as in moejax.plan.water_filling.
2. If there is no path, the emptiest device gets a copy of an expert of the fullest one.
   Paths through the copy relieve other devices too, so that few copies are needed.

    device              0         1         2      loads 12, 1, 2, 1, 1, 1: mean 6
    plan              0 1 -     2 3 0     4 5 -
    water-filling     7 1       2 1 5     1 1      8, 8 and 2 rows
    topped up         5 1       2 1 3     1 1 4    device 2 has a copy of expert 0

Copies travel in the step, so a device takes at most `Layout.top_up_copies`, and offers
at most `Layout.top_up_offers` of the experts in the slots that its plan gives it. This
is the definition. moejax.moe.split.top_up runs on devices and must give the same bits.
"""

from typing import NamedTuple

import numpy as np

from moejax.plan import water_filling
from moejax.plan.expert_plan import EMPTY
from moejax.plan.layout import Layout

SLACK_BITS = 10
"""Fractional bits of Layout.top_up_slack."""
STEPS_PER_DEVICE = 16
"""Maximum number of moves along a path and of copies, per device. After that, a device
may stay above the limit."""


class TopUp(NamedTuple):
    """Slots of one layer for one micro-batch, the rows of each, and copies in them."""

    row_p: np.ndarray
    """Expert of each slot, int32 [p]; -1 for an empty one."""
    rows_p: np.ndarray
    """Number of rows of each slot, int [p]."""
    bound: int
    """Under any split over the plan's replicas, and over these copies, the fullest
    device has at least this many rows. It is the mean where there are copies."""
    offer_wo: np.ndarray
    """Slot of each expert that a device offers, int32 [w, offers]; -1 for none."""
    want_wc: np.ndarray
    """Offer that becomes each copy, int32 [w, copies], counted over all devices; -1 for
    none."""

    @property
    def num_copies(self) -> int:
        """Number of copies that travel."""
        return int((self.want_wc >= 0).sum())


def max_rows(total, layout: Layout):
    """Return the number of rows that a device may have without copies: the mean and the
    slack, rounded down, but the mean rounded up at least. `total` is the number of all
    rows, of NumPy or JAX.

    With a slack of all other devices' rows nothing is above the limit.
    """
    w = layout.num_devices
    slack = min(layout.top_up_slack, (w - 1) << SLACK_BITS)
    mean = -(-total // w)
    low = mean & ((1 << SLACK_BITS) - 1)
    return mean + (mean >> SLACK_BITS) * slack + (low * slack >> SLACK_BITS)


def top_up(load_e: np.ndarray, row_p: np.ndarray, layout: Layout) -> TopUp:
    """Return the slots of one layer with the copies that its loads need, and the rows
    of each slot.

    `load_e` is the number of rows of each expert, summed over sources, and `row_p` the
    expert of each slot. The last `top_up_copies` slots of each device are for copies
    (`Layout.topped_up`), and empty. Every expert has a slot.

    No device has more than `max_rows`, unless the budgets or STEPS_PER_DEVICE forbid
    it; then the fullest device is still no fuller than under water-filling.
    """
    w, total = layout.num_devices, int(load_e.sum())
    tolerance = water_filling.split_tolerance(total, w)
    filling = water_filling.fill(load_e, row_p, w, tolerance)
    state = _State(filling.rows_p, row_p, max_rows(total, layout), layout)
    for _ in range(STEPS_PER_DEVICE * w):
        if state.level_w.max() <= state.limit:
            break
        if not (state.move_along_path() or state.copy()):
            break
    row_p, rows_p = state.slots()
    bound = -(-total // w) if state.num_copies_w.any() else filling.bound
    return TopUp(row_p, rows_p, bound, state.offer_wo, state.want_wc)


class _State:
    """Rows of each expert on each device, and the copies made so far."""

    def __init__(self, rows_p, row_p, limit: int, layout: Layout):
        w = layout.num_devices
        self.layout, self.limit, self.row_p, self.rows_p = layout, limit, row_p, rows_p
        self.slot_ew = water_filling.find_slots(row_p, w)
        self.is_planned_ew = self.slot_ew != EMPTY
        self.is_held_ew = self.is_planned_ew.copy()
        self.rows_ew = np.where(self.is_held_ew, rows_p[self.slot_ew], 0)
        self.level_w = self.rows_ew.sum(axis=0)
        self.expert_wc = np.full((w, layout.top_up_copies), EMPTY, np.int32)
        self.want_wc = self.expert_wc.copy()
        self.offer_wo = np.full((w, layout.top_up_offers), EMPTY, np.int32)
        self.num_copies_w, self.num_offers_w = np.zeros((2, w), int)
        self.offer_e = np.full(len(self.slot_ew), EMPTY)

    def move_along_path(self) -> bool:
        """Move rows along a shortest path to a device below the limit, if there is a
        path."""
        levels = self.is_held_ew, self.level_w, self.limit
        return water_filling.relieve(self.rows_ew, *levels) is None

    def copy(self) -> bool:
        """Give the emptiest device a copy of an expert of the fullest one, if budgets
        allow it.

        The emptiest device takes rows until it is full or the fullest one is at the
        limit. It gets the expert of which it can take most, and if there are several,
        the one with most rows in the excess of all devices. Ties go to the lowest
        number. For its last copy it takes rows until it is full, so that no room is
        lost: the giver may fall below the limit, and then take rows of others.
        """
        layout, giver = self.layout, self.level_w.argmax()
        excess_w = np.maximum(self.level_w - self.limit, 0)
        room_w = np.maximum(self.limit - self.level_w, 0)
        may_offer_ew = self.is_planned_ew & (self.num_offers_w < layout.top_up_offers)
        has_offer_e = (self.offer_e != EMPTY) | may_offer_ew.any(axis=1)
        may_copy_ew = ~self.is_held_ew & (self.num_copies_w < layout.top_up_copies)
        may_copy_ew &= (has_offer_e & (self.rows_ew[:, giver] > 0))[:, None]
        room_w = np.where(may_copy_ew.any(axis=0), room_w, 0)
        taker = room_w.argmax()
        if room_w[taker] == 0:
            return False
        over_ew = np.minimum(self.rows_ew, excess_w)
        index = self.num_copies_w[taker]
        is_last = index + 1 == layout.top_up_copies
        given_ew = self.rows_ew if is_last else over_ew
        amount_e = np.minimum(given_ew[:, giver], room_w[taker])
        amount_e = np.where(may_copy_ew[:, taker], amount_e, 0)
        is_best_e = amount_e == amount_e.max()
        expert = np.where(is_best_e, over_ew.sum(axis=1), EMPTY).argmax()
        if self.offer_e[expert] == EMPTY:
            self._offer(expert, may_offer_ew[expert])
        amount = amount_e[expert]
        self.rows_ew[expert, [giver, taker]] += [-amount, amount]
        self.level_w[[giver, taker]] += [-amount, amount]
        self.is_held_ew[expert, taker] = True
        self.expert_wc[taker, index] = expert
        self.want_wc[taker, index] = self.offer_e[expert]
        self.num_copies_w[taker] += 1
        return True

    def _offer(self, expert: int, may_offer_w: np.ndarray) -> None:
        """Let the holder with the fewest offers offer an expert."""
        beyond = self.layout.num_slots
        holder = np.where(may_offer_w, self.num_offers_w, beyond).argmin()
        index = self.num_offers_w[holder]
        slot = self.slot_ew[expert, holder] % self.layout.slots_per_device
        self.offer_wo[holder, index] = slot
        self.offer_e[expert] = holder * self.layout.top_up_offers + index
        self.num_offers_w[holder] += 1

    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the expert and the number of rows of each slot."""
        w, c = self.want_wc.shape
        row_ws = self.row_p.reshape(w, -1).copy()
        row_ws[:, row_ws.shape[1] - c :] = self.expert_wc
        rows_p = np.zeros_like(self.rows_p)
        rows_p[self.slot_ew[self.is_planned_ew]] = self.rows_ew[self.is_planned_ew]
        rows_ws = rows_p.reshape(w, -1)
        device_c1 = np.arange(w)[:, None]
        copied_wc = self.rows_ew[self.expert_wc, device_c1]
        rows_ws[:, rows_ws.shape[1] - c :] = np.where(self.want_wc < 0, 0, copied_wc)
        return row_ws.reshape(-1), rows_p
