"""Water-filling in NumPy: replica loads that minimise the rows of the fullest device.

The problem is that of MicroMoE (arXiv 2511.16947), solved here in whole numbers and
with a lower bound, the certificate, that proves how good a solution is. An expert's
rows are spread over its replicas so that the levels of their devices even out. A
*sweep* does so for one expert after the other, color by color
(moejax.plan.edge_coloring). Afterwards rows move along paths of devices until the
fullest device has no more rows than the certificate.

    device          0        1        2
    slot p        0   1    2   3    4   5
    expert        0   -    1   0    2   1     loads 6, 4, 2: 12 rows, 4 per device
    even          3        2   3    2   2     the start: an equal share per replica
    poured        4        2   2    2   2     after the sweeps

`fill` returns the rows of each slot: first `sweep`, then `move_along_paths`. It is the
definition. The device versions, moejax.kernels.water_fill (sweeps only) and
moejax.moe.split.water_filling (all of it), must give the same bits. `prove` names the
devices and experts behind a certificate.
"""

import itertools
from typing import NamedTuple

import numpy as np

from moejax.plan.edge_coloring import edge_coloring
from moejax.plan.expert_plan import EMPTY

MAX_SWEEPS = 16
"""Maximum number of sweeps."""
PATHS_PER_DEVICE = 8
"""Maximum number of attempts to move rows along a path, per device. After that, the
fullest device may stay above the bound."""
TOLERANCE_BITS = 9
"""In a training step the fullest device may have up to mean >> 9 rows more than the
bound, 0.2 % of the mean."""


class Filling(NamedTuple):
    """Rows of each slot, with a lower bound for the fullest device."""

    rows_p: np.ndarray
    """Number of rows of each slot, int [p]."""
    bound: int
    """Certificate: under every split the fullest device has at least this many rows."""
    sweeps: int
    """Number of sweeps that were made."""

    def level_w(self, num_devices: int) -> np.ndarray:
        """Return the number of rows of each device, int [w]."""
        return self.rows_p.reshape(num_devices, -1).sum(axis=1)


