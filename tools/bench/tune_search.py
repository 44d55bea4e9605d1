"""The search of tools/tune_kernels.py: which tiles are tried, and in which order.

    tuning_buckets   a bucket for each pass of each shape, or each product of a layer
    candidates       the default tiles, then all shapes of a tile, likely ones first
    neighbours       tiles that differ from the fastest in one setting; repeated while
                     this finds faster ones

Measurements decide. The order only determines what is tried before the time is up.
Second forms of the kernels (docs/kernels.md) are tried only where they are asked for.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from moejax.kernels.shapes import ProductShape
from moejax.kernels.tuning import (
    FP8,
    FUSED,
    PASSES,
    SHARED_BYTES,
    Pass,
    Tiles,
    bucket,
    default_tiles,
    layer_products,
    shared_bytes,
)

Forms = Literal["first", "all"]
"""Forms of the kernels that a search tries: first forms, or second forms too."""
FORMS: tuple[Forms, ...] = get_args(Forms)
ROWS, COLUMNS = (64, 128, 256), (64, 128, 192, 256)
MAX_SUMS = {"swiglu": 128, "swiglu_dgrad": 96, "fp8_forward": 64, "fp8_dgrad": 64}
MAX_SUMS_PLAIN = 192
"""Maximum number of a thread's 232 registers that hold sums; MAX_SUMS has lower limits
for some passes. With more, the compiler spills registers. In the fused passes, whose
epilogues are long, it does so at about the limits of MAX_SUMS."""
FP8_DEPTH = 128
SWIZZLED_COLUMNS = 64
"""Number of two-byte columns at whose multiples a part of a swizzled array may
begin."""
MAX_STAGES = 6
OPERAND_ROWS = 64
"""Number of rows and columns of a tile that is taken to wait for its operands as long
as it multiplies."""
MAX_GUESSED = 1.25
"""Maximum guessed cost of a candidate, over that of the best one."""
BATCH = 4
"""Number of candidates that are compiled at the same time, and then timed one by
one."""


class Bucket(NamedTuple):
    """A pass on a shape, with the name of the shape."""

    name: str
    which: Pass
    shape: ProductShape

    def key(self, dtype: str) -> str:
        """Return the key of this bucket of shapes in the file of tuned tiles."""
        return bucket(self.which, self.shape, dtype)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a search, from the flags of tools/tune_kernels.py."""

    buckets: list[Bucket]
    skews: list[str]
    dtype: str
    limit_sec: float
    seed: int
    is_again: bool
    path: pathlib.Path
    forms: Forms = "first"
    spared: int = 0
    """Number of multiprocessors without a block (Tiles.spared)."""


def tuning_buckets(shapes: dict[str, ProductShape], is_layer: bool) -> Iterator[Bucket]:
    """Yield a bucket for every pass of each shape, or with `is_layer` for every product
    that layers of these widths run, those of fp8 included."""
    for name, shape in shapes.items():
        products = [(which, shape) for which in PASSES]
        if is_layer:
            products = dict.fromkeys(
                layer_products(shape) + layer_products(shape, is_fp8=True)
            )
        for which, product_shape in products:
            yield Bucket(name, which, product_shape)


def candidates(
    which: Pass, shape: ProductShape, itemsize: int, forms: Forms = "first"
) -> list[Tiles]:
    """Return the default tiles, then tiles of all shapes, each with as many stages as
    fit, in the order of their guessed cost. With forms='all' some are for warpgroups
    that take turns.

    Tiles whose guessed cost is more than MAX_GUESSED times the best are left out.
    """
    first = default_tiles(which, shape)
    deepest = (_deepest(which, tiles, itemsize) for tiles in _shapes(which, forms))
    cost = {
        tiles: guessed_cost(which, shape, tiles)
        for tiles in deepest
        if tiles not in (None, first)
    }
    max_cost = MAX_GUESSED * min(cost.values())
    return [first, *sorted((t for t in cost if cost[t] <= max_cost), key=cost.get)]


def guessed_cost(which: Pass, shape: ProductShape, tiles: Tiles) -> float:
    """Return a guess of the time per useful FLOP with these tiles, as a ratio.

    It grows with the part of a tile that lies beyond the result, and with the time that
    the tile waits for its operands.
    """
    high = shape.d if which == "wgrad" else shape.rows / shape.groups
    wide = shape.d if which in ("dgrad", "fp8_dgrad") else shape.f
    side_by_side = tiles.columns * tiles.cluster
    filled = _filled(high, tiles.rows) * _filled(wide, side_by_side)
    columns = tiles.columns * (2 if which == "swiglu" else 1)
    waits = OPERAND_ROWS / 2 * (1 / tiles.rows + 1 / columns)
    return (1 + waits) / filled


