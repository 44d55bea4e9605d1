"""How masters get to new owners, in NumPy: rounds in which a device sends one expert.

    positions   0 1 | 2 3 | 4 5        3 devices that own 2 experts each
    now         a b | c d | e f        round 1: positions 1 and 2 change places
    wanted      a c | b e | d f        round 2: positions 3 and 4 do

After every round the owners are a permutation, so a move can stop between two rounds.
"""

import numpy as np

Pairs = list[tuple[int, int]]


def rounds(old_e: np.ndarray, new_e: np.ndarray, num_devices: int) -> list[Pairs]:
    """Positions of one layer that change places, round by round.

    `old_e` and `new_e` name the expert at each position. In a round a position occurs
    once at most, and of a device's positions one changes places with another device.
    """
    now_e, own = old_e.copy(), len(old_e) // num_devices
    at_e = np.argsort(now_e)
    found: list[Pairs] = []
    free_e = np.zeros(len(old_e), int)
    busy: set[tuple[int, int]] = set()
    for i, expert in enumerate(new_e):
        j = int(at_e[expert])
        if i == j:
            continue
        at_e[now_e[i]], at_e[expert] = j, i
        now_e[i], now_e[j] = now_e[j], now_e[i]
        here, there = i // own, j // own
        r = max(free_e[i], free_e[j])
        while here != there and ((r, here) in busy or (r, there) in busy):
            r += 1
        if here != there:  # within a device nothing travels
            busy |= {(r, here), (r, there)}
        free_e[i] = free_e[j] = r + 1
        found += [[] for _ in range(r + 1 - len(found))]
        found[r].append((i, j))
    return found


def num_rounds(old_le: np.ndarray, new_le: np.ndarray, num_devices: int) -> int:
    """Of all layers, without those in which nothing travels."""
    own = old_le.shape[1] // num_devices
    return sum(
        any(i // own != j // own for i, j in pairs)
        for old_e, new_e in zip(old_le, new_le)
        for pairs in rounds(old_e, new_e, num_devices)
    )