class Proof(NamedTuple):
    """Devices whose rows no split can send elsewhere, the fullest one among them."""

    devices: np.ndarray
    """Numbers of the devices, in rising order."""
    experts: np.ndarray
    """Experts with rows whose replicas are all on these devices, in rising order."""
    rows: int
    """Number of rows of these experts, which these devices must compute."""

    @property
    def bound(self) -> int:
        """Mean of the rows over these devices, rounded up: one of them has at least as
        many, under any split."""
        return -(-self.rows // len(self.devices))


class Expert(NamedTuple):
    """Load of one expert, and the slots that can compute it."""

    load: int
    """Number of rows, summed over sources."""
    slots: list[int]
    """First slot of the expert on each of its devices, in rising order."""
    devices: list[int]
    """Device of each of these slots."""


def split_tolerance(total: int, num_devices: int) -> int:
    """Return how many rows above the bound a training step accepts: 1/512 of the mean
    rows of a device."""
    return -(-int(total) // num_devices) >> TOLERANCE_BITS


def fill(
    load_e: np.ndarray,
    row_p: np.ndarray,
    num_devices: int,
    tolerance: int = 0,
    max_sweeps: int = MAX_SWEEPS,
) -> Filling:
    """Divide the rows of each expert among its slots so that the fullest device has as
    few rows as possible.

    `load_e` is the number of rows of each expert, summed over sources, and `row_p` the
    expert of each slot. Every expert with rows must have a slot. Where an expert has
    two slots on one device, the second one gets no rows.

    The fullest device has at most `bound + tolerance` rows; with tolerance 0 this is
    the optimum of the linear program, rounded up. It has more only if
    PATHS_PER_DEVICE * w attempts along paths were not enough.
    """
    filling = sweep(load_e, row_p, num_devices, tolerance, max_sweeps)
    return move_along_paths(filling, row_p, num_devices, tolerance)


def sweep(
    load_e: np.ndarray,
    row_p: np.ndarray,
    num_devices: int,
    tolerance: int = 0,
    max_sweeps: int = MAX_SWEEPS,
) -> Filling:
    """Return the result of the sweeps alone, with the arguments of `fill`.

    Sweeps start from the even split, in which the first replicas get the remainder of
    a division. They end when the fullest device has at most `tolerance` rows more than
    the certificate, when a sweep changed nothing, or after `max_sweeps`.
    """
    experts = _experts(load_e, row_p, num_devices)
    rows = _split_evenly(experts, len(row_p))
    level = np.reshape(rows, (num_devices, -1)).sum(axis=1).tolist()
    bound, sweeps, changed = certificate(experts, level), 0, True
    while max(level) > bound + tolerance and changed and sweeps < max_sweeps:
        changed = False
        for load, slots, devices in experts:
            if len(slots) > 1:
                before = [rows[slot] for slot in slots]
                ground = [level[w] - x for w, x in zip(devices, before)]
                after = pour(ground, load)
                changed |= after != before
                for slot, device, low, x in zip(slots, devices, ground, after):
                    rows[slot], level[device] = x, low + x
        bound, sweeps = certificate(experts, level), sweeps + 1
    return Filling(np.array(rows, np.int64), bound, sweeps)


def pour(ground: list[int], load: int) -> list[int]:
    """Return the rows of each replica of one expert that minimise the sum of squared
    device levels.

    `ground` is the level of each of the expert's devices without this expert's rows,
    and `load` the number of rows to pour on top. Devices are filled up to a common
    surface, rounded down. Each row that is then left goes to another device whose
    ground is not above the surface, in the order of `ground`.
    """
    surface, total = load + max(ground), load
    for count, low in enumerate(sorted(ground), 1):
        total += low
        surface = min(surface, total // count)
    rows = [max(surface - low, 0) for low in ground]
    left = load - sum(rows)
    for r, low in enumerate(ground):
        if left and low <= surface:
            rows[r] += 1
            left -= 1
    return rows


def certificate(experts: list[Expert], level: list[int]) -> int:
    """Return a lower bound for the rows of the fullest device under any split.

    It is the maximum over k of ceil(r / k), where r is the number of rows of experts
    all of whose replicas are on the k fullest devices. If devices are equally full, the
    first counts as fuller. `level` is the number of rows of each device.
    """
    order = sorted(range(len(level)), key=lambda w: -level[w])
    rank = sorted(range(len(level)), key=order.__getitem__)
    inside = [0] * len(level)
    for load, _, devices in experts:
        inside[max(rank[w] for w in devices)] += load
    return max(-(-x // k) for k, x in enumerate(itertools.accumulate(inside), 1))


def move_along_paths(
    filling: Filling, row_p: np.ndarray, num_devices: int, tolerance: int = 0
) -> Filling:
    """Return `filling` after moving rows along paths of devices.

    A path is a shortest one from a device above the target to a device below it. Each
    of its moves passes the same number of rows of some expert from a device to the
    next, which has a replica of that expert. The target is `filling.bound` at first.
    If there is no path, the rows of the devices that were reached cannot leave these
    devices, so that their mean, rounded up, is a higher bound: it is the next target.
    The loop ends when no device has more than target + tolerance rows, or after
    PATHS_PER_DEVICE * w iterations.

    Where several paths are shortest, the path ends at the device with the lowest number
    below the target. From there backwards, each move takes the expert with the lowest
    number and the sender with the lowest number.
    """
    level_w, target = filling.level_w(num_devices), filling.bound
    slot_ew = find_slots(row_p, num_devices)
    is_held_ew = slot_ew != EMPTY
    rows_ew = np.where(is_held_ew, filling.rows_p[slot_ew], 0)
    for _ in range(PATHS_PER_DEVICE * num_devices):
        if level_w.max() <= target + tolerance:
            break
        reached_w = relieve(rows_ew, is_held_ew, level_w, target)
        if reached_w is not None:
            target = -(-int(level_w[reached_w].sum()) // int(reached_w.sum()))
    rows_p = filling.rows_p.copy()
    rows_p[slot_ew[is_held_ew]] = rows_ew[is_held_ew]
    return Filling(rows_p, target, filling.sweeps)


def prove(load_e: np.ndarray, row_p: np.ndarray, num_devices: int) -> Proof:
    """Return the devices and experts that prove how full the fullest device must be.

    `fill` has found a split with as few rows on the fullest device as possible. From it
    rows move on, from devices as full as that to devices with at least two rows less,
    until there is no path. The rows of the devices that are then reached cannot leave
    them: the experts that have rows there have no replica elsewhere.
    """
    filling = fill(load_e, row_p, num_devices)
    level_w, slot_ew = filling.level_w(num_devices), find_slots(row_p, num_devices)
    is_held_ew = slot_ew != EMPTY
    rows_ew = np.where(is_held_ew, filling.rows_p[slot_ew], 0)
    reached_w = None
    while reached_w is None:
        reached_w = relieve(rows_ew, is_held_ew, level_w, filling.bound - 1)
    is_inside_e = rows_ew[:, reached_w].any(axis=1)
    return Proof(
        np.flatnonzero(reached_w),
        np.flatnonzero(is_inside_e),
        int(level_w[reached_w].sum()),
    )


def relieve(
    rows_ew: np.ndarray, is_held_ew: np.ndarray, level_w: np.ndarray, target: int
) -> np.ndarray | None:
    """Move rows along a shortest path from a device above the target to one below it,
    in place, and return None. Where there is no path, return whether each device was
    reached, bool [w]."""
    hops_w = _count_hops(rows_ew, is_held_ew, level_w, target)
    is_reached_w = hops_w < len(level_w)
    is_end_w = is_reached_w & (level_w < target)
    if not is_end_w.any():
        return is_reached_w
    end = is_end_w.argmax()
    expert_x, path = _trace_path(rows_ew, is_held_ew, hops_w, end)
    available_x = rows_ew[expert_x, path[1:]]
    room = min(level_w[path[-1]] - target, target - level_w[end])
    moved = min(room, available_x.min())
    rows_ew[expert_x, path[1:]] -= moved
    rows_ew[expert_x, path[:-1]] += moved
    level_w[[path[-1], end]] += [-moved, moved]
    return None


def _experts(load_e: np.ndarray, row_p: np.ndarray, num_devices: int) -> list[Expert]:
    """Return the experts in the order in which a sweep visits them: by color, after
    those on a single device, which have no color."""
    slots_per_device = len(row_p) // num_devices
    color_p = edge_coloring(row_p, num_devices).tolist()
    experts = {}
    for slot, expert in enumerate(row_p.tolist()):
        _, slots, devices = experts.setdefault(
            expert, Expert(int(load_e[expert]), [], [])
        )
        device = slot // slots_per_device
        if device not in devices:
            slots.append(slot)
            devices.append(device)
    experts.pop(EMPTY, None)
    return sorted(experts.values(), key=lambda expert: color_p[expert.slots[0]])


def _split_evenly(experts: list[Expert], num_slots: int) -> list[int]:
    """Return the rows of each slot if every replica gets an equal share of its expert.
    The first replicas get the remainder."""
    rows = [0] * num_slots
    for load, slots, _ in experts:
        share, left = divmod(load, len(slots))
        for r, slot in enumerate(slots):
            rows[slot] = share + (r < left)
    return rows


def find_slots(row_p: np.ndarray, num_devices: int) -> np.ndarray:
    """Return each expert's first slot on each device, or -1 for none, [e, w]."""
    slot_ew = np.full((row_p.max() + 1, num_devices), EMPTY)
    # Reversed: of several values for one element, NumPy keeps the last.
    slot_q = np.flatnonzero(row_p >= 0)[::-1]
    slot_ew[row_p[slot_q], slot_q // (len(row_p) // num_devices)] = slot_q
    return slot_ew


def _count_hops(
    rows_ew: np.ndarray, is_held_ew: np.ndarray, level_w: np.ndarray, target: int
) -> np.ndarray:
    """Return the minimum number of moves to each device from one above the target.

    The search ends at the distance of the nearest device below the target. Devices that
    it did not reach have w.
    """
    num_devices = len(level_w)
    hops_w = np.where(level_w > target, 0, num_devices)
    for hops in range(num_devices):
        can_give_e = (rows_ew[:, hops_w == hops] > 0).any(axis=1)
        is_new_w = is_held_ew[can_give_e].any(axis=0) & (hops_w == num_devices)
        hops_w[is_new_w] = hops + 1
        if not is_new_w.any() or level_w[is_new_w].min() < target:
            break
    return hops_w


def _trace_path(
    rows_ew: np.ndarray, is_held_ew: np.ndarray, hops_w: np.ndarray, end: int
) -> tuple[list[int], list[int]]:
    """Return a shortest path from a device above the target to the device `end`: the
    expert of each move, and the devices, both from the end back to the source."""
    experts, path = [], [int(end)]
    for hops in reversed(range(hops_w[end])):
        can_give_ew = (rows_ew > 0) & (hops_w == hops)
        expert = int((can_give_ew.any(axis=1) & is_held_ew[:, path[-1]]).argmax())
        experts.append(expert)
        path.append(int(can_give_ew[expert].argmax()))
    return experts, path