def neighbours(
    which: Pass, tiles: Tiles, itemsize: int, forms: Forms = "first"
) -> list[Tiles]:
    """Return the tiles that fit and differ from `tiles` in one setting.

    The order of settings is: how blocks walk over tiles, the ring of stages, the chunk,
    the half of the tile that a warpgroup has; with forms='all' also the barriers, the
    accuracy of exp, and clusters. A chunk has at least 32 columns, since
    single rows of fewer would be sent from addresses that TMA does not accept.
    """
    other = "columns" if tiles.halves == "rows" else "rows"
    second = [{"barriers": "own"}, {"math": "approx"}, {"cluster": 2}]
    changes = [
        *({"span": span} for span in (4, 16, 1, 32)),
        {"depth": 2 * tiles.depth, "stages": max(2, tiles.stages // 2)},
        {"stages": tiles.stages - 1},
        {"stages": tiles.stages + 1},
        *({"chunk": chunk} for chunk in (32, 64)),
        {"halves": other},
        *(second if forms == "all" else ()),
    ]
    changed = (_change(tiles, change) for change in changes)
    return [
        near
        for near in changed
        if near not in (None, tiles)
        and is_possible(which, near)
        and shared_bytes(which, near, itemsize) <= SHARED_BYTES
    ]


def is_possible(which: Pass, tiles: Tiles) -> bool:
    """Return whether registers can hold the sums of the tiles, swizzled arrays can be
    divided in this way, and the pass has this form."""
    if tiles.math == "approx" and which not in FUSED:  # there is no exp
        return False
    own_rows, own_columns = tiles.warpgroup_tile
    sums = own_rows * own_columns // 128 * (2 if which == "swiglu" else 1)
    if sums > MAX_SUMS.get(which, MAX_SUMS_PLAIN):
        return False
    if which in FP8:  # a step and a warpgroup's columns have one scale of w
        is_scaled = tiles.depth == FP8_DEPTH and own_columns in (64, 128)
        return is_scaled and own_rows == 64 and not tiles.is_second_form
    if which == "wgrad":  # each warpgroup blanks half of both operands
        if tiles.barriers == "own":
            return False
        parts = (tiles.rows // 2, tiles.columns // 2)
    elif which in ("forward", "swiglu"):
        parts = (own_columns,)
    else:  # matrices are divided by rows
        parts = ()
    return not any(part % SWIZZLED_COLUMNS for part in parts)


@dataclasses.dataclass
class SearchResult:
    """Result of a search of one bucket."""

    msec: dict[Tiles, float] = dataclasses.field(default_factory=dict)
    """Milliseconds by tiles, in the order of the search."""
    skipped: dict[Tiles, str] = dataclasses.field(default_factory=dict)
    """Reasons by tiles, for those that could not be timed."""
    is_whole: bool = False
    """Whether nothing was left to try when the search ended."""

    @property
    def best(self) -> Tiles | None:
        """The fastest tiles; None if none has a time."""
        return min(self.msec, key=self.msec.get) if self.msec else None


def search(
    first: Sequence[Tiles],
    around: Callable[[Tiles], Sequence[Tiles]],
    measure: Callable[[Sequence[Tiles]], Sequence[float | str]],
    is_over: Callable[[], bool],
) -> SearchResult:
    """Try all of `first`, then the tiles around the fastest, until none is faster.

    measure(batch) returns, for each candidate, its milliseconds or the reason why it
    could not be timed. The first batch is always measured. Before each other batch the
    search ends if is_over() is true.
    """
    result = SearchResult()
    todo, centre = list(first), None
    while todo:
        batch, todo = todo[:BATCH], todo[BATCH:]
        for tiles, value in zip(batch, measure(batch), strict=True):
            table = result.skipped if isinstance(value, str) else result.msec
            table[tiles] = value
        if not todo and result.best != centre:
            centre = result.best
            known = result.msec.keys() | result.skipped.keys()
            todo = [tiles for tiles in around(centre) if tiles not in known]
        if todo and is_over():
            return result
    result.is_whole = True
    return result


def _shapes(which: Pass, forms: Forms) -> Iterator[Tiles]:
    depth = FP8_DEPTH if which in FP8 else Tiles.depth
    for halves in ("rows", "turns") if forms == "all" else ("rows",):
        for rows, columns in itertools.product(ROWS, COLUMNS):
            sizes = {"rows": rows, "columns": columns, "depth": depth}
            tiles = _change(Tiles(128, 128), sizes | {"halves": halves})
            if tiles is not None and is_possible(which, tiles):
                yield tiles


def _change(tiles: Tiles, change: dict) -> Tiles | None:
    """Return the tiles with some settings changed; None if such tiles do not exist.
    Tiles of 64 rows can only be halved by columns."""
    settings = dataclasses.asdict(tiles) | change
    if settings["rows"] == 64 and settings["halves"] == "rows":
        settings["halves"] = "columns"
    try:
        return Tiles(**settings)
    except ValueError:
        return None


def _deepest(which: Pass, tiles: Tiles, itemsize: int) -> Tiles | None:
    """Return the tiles with as many stages as fit, at most MAX_STAGES; None if not even
    two fit."""
    for stages in range(MAX_STAGES, 1, -1):
        deep = dataclasses.replace(tiles, stages=stages)
        if shared_bytes(which, deep, itemsize) <= SHARED_BYTES:
            return deep
    return None


def _filled(size: float, tile: int) -> float:
    """Return the useful fraction of tiles that cover `size` elements, the last of which
    may reach beyond it."""
    return size / (-(-size // tile) * tile)
