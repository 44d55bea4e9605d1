"""How even an exact split can make a plan: its densest set of devices, in NumPy.

A set of devices must compute all rows of the experts whose replicas all lie inside it.
The fullest such set, per device, is what no split can go below and what the best split
reaches (MicroMoE, arXiv 2511.16947, Eq. 3):

    max over sets D of (rows of the experts with all replicas in D) / |D|

With whole rows the best split's fullest device has exactly the ceiling of that.

    up to 16 devices    sums over all 2^w sets (a zeta transform)
    more                rows are moved along paths until the reached set is the proof
"""

import collections
import functools
from typing import NamedTuple

import numpy as np

MAX_DEVICES = 16
"""Of which all sets are looked at: 2^16 sums take a third of a millisecond."""
NUM_SWEEPS = 8
"""Of water-filling before the search for paths, which are then few."""
EXACT = 1e-12
"""Rows that count as none, over all rows; a larger density must exceed by as much."""


class Densest(NamedTuple):
    """The densest set of devices and what it must compute."""

    rows: float
    """Rows of all experts that lie inside."""
    is_in_w: np.ndarray

    @property
    def rows_per_device(self) -> float:
        return self.rows / int(self.is_in_w.sum())


def density(row_p: np.ndarray, load_e: np.ndarray, num_devices: int) -> float:
    """Rows of the fullest device under the best split of `load_e`: its optimum, exact
    but for floating point. Two replicas of an expert on one device count once."""
    return densest(row_p, load_e, num_devices).rows_per_device


def densest(row_p: np.ndarray, load_e: np.ndarray, num_devices: int) -> Densest:
    """The set that `density` is of; `row_p` has -1 in empty slots, and every expert
    with load has a slot."""
    load_e = np.asarray(load_e, float)
    held_we = device_holds(row_p, len(load_e), num_devices)
    if num_devices <= MAX_DEVICES:
        return _of_all_sets(held_we, load_e)
    return _by_paths(held_we, load_e)


