"""Water-filling in NumPy: rows of each replica such that the fullest device has as few
as can be (MicroMoE, arXiv 2511.16947), in whole numbers, with a proof.

An expert's rows are poured over its replicas as water finds its level. Sweeps do so for
one expert after the other, color by color (moejax.plan.edge_coloring). Rows are then
moved along paths of devices until the fullest has no more than the certificate says.

    device          0        1        2
    slot p        0   1    2   3    4   5
    expert        0   -    1   0    2   1        loads 6, 4, 2: 12 rows, 4 a device
    even          3        2   3    2   2
    poured        4        2   2    2   2

`fill` gives the rows of each slot: `swept`, then `augmented`. It is the definition:
what a device runs, moejax.kernels.water_fill (sweeps) and
moejax.moe.split.water_filling (all of it), must give the same bits.
"""

import itertools
from typing import NamedTuple

import numpy as np

from moejax.plan.edge_coloring import edge_coloring
from moejax.plan.expert_plan import EMPTY

MAX_SWEEPS = 16
PATHS_PER_DEVICE = 8
"""How often rows move along paths before the bound is left as it is."""
TOLERANCE_BITS = 9
"""In a step the fullest device may have mean >> 9 rows more than the bound: 0.2 %."""


class Filling(NamedTuple):
    """Rows of each slot, and how few the fullest device could have."""

    rows_p: np.ndarray
    bound: int
    """Certificate: under no split has the fullest device fewer rows."""
    sweeps: int

    def level_w(self, num_devices: int) -> np.ndarray:
        """Rows of each device."""
        return self.rows_p.reshape(num_devices, -1).sum(axis=1)


class Expert(NamedTuple):
    """Load, and the slots that may have some of it with their devices, in order."""

    load: int
    slots: list[int]
    devices: list[int]


