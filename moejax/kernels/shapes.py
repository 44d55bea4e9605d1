"""Named shapes of real models, and how unevenly rows fall on groups. NumPy only."""

import dataclasses
from typing import Literal, get_args

import numpy as np

Skew = Literal["uniform", "zipf", "one_hot", "with_empty"]
SKEWS: tuple[Skew, ...] = get_args(Skew)


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """A grouped product: rows x d -> f, one matrix per group."""

    rows: int
    d: int
    f: int
    groups: int


MODEL_SHAPES = {
    "mixtral_8x7b": ProductShape(rows=8192 * 2, d=4096, f=14336, groups=8),
    "olmoe_1b_7b": ProductShape(rows=8192 * 8, d=2048, f=1024, groups=64),
    "qwen3_30b_a3b": ProductShape(rows=8192 * 8, d=2048, f=768, groups=128),
    "qwen3_235b_a22b": ProductShape(rows=8192 * 8, d=4096, f=1536, groups=128),
    "deepseek_v3": ProductShape(rows=8192 * 8, d=7168, f=2048, groups=256),
    "fine_grained": ProductShape(rows=8192 * 10, d=2048, f=512, groups=512),
}
"""The first product of a feed-forward, on 8192 tokens times the model's choices, with
all groups on one device. Widths are those of the published configurations;
fine_grained has the widths of Qwen3-Next-80B-A3B."""


def scaled(shape: ProductShape) -> ProductShape:
    """Rows, widths and groups by eight, for a processor; groups stay at least 8, and a
    group has as many rows as before where there were 64."""
    groups = max(8, shape.groups // 8)
    return ProductShape(shape.rows // 8, shape.d // 8, shape.f // 8, groups)


CPU_SHAPES = {name: scaled(shape) for name, shape in MODEL_SHAPES.items()} | {
    "narrow": ProductShape(rows=4096, d=256, f=512, groups=16),
    "wide": ProductShape(rows=8192, d=512, f=2048, groups=16),
}
"""The same for a processor, and two of a small trainer's layers."""


def make_rows(skew: Skew, total_rows: int, num_groups: int, seed: int) -> np.ndarray:
    """int32 [g] rows of each group, with sum total_rows; the seed says which are hot.

    uniform     as even as whole numbers allow
    zipf        proportional to 1, 1/2, 1/3, ...
    one_hot     one group has all
    with_empty  half of the groups have none, the others a random share each
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
    # Rounding the running sum keeps the total, and an empty group empty.
    ends_g = np.rint(np.cumsum(share_g) * total_rows).astype(np.int32)
    return np.diff(ends_g, prepend=np.int32(0))