def device_holds(row_p: np.ndarray, num_experts: int, num_devices: int) -> np.ndarray:
    """Whether a device holds an expert: bool [w, e]."""
    held_we = np.zeros((num_devices, num_experts), bool)
    slot_p = np.flatnonzero(row_p >= 0)
    held_we[slot_p // (len(row_p) // num_devices), row_p[slot_p]] = True
    return held_we


def subset_sums(held_we: np.ndarray, value_e: np.ndarray) -> np.ndarray:
    """Sum of the values of the experts that lie inside each set of devices, [2^w]: bit
    i of a set's number is device i.

    A device's step adds to all sets with it those without it. The steps of one half of
    the devices, then, transposed, of the other: rows are never shorter than 2^(w/2)."""
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
    """A set about as dense as the densest, bool [w]: after some water-filling, the
    densest of the sets of the k fullest devices."""
    flow = _filled(held_we, load_e)
    order = np.argsort(-np.array(flow.rows_w), kind="stable")
    rank_w = np.empty(len(order), int)
    rank_w[order] = np.arange(len(order))
    last_e = np.where(held_we, rank_w[:, None], -1).max(axis=0)
    rows_k = np.cumsum(np.bincount(last_e, load_e, len(order)))
    return rank_w <= np.argmax(rows_k / np.arange(1, len(order) + 1))


@functools.cache
def set_sizes(num_devices: int) -> np.ndarray:
    """Devices in each set, float32 [2^w]; infinite for the empty one."""
    size_d = np.zeros(1, np.float32)
    for _ in range(num_devices):
        size_d = np.concatenate([size_d, size_d + 1])
    size_d[0] = np.inf
    size_d.flags.writeable = False
    return size_d


def in_sets(set_x: np.ndarray, num_devices: int) -> np.ndarray:
    """The devices of sets given by number: bool [x, w]."""
    return (set_x[:, None] >> np.arange(num_devices)) & 1 == 1


def _add_subsets(sums: np.ndarray, begin: int, end: int) -> None:
    for bit in range(begin, end):
        half = sums.reshape(-1, 2, 1 << bit)
        half[:, 1] += half[:, 0]


def _of_all_sets(held_we: np.ndarray, load_e: np.ndarray) -> Densest:
    rows_d = subset_sums(held_we, load_e)
    best = 1 + np.argmax(rows_d[1:] / set_sizes(len(held_we))[1:])
    return Densest(float(rows_d[best]), in_sets(best[None], len(held_we))[0])


def _by_paths(held_we: np.ndarray, load_e: np.ndarray) -> Densest:
    """Newton's steps on the target: from devices above it rows go along shortest paths
    to devices below it; where none leads on, the reached set is denser than the target,
    and is the next one. At the last, no device is above it."""
    flow = _filled(held_we, load_e)
    least = EXACT * float(load_e.sum())
    best = inside(held_we, load_e, np.ones(len(held_we), bool))
    while (reached_w := _drain(flow, best.rows_per_device, least)) is not None:
        denser = inside(held_we, load_e, reached_w)
        if denser.rows_per_device <= best.rows_per_device + least:
            break
        best = denser
    return best


def inside(held_we: np.ndarray, load_e: np.ndarray, is_in_w: np.ndarray) -> Densest:
    """What that set of devices must compute."""
    return Densest(float(load_e[~held_we[~is_in_w].any(axis=0)].sum()), is_in_w)


class Flow(NamedTuple):
    """Rows of each expert on each of its devices, changed in place; in plain lists, for
    with two or three replicas an expert they are quicker than arrays."""

    load: list[float]
    rows_w: list[float]
    split: list[int]
    """Experts with rows and more than one device; the others stay where they are."""
    devices: dict[int, list[int]]
    rows: dict[int, list[float]]


def _even(held_we: np.ndarray, load_e: np.ndarray) -> Flow:
    """Every device of an expert has an equal share."""
    replicas_e = held_we.sum(axis=0)
    share_e = load_e / np.maximum(replicas_e, 1)
    split = np.flatnonzero((replicas_e > 1) & (load_e > 0)).tolist()
    devices = {e: np.flatnonzero(held_we[:, e]).tolist() for e in split}
    rows = {e: [float(share_e[e])] * len(devices[e]) for e in split}
    return Flow(load_e.tolist(), (held_we @ share_e).tolist(), split, devices, rows)


def _filled(held_we: np.ndarray, load_e: np.ndarray) -> Flow:
    """After some sweeps of water-filling: each expert in turn to the common level of
    its devices."""
    flow = _even(held_we, load_e)
    rows_w = flow.rows_w
    for e in flow.split * NUM_SWEEPS:
        devices, rows = flow.devices[e], flow.rows[e]
        other = [rows_w[w] - x for w, x in zip(devices, rows)]
        filled, level = flow.load[e], 0.0
        for count, height in enumerate(sorted(other)):
            if count and filled <= count * height:
                break
            filled += height
            level = filled / (count + 1)
        for i, (w, height) in enumerate(zip(devices, other)):
            x = level - height
            rows[i], rows_w[w] = (x, level) if x > 0 else (0.0, height)
    return flow


def _drain(flow: Flow, target: float, least: float) -> np.ndarray | None:
    """Moves rows until no device is above `target`: None; or the devices reached from
    those that are, where no path leads to one below it."""
    while True:
        full = [w for w, rows in enumerate(flow.rows_w) if rows > target + least]
        if not full:
            return None
        came, end = _shortest_path(flow, full, target, least)
        if end is None:
            is_reached_w = np.zeros(len(flow.rows_w), bool)
            is_reached_w[list(came)] = True
            return is_reached_w
        _push(flow, came, end, target)


def _shortest_path(flow: Flow, full: list[int], target: float, least: float):
    """How each reached device was come by - (expert, index from, index to) - and the
    first one below the target, if there is one."""
    device_holds = collections.defaultdict(list)
    for e in flow.split:
        for i, w in enumerate(flow.devices[e]):
            if flow.rows[e][i] > least:
                device_holds[w].append((e, i))
    came = dict.fromkeys(full)
    queue = collections.deque(full)
    while queue:
        for e, i in device_holds[queue.popleft()]:
            for j, to in enumerate(flow.devices[e]):
                if to not in came:
                    came[to] = (e, i, j)
                    if flow.rows_w[to] < target - least:
                        return came, to
                    queue.append(to)
    return came, None


def _push(flow: Flow, came: dict, end: int, target: float) -> None:
    """As many rows along the path as its ends and its experts have."""
    steps, at = [], end
    while came[at] is not None:
        steps.append(came[at])
        e, i, _ = came[at]
        at = flow.devices[e][i]
    amount = min(flow.rows_w[at] - target, target - flow.rows_w[end])
    amount = min(amount, *(flow.rows[e][i] for e, i, _ in steps))
    for e, i, j in steps:
        flow.rows[e][i] -= amount
        flow.rows[e][j] += amount
    flow.rows_w[at] -= amount
    flow.rows_w[end] += amount
