"""Symmetric plans, for loads that are not known yet: Cayley graphs of the devices.

Devices are vertices, an expert with two replicas is an edge (with more, a hyperedge).
In a Cayley graph all devices look alike: expert j of device v has replicas on v and on
v + shift for each shift of shifts[j], where + is the addition of a cyclic group or of a
product of cyclic groups.

    ring            8 devices,  8 experts    shifts {1} in Z8
    torus           16 devices, 32 experts   shifts {(0, 1)}, {(1, 0)} in Z4 x Z4
    K4,4            8 devices, 16 experts    shifts {1}, {3} in Z8
    K8 + matching   8 devices, 32 experts    shifts {1}, {2}, {3}, {4} in Z8

`symmetric` finds shifts for any sizes. Each device holds its own experts in its first
slots, and their replicas elsewhere are copies. Slots are int32 [p]. Source: MicroMoE,
arXiv 2511.16947, section 6.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

Shift = tuple[int, ...]
"""Element of a product of cyclic groups: the distance from an owner to a replica."""


def cayley(group: Sequence[int], shifts: Sequence[Sequence[Shift]]) -> np.ndarray:
    """Return the expert of each slot [p], for replicas placed as a Cayley graph of a
    product of cyclic groups.

    `group` has the orders of the cyclic groups, the last of which varies fastest over
    devices. `shifts[j]` lead from each owner of an expert j to its other replicas.
    Raises ValueError for shifts that put an expert on a device twice.
    """
    num_devices, own = math.prod(group), len(shifts)
    device_wg = np.array(list(itertools.product(*map(range, group))))
    columns = [np.arange(num_devices * own).reshape(num_devices, own)]
    for j, expert_shifts in enumerate(shifts):
        residues = {
            tuple(x % n for x, n in zip(shift, group)) for shift in expert_shifts
        }
        if len(residues) < len(expert_shifts) or (0,) * len(group) in residues:
            raise ValueError(
                f"shifts of expert {j} put it twice on a device: {list(expert_shifts)} "
                f"must differ from each other and from 0, modulo {list(group)}"
            )
        for shift in expert_shifts:
            source_wg = ((device_wg - shift) % group).T
            source_w = np.ravel_multi_index(tuple(source_wg), group)
            columns.append((source_w * own + j)[:, None])
    return np.concatenate(columns, axis=1).astype(np.int32).reshape(-1)


def ring(num_devices: int) -> np.ndarray:
    """Return the slots [p] of one expert per device, each on its owner and the next
    device."""
    return cayley((num_devices,), [[(1,)]])


def torus(num_rows: int, num_columns: int) -> np.ndarray:
    """Return the expert of each slot [p] on a torus of devices: each owns two experts,
    and shares one with the device to its right and one with the device below."""
    return cayley((num_rows, num_columns), [[(0, 1)], [(1, 0)]])


def complete_bipartite(num_devices: int) -> np.ndarray:
    """Return the slots [p] of one expert for each pair of an even and an odd device.

    With 8 devices that is K4,4. Raises ValueError unless the number of devices is a
    multiple of 4.
    """
    if num_devices % 4:
        raise ValueError(
            f"num_devices={num_devices} must be a multiple of 4, so that each device "
            f"owns as many pairs: use {num_devices // 4 * 4 + 4}"
        )
    return cayley((num_devices,), [[(d,)] for d in range(1, num_devices // 2, 2)])


def complete_with_matching(num_devices: int) -> np.ndarray:
    """Return the slots [p] of one expert for each pair of devices, and one more for
    each opposite pair.

    Raises ValueError unless the number of devices is even.
    """
    if num_devices % 2:
        raise ValueError(
            f"num_devices={num_devices} must be even, for a matching of all devices: "
            f"use {num_devices + 1}"
        )
    return cayley((num_devices,), [[(d,)] for d in range(1, num_devices // 2 + 1)])


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
    shifts = [
        [(x,) for x in expert_shifts]
        for expert_shifts in _shifts(num_devices, offered, spare)
    ]
    return cayley((num_devices,), shifts + [[]] * (own - offered))


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
