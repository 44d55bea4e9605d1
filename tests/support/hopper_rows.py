"""Setups of the interpreted Hopper kernels, and rows of their groups.

The rows cover patterns of empty groups, and boundaries of groups inside and beside
tiles.
"""

import itertools

import numpy as np
import pytest

from moejax.kernels.grouped_dot.hopper import ring
from moejax.kernels.shapes import ProductShape
from moejax.kernels.tuning import FP8, PASSES, Tiles
from tests.support.hopper_cases import INTERPRET, Setup

OWN_DTYPE = tuple(which for which in PASSES if which not in FP8)
"""Passes in the dtype of their operands. test_hopper_fp8.py tests the 8-bit passes."""
NUM_GROUPS = 8
PLAIN = Setup(
    ProductShape(rows=200, d=64, f=64, groups=NUM_GROUPS),
    Tiles(128, 64, stages=3),
    num_blocks=2,
)
"""A small setup, for hundreds of calls. Its 200 rows end inside a tile."""
STEEP = Setup(
    ProductShape(rows=200, d=192, f=192, groups=4),
    Tiles(128, 128, stages=2, span=1),
    num_blocks=3,
    dtype="float16",
)
"""A setup with three steps in two stages. The last tiles of columns and of rows end
outside the array, and the second warpgroup of the latter has nothing to store."""
FEW_STEPS = Setup(
    ProductShape(rows=72, d=64, f=64, groups=9),
    Tiles(64, 128, stages=4, halves="columns", chunk=64),
    num_blocks=40,
)
"""A setup with one step in four stages. There are more blocks than tiles, and the
columns of one warpgroup all lie outside the array."""
ONE_GROUP = Setup(
    ProductShape(rows=328, d=128, f=192, groups=1),
    Tiles(64, 128, stages=4, span=64, halves="columns"),
    num_blocks=1,
    dtype="float16",
)
CASES = [
    pytest.param(STEEP, (128, 8, 63, 1), id="boundaries at and beside edges"),
    pytest.param(STEEP, (3, 0, 130, 20), id="boundaries inside a tile"),
    pytest.param(FEW_STEPS, (0, 1, 0, 0, 1, 0, 0, 2, 0), id="fewer rows than groups"),
    pytest.param(ONE_GROUP, (201,), id="one group and padding"),
    pytest.param(ONE_GROUP, (328,), id="one group alone"),
]
INTERPRETED = ring.KernelRun(1, INTERPRET)
FEW_ROWS = (1, 7, 8, 9, 15, 16, 24, 25)
"""Numbers of rows around multiples of 8, where tiles may begin."""
ALL_PATTERNS = list(itertools.product((False, True), repeat=NUM_GROUPS))


def min_cover():
    """Return six patterns in which each pair of groups takes all four combinations of
    empty and not empty (Kleitman and Spencer, 1973).

    The first pattern has empty groups only. The other five are numbered 1 to 5, and
    group i has rows in the patterns of the i-th three of these numbers.
    """
    threes = list(itertools.combinations(range(1, 6), 3))[:NUM_GROUPS]
    return [tuple(number in three for three in threes) for number in range(6)]


def rows_of_pattern(pattern) -> np.ndarray:
    """Return the rows of each group: a few for groups of the pattern, 0 for others.

    In every third pattern the last group that has rows takes all remaining rows, which
    are many tiles, so that there is no padding.
    """
    number = ALL_PATTERNS.index(pattern)
    random = np.random.default_rng(number)
    rows_g = np.where(pattern, random.choice(FEW_ROWS, NUM_GROUPS), 0).astype(np.int32)
    if number % 3 == 0 and any(pattern):
        rows_g[np.flatnonzero(pattern)[-1]] += PLAIN.shape.rows - rows_g.sum()
    return rows_g
