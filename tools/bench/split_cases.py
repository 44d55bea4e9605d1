"""Loads and plans that tools/bench/split.py splits: Zipf with drift, Cayley graphs.

Micro-batches n, source devices w, experts e, slots p.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from moejax.balance.policies.micromoe import symmetric

SKEWS = (0.4, 0.8, 1.2)
DRIFT = 0.05
"""Share of the experts that change places from one micro-batch to the next."""
EXPERTS_PER_CHOICE = 32
"""64 experts have top-2, 256 have top-8."""


class Size(NamedTuple):
    experts: int
    devices: int
    replicas: int

    @classmethod
    def of(cls, text: str) -> "Size":
        """Of experts/devices/replicas; ValueError where no plan has such sizes."""
        parts = text.strip().split("/")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise ValueError(
                f"--sizes has '{text}': give experts/devices/replicas, as in 64/8/2"
            )
        size = cls(*map(int, parts))
        if min(size) < 1 or size.experts % size.devices:
            raise ValueError(
                f"--sizes {text}: {size.experts} experts must be divisible by "
                f"{size.devices} devices, and nothing be 0"
            )
        if size.replicas > size.devices:
            raise ValueError(
                f"--sizes {text} has more replicas of an expert than devices: use at "
                f"most {size.devices}"
            )
        return size

    def __str__(self) -> str:
        return "/".join(map(str, self))


@dataclasses.dataclass(frozen=True)
class SplitCase:
    """One plan, and the micro-batches that are split over it."""

    size: Size
    row_p: np.ndarray
    counts_nwe: np.ndarray

    @property
    def load_ne(self) -> np.ndarray:
        return self.counts_nwe.sum(axis=1, dtype=np.int32)


def make_case(
    rng, size: Size, skew: float, micro_batches: int, tokens: int
) -> SplitCase:
    """`tokens` are those of each device."""
    choices = max(1, size.experts // EXPERTS_PER_CHOICE)
    popularity_e = rng.permutation(np.arange(1.0, size.experts + 1) ** -skew)
    counts = []
    for _ in range(micro_batches):
        counts.append(routed(rng, popularity_e, size.devices, tokens, choices))
        num_moved = max(2, math.ceil(DRIFT * size.experts))
        moved = rng.permutation(size.experts)[:num_moved]
        popularity_e[moved] = popularity_e[np.roll(moved, 1)]
    return SplitCase(size, random_plan(rng, size), np.stack(counts))


def routed(rng, popularity_e, num_devices: int, tokens: int, choices: int):
    """Tokens of each device to each expert, int32 [w, e]: distinct experts for each
    token, drawn by popularity (the largest sums of its logarithm and Gumbel noise)."""
    num_experts = len(popularity_e)
    counts = []
    for _ in range(num_devices):
        score_ne = np.log(popularity_e) + rng.gumbel(size=(tokens, num_experts))
        chosen_nk = np.argpartition(-score_ne, choices - 1, axis=1)[:, :choices]
        counts.append(np.bincount(chosen_nk.reshape(-1), minlength=num_experts))
    return np.array(counts, np.int32)


def random_plan(rng, size: Size) -> np.ndarray:
    """Slots [p] of a Cayley graph with shifts drawn at random: so many replicas of each
    expert, all slots full, no expert twice on a device."""
    copies = size.replicas - 1
    shifts = [
        [(1 + int(x),) for x in rng.permutation(size.devices - 1)[:copies]]
        for _ in range(size.experts // size.devices)
    ]
    return symmetric.cayley((size.devices,), shifts)
