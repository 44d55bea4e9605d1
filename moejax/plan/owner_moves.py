"""Schedules for moving master parameters to new owners.

When a plan gives experts to other owners, pairs of positions swap their experts, round
by round. In one round a device sends at most one expert:

    positions   0 1 | 2 3 | 4 5        3 devices that own 2 experts each
    old         a b | c d | e f        round 1: swap positions 1 and 2
    new         a c | b e | d f        round 2: swap positions 3 and 4

After every round each expert still has exactly one owner, so a move can stop between
two rounds.
"""

import numpy as np

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
