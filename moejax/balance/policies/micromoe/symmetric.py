"""Symmetric plans, for loads that nobody knows yet: Cayley graphs of the devices.

Devices are vertices, an expert with two replicas is an edge (with more, a hyperedge).
In a Cayley graph all devices look alike: own expert j of device v has its replicas on v
and on v + each of shifts[j], added in a cyclic group or in a product of such.

    ring            8 devices,  8 experts    shifts {1} in Z8
    torus           16 devices, 32 experts   shifts {(0, 1)}, {(1, 0)} in Z4 x Z4
    K4,4            8 devices, 16 experts    shifts {1}, {3} in Z8
    K8 + matching   8 devices, 32 experts    shifts {1}, {2}, {3}, {4} in Z8

`symmetric` finds shifts for any sizes. Each device holds its own experts, in its first
slots, so that only their replicas elsewhere are copies. Slots are [p] int32.
Source: MicroMoE, arXiv 2511.16947, section 6.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

Shift = tuple[int, ...]


def cayley(group: Sequence[int], shifts: Sequence[Sequence[Shift]]) -> np.ndarray:
    """Slots [p] of the devices of a product of cyclic groups with these orders, the
    last one varying fastest; `shifts[j]` are those of each device's own expert j."""
    num_devices, own = math.prod(group), len(shifts)
    device_wg = np.array(list(itertools.product(*map(range, group))))
    columns = [np.arange(num_devices * own).reshape(num_devices, own)]
    for j, of_expert in enumerate(shifts):
        residues = {tuple(x % n for x, n in zip(shift, group)) for shift in of_expert}
        if len(residues) < len(of_expert) or (0,) * len(group) in residues:
            raise ValueError(
                f"shifts of expert {j} put it twice on a device: {list(of_expert)} "
                f"must differ from each other and from 0, modulo {list(group)}"
            )
        for shift in of_expert:
            source_wg = ((device_wg - shift) % group).T
            source_w = np.ravel_multi_index(tuple(source_wg), group)
            columns.append((source_w * own + j)[:, None])
    return np.concatenate(columns, axis=1).astype(np.int32).reshape(-1)


def ring(num_devices: int) -> np.ndarray:
    """As many experts as devices, each on its own and on the next."""
    return cayley((num_devices,), [[(1,)]])


def torus(num_rows: int, num_columns: int) -> np.ndarray:
    """Two experts a device, one shared with the device to the right, one with that
    below."""
    return cayley((num_rows, num_columns), [[(0, 1)], [(1, 0)]])


def complete_bipartite(num_devices: int) -> np.ndarray:
    """An expert for each pair of an even and an odd device: K4,4 of 8 devices."""
    if num_devices % 4:
        raise ValueError(
            f"num_devices={num_devices} must be a multiple of 4, for each device to "
            f"own as many pairs: use {num_devices // 4 * 4 + 4}"
        )
    return cayley((num_devices,), [[(d,)] for d in range(1, num_devices // 2, 2)])


def complete_with_matching(num_devices: int) -> np.ndarray:
    """An expert for each pair of devices, and one more for each opposite pair."""
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
    """Slots [p] of a Cayley graph of Z_w: every slot is filled, no expert is twice on a
    device, replica counts differ by one at most, and few experts share a pair of
    devices. With `num_offered`, only so many own experts of a device have copies.

    ValueError where a device's share of experts or replicas is not a whole number that
    fits: see each message.
    """
    if num_devices < 1 or num_experts % num_devices:
        raise ValueError(
            f"num_experts={num_experts} must be divisible by the devices of the group "
            f"({num_devices}), for each to own as many"
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
        [(x,) for x in of_expert] for of_expert in _shifts(num_devices, offered, spare)
    ]
    return cayley((num_devices,), shifts + [[]] * (own - offered))


@functools.cache
def _shifts(num_devices: int, num_offered: int, spare: int) -> list[list[int]]:
    """Copies dealt over the own experts; then each shift in turn becomes the one that
    leaves the graph the best expander, until none changes."""
    dealt = [(spare - j + num_offered - 1) // num_offered for j in range(num_offered)]
    shifts = [[] for _ in dealt]
    places = [(j, i) for i in range(max(dealt, default=0)) for j in range(num_offered)]
    places = [(j, i) for j, i in places if i < dealt[j]]
    for j, _ in places:
        shifts[j].append(_best_shift(num_devices, shifts, j))
    while True:
        before = [list(of_expert) for of_expert in shifts]
        for j, i in places:
            kept = shifts[j].pop(i)
            shifts[j].insert(i, _best_shift(num_devices, shifts, j, kept))
        if shifts == before:
            return shifts


def _best_shift(
    num_devices: int, shifts: list[list[int]], j: int, kept: int | None = None
) -> int:
    """For one more replica of expert j: `kept` unless another is better.

    Of the graph in which experts join each pair of their devices, the second largest
    eigenvalue is to be small (a dense small set makes it large), and then the number of
    experts that share pairs. Z_w makes the eigenvalues a Fourier transform."""
    free = [x for x in range(1, num_devices) if x not in shifts[j]]
    joined_d = np.zeros(num_devices)
    for of_expert in shifts:
        for a, b in itertools.permutations([0, *of_expert], 2):
            joined_d[(a - b) % num_devices] += 1
    joined_xd = np.tile(joined_d, (len(free), 1))
    for row_d, x in zip(joined_xd, free):
        for a in (0, *shifts[j]):
            row_d[(x - a) % num_devices] += 1
            row_d[(a - x) % num_devices] += 1
    second_x = np.fft.fft(joined_xd).real[:, 1:].max(axis=1)
    cost_x = np.round(second_x, 6) + 1e-4 * (joined_xd**2).sum(axis=1)
    if kept is not None and cost_x[free.index(kept)] <= cost_x.min():
        return kept
    return free[int(cost_x.argmin())]
