"""Density of a plan, the load of the fullest device under the best split, in NumPy.

A set of devices must compute all rows of the experts whose replicas all lie inside it.
The rows per device of the densest set are therefore a lower bound on the load of the
fullest device, and the best split reaches it (MicroMoE, arXiv 2511.16947, Eq. 3):

    max over sets D of (rows of the experts with all replicas in D) / |D|

With whole rows the fullest device of the best split has exactly the ceiling of that.

    up to 16 devices    sums over all 2^w sets (a zeta transform)
    more                rows are moved along paths until the set of the devices that are
                        reached proves the bound
"""

import collections
import functools
from typing import NamedTuple

import numpy as np

MAX_DEVICES = 16
"""Largest number of devices of which all sets are looked at: 2^16 sums take a third of
a millisecond."""
NUM_SWEEPS = 8
"""Number of sweeps of water-filling before the search for paths, which then finds few.
"""
EXACT = 1e-12
"""Share of all rows below which rows count as none and densities as equal."""


class Densest(NamedTuple):
    """Densest set of devices, and the rows that it must compute."""

    rows: float
    """Rows of all experts whose replicas all lie inside the set."""
    is_in_w: np.ndarray
    """Whether each device is in the set."""

    @property
    def rows_per_device(self) -> float:
        """Density of the set."""
        return self.rows / int(self.is_in_w.sum())


def density(row_p: np.ndarray, load_e: np.ndarray, num_devices: int) -> float:
    """Return the rows of the fullest device under the best split of `load_e`.

    The result is exact but for floating point. Two replicas of an expert on one device
    count once.
    """
    return densest(row_p, load_e, num_devices).rows_per_device


def densest(row_p: np.ndarray, load_e: np.ndarray, num_devices: int) -> Densest:
    """Return the densest set of devices, whose density is `density`.

    `row_p` has -1 in empty slots, and every expert with load has a slot.
    """
    load_e = np.asarray(load_e, float)
    held_we = device_holds(row_p, len(load_e), num_devices)
    if num_devices <= MAX_DEVICES:
        return _search_all_sets(held_we, load_e)
    return _search_by_paths(held_we, load_e)


