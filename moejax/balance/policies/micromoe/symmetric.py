"""Symmetric plans, for loads that are not known yet: Cayley graphs of the devices.

Devices are vertices, an expert with two replicas is an edge (with more, a hyperedge).
In a Cayley graph all devices look alike: expert j of device v has replicas on v and on
v + shift for each shift of shifts[j], where + is the addition of a cyclic group.

    ring            8 devices,  8 experts    shifts {1} in Z8
    K4,4            8 devices, 16 experts    shifts {1}, {3} in Z8
    K8 + matching   8 devices, 32 experts    shifts {1}, {2}, {3}, {4} in Z8

`symmetric` finds shifts for any sizes. Each device holds its own experts in its first
slots, and their replicas elsewhere are copies. Slots are int32 [p]. Source: MicroMoE,
arXiv 2511.16947, section 6.
"""

import functools
import itertools
from collections.abc import Sequence

import numpy as np


def cayley(num_devices: int, shifts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the expert of each slot [p], for replicas placed as a Cayley graph of a
    cyclic group.

    `shifts[j]` lead from each owner of an expert j to its other replicas; they differ
    from one another and from 0, modulo the number of devices.
    """
    own, device_w = len(shifts), np.arange(num_devices)
    columns = [np.arange(num_devices * own).reshape(num_devices, own)]
    for j, expert_shifts in enumerate(shifts):
        for shift in expert_shifts:
            source_w = (device_w - shift) % num_devices
            columns.append((source_w * own + j)[:, None])
    return np.concatenate(columns, axis=1).astype(np.int32).reshape(-1)


def symmetric(
    num_experts: int,
    num_devices: int,
    slots_per_device: int,
    num_offered: int | None = None,
) -> np.ndarray:
    """Return the slots [p] of a Cayley graph of the cyclic group of w devices.

    Every slot is filled, no expert is twice on a device, the numbers of replicas differ
    by one at most, and few experts share a pair of devices. With `num_offered`, only
    this number of a device's own experts have copies. Raises ValueError unless the
    devices divide the experts, and where there are too few or too many slots.
    """
    if num_devices < 1 or num_experts % num_devices:
        raise ValueError(
            f"num_experts={num_experts} must be divisible by the devices of the group "
            f"({num_devices}), so that each owns as many"
        )
    own = num_experts // num_devices
    offered = own if num_offered is None else num_offered
    spare = slots_per_device - own
    if spare < 0:
        raise ValueError(
            f"{num_devices} x {slots_per_device} slots hold fewer than "
            f"num_experts={num_experts}: raise slots_per_device to at least {own}"
        )
    if spare > offered * (num_devices - 1):
        raise ValueError(
            f"slots_per_device={slots_per_device} gives an expert more replicas than "
            f"the group has devices ({num_devices}): use at most "
            f"{own + offered * (num_devices - 1)}"
        )
    shifts = _shifts(num_devices, offered, spare)
    return cayley(num_devices, shifts + [[]] * (own - offered))


@functools.cache
def _shifts(num_devices: int, num_offered: int, spare: int) -> list[list[int]]:
    """Return the shifts of each of a device's own experts.

    The copies are dealt out over the experts. Then each shift in turn is replaced by
    the one that makes the graph the best expander, until no shift changes.
    """
    dealt = [(spare - j + num_offered - 1) // num_offered for j in range(num_offered)]
    shifts = [[] for _ in dealt]
    places = [(j, i) for i in range(max(dealt, default=0)) for j in range(num_offered)]
    places = [(j, i) for j, i in places if i < dealt[j]]
    for j, _ in places:
        shifts[j].append(_best_shift(num_devices, shifts, j))
    while True:
        before = [list(expert_shifts) for expert_shifts in shifts]
        for j, i in places:
            current = shifts[j].pop(i)
            shifts[j].insert(i, _best_shift(num_devices, shifts, j, current))
        if shifts == before:
            return shifts


def _best_shift(
    num_devices: int, shifts: list[list[int]], j: int, current: int | None = None
) -> int:
    """Return the best shift for one more replica of expert j.

    The best one has the smallest second largest eigenvalue of the graph in which an
    expert joins each pair of its devices; a dense small set makes this eigenvalue
    large. A tie goes to the graph with the fewest experts that share pairs. `current`
    wins unless another is better. In a cyclic group the eigenvalues are a Fourier
    transform.
    """
    free = [x for x in range(1, num_devices) if x not in shifts[j]]
    joined_d = np.zeros(num_devices)
    for expert_shifts in shifts:
        for a, b in itertools.permutations([0, *expert_shifts], 2):
            joined_d[(a - b) % num_devices] += 1
    joined_xd = np.tile(joined_d, (len(free), 1))
    for row_d, x in zip(joined_xd, free):
        for a in (0, *shifts[j]):
            row_d[(x - a) % num_devices] += 1
            row_d[(a - x) % num_devices] += 1
    second_x = np.fft.fft(joined_xd).real[:, 1:].max(axis=1)
    cost_x = np.round(second_x, 6) + 1e-4 * (joined_xd**2).sum(axis=1)
    if current is not None and cost_x[free.index(current)] <= cost_x.min():
        return current
    return free[int(cost_x.argmin())]