def split_tolerance(total: int, num_devices: int) -> int:
    """Rows over its certificate that a training step accepts: 1/512 of the mean."""
    return -(-int(total) // num_devices) >> TOLERANCE_BITS


def fill(
    load_e: np.ndarray,
    row_p: np.ndarray,
    num_devices: int,
    tolerance: int = 0,
    max_sweeps: int = MAX_SWEEPS,
) -> Filling:
    """Rows of each slot, int [p], of whole loads, summed over sources. Every expert
    with load has a slot; of two on one device the second gets nothing.

    The fullest device has at most `bound + tolerance` rows, so with tolerance 0 the
    ceiling of the linear program's optimum; more only where 8 w paths were not enough.
    """
    filling = swept(load_e, row_p, num_devices, tolerance, max_sweeps)
    return augmented(filling, row_p, num_devices, tolerance)


def swept(
    load_e: np.ndarray,
    row_p: np.ndarray,
    num_devices: int,
    tolerance: int = 0,
    max_sweeps: int = MAX_SWEEPS,
) -> Filling:
    """`fill` without paths. It begins with the even split, whose left-over rows go to
    the first replicas, and ends when the fullest device is within `tolerance` of the
    certificate, a sweep changed nothing, or after `max_sweeps`."""
    experts = _experts(load_e, row_p, num_devices)
    rows = _even(experts, len(row_p))
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
    """`load` rows on top of `ground`, one expert's devices without it: the least sum of
    squares. Left-over rows go to devices under the surface, the first ones first."""
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
    """max over k of ceil(rows of experts that only the k fullest devices have / k). Of
    equally full devices the first counts as fuller."""
    order = sorted(range(len(level)), key=lambda w: -level[w])
    rank = sorted(range(len(level)), key=order.__getitem__)
    inside = [0] * len(level)
    for load, _, devices in experts:
        inside[max(rank[w] for w in devices)] += load
    return max(-(-x // k) for k, x in enumerate(itertools.accumulate(inside), 1))


def augmented(
    filling: Filling, row_p: np.ndarray, num_devices: int, tolerance: int = 0
) -> Filling:
    """`filling` with rows moved along shortest paths, each from a device over the
    target to one under it. The target begins at `bound`. Where no path is left, the
    devices reached hold nothing that could go elsewhere: their mean, rounded up, is the
    next target. No more than 8 w times.

    Where several paths are shortest: the lowest device under the target, and from there
    backwards the lowest expert and the lowest device that can give of it.
    """
    level_w, target = filling.level_w(num_devices), filling.bound
    slot_ew = _slots(row_p, num_devices)
    held_ew = slot_ew != EMPTY
    rows_ew = np.where(held_ew, filling.rows_p[slot_ew], 0)
    for _ in range(PATHS_PER_DEVICE * num_devices):
        if level_w.max() <= target + tolerance:
            break
        hops_w = _hops(rows_ew, held_ew, level_w, target)
        is_end_w = (hops_w < num_devices) & (level_w < target)
        if not is_end_w.any():
            reached_w = level_w[hops_w < num_devices]
            target = -(-int(reached_w.sum()) // len(reached_w))
            continue
        end = is_end_w.argmax()
        expert_x, path = _path(rows_ew, held_ew, hops_w, end)
        given_x = rows_ew[expert_x, path[1:]]
        room = min(level_w[path[-1]] - target, target - level_w[end])
        moved = min(room, given_x.min())
        rows_ew[expert_x, path[1:]] -= moved
        rows_ew[expert_x, path[:-1]] += moved
        level_w[[path[-1], end]] += [-moved, moved]
    rows_p = filling.rows_p.copy()
    rows_p[slot_ew[held_ew]] = rows_ew[held_ew]
    return Filling(rows_p, target, filling.sweeps)


def _experts(load_e: np.ndarray, row_p: np.ndarray, num_devices: int) -> list[Expert]:
    """In the order of visits: by color. Those without a choice come first."""
    slots_per_device = len(row_p) // num_devices
    color_p = edge_coloring(row_p, num_devices).tolist()
    found = {}
    for slot, expert in enumerate(row_p.tolist()):
        _, slots, devices = found.setdefault(
            expert, Expert(int(load_e[expert]), [], [])
        )
        device = slot // slots_per_device
        if device not in devices:
            slots.append(slot)
            devices.append(device)
    found.pop(EMPTY, None)
    return sorted(found.values(), key=lambda expert: color_p[expert.slots[0]])


def _even(experts: list[Expert], num_slots: int) -> list[int]:
    rows = [0] * num_slots
    for load, slots, _ in experts:
        share, left = divmod(load, len(slots))
        for r, slot in enumerate(slots):
            rows[slot] = share + (r < left)
    return rows


def _slots(row_p: np.ndarray, num_devices: int) -> np.ndarray:
    """An expert's first slot on each device, -1 for none: [e, w]."""
    slot_ew = np.full((row_p.max() + 1, num_devices), EMPTY)
    slot_q = np.flatnonzero(row_p >= 0)[::-1]  # of equal places the last is kept
    slot_ew[row_p[slot_q], slot_q // (len(row_p) // num_devices)] = slot_q
    return slot_ew


def _hops(
    rows_ew: np.ndarray, held_ew: np.ndarray, level_w: np.ndarray, target: int
) -> np.ndarray:
    """How many moves lead to each device from one over the target, as far as the
    nearest under it; w where none do."""
    num_devices = len(level_w)
    hops_w = np.where(level_w > target, 0, num_devices)
    for hops in range(num_devices):
        gives_e = (rows_ew[:, hops_w == hops] > 0).any(axis=1)
        is_new_w = held_ew[gives_e].any(axis=0) & (hops_w == num_devices)
        hops_w[is_new_w] = hops + 1
        if not is_new_w.any() or level_w[is_new_w].min() < target:
            break
    return hops_w


def _path(
    rows_ew: np.ndarray, held_ew: np.ndarray, hops_w: np.ndarray, end: int
) -> tuple[list[int], list[int]]:
    """Devices from the end back to the source, and the expert of each move."""
    experts, path = [], [int(end)]
    for hops in reversed(range(hops_w[end])):
        gives_ew = (rows_ew > 0) & (hops_w == hops)
        expert = int((gives_ew.any(axis=1) & held_ew[:, path[-1]]).argmax())
        experts.append(expert)
        path.append(int(gives_ew[expert].argmax()))
    return experts, path