def device_holds(row_p: np.ndarray, num_experts: int, num_devices: int) -> np.ndarray:
    """Return whether each device holds each expert, bool [w, e]."""
    held_we = np.zeros((num_devices, num_experts), bool)
    slot_p = np.flatnonzero(row_p >= 0)
    held_we[slot_p // (len(row_p) // num_devices), row_p[slot_p]] = True
    return held_we


def subset_sums(held_we: np.ndarray, value_e: np.ndarray) -> np.ndarray:
    """Return the sum of the values of the experts inside each set of devices, [2^w].

    Bit i of a set's number is device i. The step of a device adds to the sum of each
    set with the device that of the set without it. The steps of one half of the devices
    are made first, then, on the transposed array, those of the other half, so that rows
    are never shorter than 2^(w/2).
    """
    num_devices = len(held_we)
    first = num_devices // 2
    second = num_devices - first
    bit_w = 1 << (np.arange(num_devices) + second) % num_devices
    sums = np.bincount(bit_w @ held_we, value_e, 1 << num_devices)
    sums = sums.astype(value_e.dtype)
    _add_subsets(sums, second, num_devices)
    sums = np.ascontiguousarray(sums.reshape(1 << first, 1 << second).T).reshape(-1)
    _add_subsets(sums, first, num_devices)
    return sums


def dense_prefix(held_we: np.ndarray, load_e: np.ndarray) -> np.ndarray:
    """Return a set about as dense as the densest one, bool [w].

    It is the densest of the sets of the k fullest devices after some water-filling.
    """
    flow = _water_fill(held_we, load_e)
    order = np.argsort(-np.array(flow.rows_w), kind="stable")
    rank_w = np.empty(len(order), int)
    rank_w[order] = np.arange(len(order))
    last_e = np.where(held_we, rank_w[:, None], -1).max(axis=0)
    rows_k = np.cumsum(np.bincount(last_e, load_e, len(order)))
    return rank_w <= np.argmax(rows_k / np.arange(1, len(order) + 1))


@functools.cache
def set_sizes(num_devices: int) -> np.ndarray:
    """Return the number of devices in each set, float32 [2^w], and infinity for the
    empty set."""
    size_d = np.zeros(1, np.float32)
    for _ in range(num_devices):
        size_d = np.concatenate([size_d, size_d + 1])
    size_d[0] = np.inf
    size_d.flags.writeable = False
    return size_d


def in_sets(set_x: np.ndarray, num_devices: int) -> np.ndarray:
    """Return whether each device is in each set, bool [x, w]. Sets are given by
    numbers: bit w of a set's number says whether it has device w."""
    return (set_x[:, None] >> np.arange(num_devices)) & 1 == 1


def _add_subsets(sums: np.ndarray, begin: int, end: int) -> None:
    """Make the steps of devices begin .. end - 1 of a zeta transform (sums over all
    subsets), in place."""
    for bit in range(begin, end):
        half = sums.reshape(-1, 2, 1 << bit)
        half[:, 1] += half[:, 0]


def _search_all_sets(held_we: np.ndarray, load_e: np.ndarray) -> Densest:
    """Return the densest set of devices, by computing the density of every set."""
    rows_d = subset_sums(held_we, load_e)
    best = 1 + np.argmax(rows_d[1:] / set_sizes(len(held_we))[1:])
    return Densest(float(rows_d[best]), in_sets(best[None], len(held_we))[0])


def _search_by_paths(held_we: np.ndarray, load_e: np.ndarray) -> Densest:
    """Return the densest set of devices, by Newton's method on a target load of the
    devices.

    Rows move along shortest paths from devices above the target to devices below it.
    Where no path leads on, the set of the reached devices is denser than the target,
    and its density is the next target. At the end no device is above the target.
    """
    flow = _water_fill(held_we, load_e)
    tolerance = EXACT * float(load_e.sum())
    best = inside(held_we, load_e, np.ones(len(held_we), bool))
    while (reached_w := _drain(flow, best.rows_per_device, tolerance)) is not None:
        denser = inside(held_we, load_e, reached_w)
        if denser.rows_per_device <= best.rows_per_device + tolerance:
            break
        best = denser
    return best


def inside(held_we: np.ndarray, load_e: np.ndarray, is_in_w: np.ndarray) -> Densest:
    """Return a set of devices with the rows that it must compute."""
    return Densest(float(load_e[~held_we[~is_in_w].any(axis=0)].sum()), is_in_w)


class Flow(NamedTuple):
    """Rows of each expert on each of its devices, which change in place.

    With two or three replicas per expert plain lists are quicker than arrays.
    """

    load: list[float]
    """Rows of each expert."""
    rows_w: list[float]
    """Rows of each device."""
    split: list[int]
    """Experts with rows and more than one device; the rows of others never move."""
    devices: dict[int, list[int]]
    """Devices of each split expert."""
    rows: dict[int, list[float]]
    """Rows of each split expert on each of its devices."""


def _split_evenly(held_we: np.ndarray, load_e: np.ndarray) -> Flow:
    """Return the flow in which the devices of an expert have equal shares of it."""
    replicas_e = held_we.sum(axis=0)
    share_e = load_e / np.maximum(replicas_e, 1)
    split = np.flatnonzero((replicas_e > 1) & (load_e > 0)).tolist()
    devices = {e: [] for e in split}
    index_n, device_n = (x.tolist() for x in held_we[:, split].T.nonzero())
    for index, device in zip(index_n, device_n):
        devices[split[index]].append(device)
    rows = {e: [float(share_e[e])] * len(devices[e]) for e in split}
    return Flow(load_e.tolist(), (held_we @ share_e).tolist(), split, devices, rows)


def _water_fill(held_we: np.ndarray, load_e: np.ndarray) -> Flow:
    """Return the flow after some sweeps of water-filling.

    Water-filling divides one expert after the other so that its devices reach a common
    level.
    """
    flow = _split_evenly(held_we, load_e)
    rows_w = flow.rows_w
    experts = [(flow.load[e], flow.devices[e], flow.rows[e]) for e in flow.split]
    for _ in range(NUM_SWEEPS):
        for load, devices, rows in experts:
            if len(devices) == 2:  # most experts: the same as below, but quicker
                a, b = devices
                at_a, at_b = rows_w[a] - rows[0], rows_w[b] - rows[1]
                low, high = (at_a, at_b) if at_a < at_b else (at_b, at_a)
                level = load + low
                if level > high:
                    level = (level + high) / 2
                x, y = level - at_a, level - at_b
                rows[0], rows_w[a] = (x, level) if x > 0 else (0.0, at_a)
                rows[1], rows_w[b] = (y, level) if y > 0 else (0.0, at_b)
                continue
            other = [rows_w[w] - x for w, x in zip(devices, rows)]
            filled, level = load, 0.0
            for count, height in enumerate(sorted(other)):
                if count and filled <= count * height:
                    break
                filled += height
                level = filled / (count + 1)
            for i, (w, height) in enumerate(zip(devices, other)):
                x = level - height
                rows[i], rows_w[w] = (x, level) if x > 0 else (0.0, height)
    return flow


def _drain(flow: Flow, target: float, tolerance: float) -> np.ndarray | None:
    """Move rows until no device is above `target`, and return None.

    Where no path leads from a device above the target to one below it, return the
    devices that paths lead to, bool [w].
    """
    while True:
        full = [w for w, rows in enumerate(flow.rows_w) if rows > target + tolerance]
        if not full:
            return None
        previous, end = _shortest_path(flow, full, target, tolerance)
        if end is None:
            is_reached_w = np.zeros(len(flow.rows_w), bool)
            is_reached_w[list(previous)] = True
            return is_reached_w
        _push(flow, previous, end, target)


def _shortest_path(flow: Flow, full: list[int], target: float, tolerance: float):
    """Return the last edge to each reached device, and the first device below the
    target, or None.

    An edge is an expert and the indices of two of its devices, from and to.
    """
    device_holds = collections.defaultdict(list)
    for e in flow.split:
        for i, w in enumerate(flow.devices[e]):
            if flow.rows[e][i] > tolerance:
                device_holds[w].append((e, i))
    previous = dict.fromkeys(full)
    queue = collections.deque(full)
    while queue:
        for e, i in device_holds[queue.popleft()]:
            for j, to in enumerate(flow.devices[e]):
                if to not in previous:
                    previous[to] = (e, i, j)
                    if flow.rows_w[to] < target - tolerance:
                        return previous, to
                    queue.append(to)
    return previous, None


def _push(flow: Flow, previous: dict, end: int, target: float) -> None:
    """Move as many rows along the path to `end` as its ends and its experts permit."""
    steps, at = [], end
    while previous[at] is not None:
        steps.append(previous[at])
        e, i, _ = previous[at]
        at = flow.devices[e][i]
    amount = min(flow.rows_w[at] - target, target - flow.rows_w[end])
    amount = min(amount, *(flow.rows[e][i] for e, i, _ in steps))
    for e, i, j in steps:
        flow.rows[e][i] -= amount
        flow.rows[e][j] += amount
    flow.rows_w[at] -= amount
    flow.rows_w[end] += amount
