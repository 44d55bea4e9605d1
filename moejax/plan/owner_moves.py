"""Schedules for moving master parameters to new owners, or states to new copies.

When a plan gives experts to other owners, pairs of positions swap their experts, round
by round. In one round a device sends at most one expert:

    positions   0 1 | 2 3 | 4 5        3 devices that own 2 experts each
    old         a b | c d | e f        round 1: swap positions 1 and 2
    new         a c | b e | d f        round 2: swap positions 3 and 4

After every round each expert still has exactly one owner, so a move can stop between
two rounds.
"""

import numpy as np

from moejax.plan.expert_plan import EMPTY

Pairs = list[tuple[int, int]]
"""Pairs of positions that swap their experts in one round."""


def rounds(old_e: np.ndarray, new_e: np.ndarray, num_devices: int) -> list[Pairs]:
    """Return the pairs of positions that swap their experts in one layer, by round.

    `old_e` and `new_e` name the expert at each position, [experts]. In one round each
    position is in at most one pair, and each device in at most one pair with another
    device.
    """
    now_e, own = old_e.copy(), len(old_e) // num_devices
    position_e = np.argsort(now_e)
    pairs_by_round: list[Pairs] = []
    free_e = np.zeros(len(old_e), int)
    busy: set[tuple[int, int]] = set()
    for i, expert in enumerate(new_e):
        j = int(position_e[expert])
        if i == j:
            continue
        position_e[now_e[i]], position_e[expert] = j, i
        now_e[i], now_e[j] = now_e[j], now_e[i]
        here, there = i // own, j // own
        r = max(free_e[i], free_e[j])
        while here != there and ((r, here) in busy or (r, there) in busy):
            r += 1
        if here != there:  # a swap within one device sends nothing
            busy |= {(r, here), (r, there)}
        free_e[i] = free_e[j] = r + 1
        pairs_by_round += [[] for _ in range(r + 1 - len(pairs_by_round))]
        pairs_by_round[r].append((i, j))
    return pairs_by_round


def num_rounds(old_le: np.ndarray, new_le: np.ndarray, num_devices: int) -> int:
    """Return the number of rounds that send an expert to another device, summed over
    all layers. `old_le` and `new_le` are [layers, experts], as in `rounds`."""
    own = old_le.shape[1] // num_devices
    return sum(
        any(i // own != j // own for i, j in pairs)
        for old_e, new_e in zip(old_le, new_le)
        for pairs in rounds(old_e, new_e, num_devices)
    )


def state_rounds(
    old_p: np.ndarray, new_p: np.ndarray, owned_e: np.ndarray, num_devices: int
) -> list[Pairs]:
    """Return, by round, the experts whose states travel to new copies in one layer.

    A pair is the position of an expert at its owner, and a device that holds a copy
    under the slots `new_p` [p] and not under `old_p`. In one round a device sends one
    of its experts, to any number of devices, and receives at most one. `owned_e` names
    the expert at each position.
    """
    own, num_experts = len(owned_e) // num_devices, len(owned_e)
    holds_we = np.zeros((2, num_devices, num_experts), bool)
    for holds, row_p in zip(holds_we, (old_p, new_p)):
        row_ws = row_p.reshape(num_devices, -1)
        device, slot = np.nonzero(row_ws != EMPTY)
        holds[device, row_ws[device, slot]] = True
    position_e = np.argsort(owned_e)
    is_new_we = holds_we[1] & ~holds_we[0]
    left = [
        (int(position_e[expert]), int(device))
        for device, expert in np.argwhere(is_new_we)
        if position_e[expert] // own != device
    ]
    pairs_by_round: list[Pairs] = []
    while left:
        sent: dict[int, int] = {}
        taken: set[int] = set()
        pairs = []
        for position, device in left:
            if device not in taken and sent.setdefault(position // own, position) == (
                position
            ):
                taken.add(device)
                pairs.append((position, device))
        left = [pair for pair in left if pair not in pairs]
        pairs_by_round.append(pairs)
    return pairs_by_round
