"""Shapes of published models, and distributions of rows over groups, for benchmarks.

NumPy only.
"""

import dataclasses
from typing import Literal, get_args

import numpy as np

Skew = Literal["uniform", "zipf", "one_hot", "with_empty"]
"""Distribution of rows over groups: see make_rows."""
SKEWS: tuple[Skew, ...] = get_args(Skew)


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """Sizes of a grouped product [rows, d] x [groups, d, f] -> [rows, f]."""

    rows: int
    """Number of rows of all groups together."""
    d: int
    """Width of a row: the contracted dim."""
    f: int
    """Width of a row of the result."""
    groups: int
    """Number of groups, each with a matrix of its own."""


MODEL_SHAPES = {
    "mixtral_8x7b": ProductShape(rows=8192 * 2, d=4096, f=14336, groups=8),
    "olmoe_1b_7b": ProductShape(rows=8192 * 8, d=2048, f=1024, groups=64),
    "qwen3_30b_a3b": ProductShape(rows=8192 * 8, d=2048, f=768, groups=128),
    "qwen3_235b_a22b": ProductShape(rows=8192 * 8, d=4096, f=1536, groups=128),
    "deepseek_v3": ProductShape(rows=8192 * 8, d=7168, f=2048, groups=256),
    "fine_grained": ProductShape(rows=8192 * 10, d=2048, f=512, groups=512),
}
"""Shapes of the first product of an expert, for 8192 tokens with as many experts each
as the model has, and all experts on one device. Widths are those of the published
configurations; fine_grained has the widths of Qwen3-Next-80B-A3B."""


def divide_by_8(shape: ProductShape) -> ProductShape:
    """Return the shape with rows, widths and groups divided by 8, for tests on a CPU.

    It has at least 8 groups. The mean rows of a group stay the same for a shape of 64
    groups or more.
    """
    groups = max(8, shape.groups // 8)
    return ProductShape(shape.rows // 8, shape.d // 8, shape.f // 8, groups)


CPU_SHAPES = {name: divide_by_8(shape) for name, shape in MODEL_SHAPES.items()} | {
    "narrow": ProductShape(rows=4096, d=256, f=512, groups=16),
    "wide": ProductShape(rows=8192, d=512, f=2048, groups=16),
}
"""Shapes for benchmarks on a CPU: MODEL_SHAPES divided by 8, and two layers of small
models."""


def make_rows(skew: Skew, total_rows: int, num_groups: int, seed: int) -> np.ndarray:
    """Return the number of rows of each group, int32 [g], with sum `total_rows`.

    uniform     all groups have the same number of rows, up to rounding
    zipf        rows are proportional to 1, 1/2, 1/3, ...
    one_hot     one group has all rows
    with_empty  half of the groups are empty, and the others have random shares

    `seed` decides which groups have the most rows, and the random shares. Raises
    ValueError for another skew.
    """
    random = np.random.default_rng(seed)
    if skew == "uniform":
        share_g = np.ones(num_groups)
    elif skew == "zipf":
        share_g = 1 / np.arange(1, num_groups + 1)
    elif skew == "one_hot":
        share_g = np.eye(1, num_groups)[0]
    elif skew == "with_empty":
        share_g = random.uniform(0.1, 1, num_groups)
        share_g[: num_groups // 2] = 0
    else:
        raise ValueError(f"skew={skew!r} is not one of {', '.join(SKEWS)}")
    share_g = random.permutation(share_g / share_g.sum())
    # Rounding the running sum keeps the total exact and empty groups empty.
    ends_g = np.rint(np.cumsum(share_g) * total_rows).astype(np.int32)
    return np.diff(ends_g, prepend=np.int32(0))
