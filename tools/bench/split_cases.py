"""Loads and plans of tools/bench/split.py: Zipf loads that drift, on Cayley graphs.

Letters in names: n micro-batches, w source devices, e experts, p slots.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from moejax.balance.policies.micromoe import symmetric

SKEWS = (0.4, 0.8, 1.2)
DRIFT = 0.05
"""Share of the experts that exchange their popularity from one micro-batch to the
next."""
EXPERTS_PER_CHOICE = 32
"""Number of experts per choice of a token: with 64 experts top-2, with 256 top-8."""


class Size(NamedTuple):
    """Size of a problem: experts, devices, and replicas of each expert."""

    experts: int
    devices: int
    replicas: int

    @classmethod
    def of(cls, text: str) -> "Size":
        """Return the size that is written as experts/devices/replicas. Raises
        ValueError for sizes that no plan can have."""
        parts = text.strip().split("/")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise ValueError(
                f"--sizes has '{text}': give experts/devices/replicas, as in 64/8/2"
            )
        size = cls(*map(int, parts))
        if min(size) < 1 or size.experts % size.devices:
            raise ValueError(
                f"--sizes {text}: {size.experts} experts must be divisible by "
                f"{size.devices} devices, and no size may be 0"
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
    """A plan, and the micro-batches that are split over its replicas."""

    size: Size
    row_p: np.ndarray
    counts_nwe: np.ndarray

    @property
    def load_ne(self) -> np.ndarray:
        """Load of each expert in each micro-batch."""
        return self.counts_nwe.sum(axis=1, dtype=np.int32)


def make_case(
    rng, size: Size, skew: float, micro_batches: int, tokens: int
) -> SplitCase:
    """Draw a plan and the counts of several micro-batches. `tokens` is the number per
    device."""
    choices = max(1, size.experts // EXPERTS_PER_CHOICE)
    popularity_e = rng.permutation(np.arange(1.0, size.experts + 1) ** -skew)
    counts = []
    for _ in range(micro_batches):
        counts.append(draw_counts(rng, popularity_e, size.devices, tokens, choices))
        num_moved = max(2, math.ceil(DRIFT * size.experts))
        moved = rng.permutation(size.experts)[:num_moved]
        popularity_e[moved] = popularity_e[np.roll(moved, 1)]
    return SplitCase(size, random_plan(rng, size), np.stack(counts))


def draw_counts(rng, popularity_e, num_devices: int, tokens: int, choices: int):
    """Draw the tokens of each device to each expert, int32 [w, e].

    Each token chooses distinct experts by popularity: those with the largest sum of the
    logarithm of their popularity and Gumbel noise.
    """
    num_experts = len(popularity_e)
    counts = []
    for _ in range(num_devices):
        score_ne = np.log(popularity_e) + rng.gumbel(size=(tokens, num_experts))
        chosen_nk = np.argpartition(-score_ne, choices - 1, axis=1)[:, :choices]
        counts.append(np.bincount(chosen_nk.reshape(-1), minlength=num_experts))
    return np.array(counts, np.int32)


def random_plan(rng, size: Size) -> np.ndarray:
    """Return a plan, the expert of each slot [p], by a Cayley graph with random shifts.

    Each expert has `size.replicas` replicas, all slots are full, and no expert is twice
    on a device.
    """
    copies = size.replicas - 1
    shifts = [
        [(1 + int(x),) for x in rng.permutation(size.devices - 1)[:copies]]
        for _ in range(size.experts // size.devices)
    ]
    return symmetric.cayley((size.devices,), shifts)
