"""What tools/tune_kernels.py tries, in which order, and what it keeps.

    tuning_buckets   a bucket for each pass of each shape, or each product of a layer
    candidates   the rule's tiles, then all shapes of a tile, likely ones first
    neighbours   of the fastest: one setting of it changed; and again, while it helps

A measurement decides; the order only says what is tried before the time is up.
"""

import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from moejax.kernels.shapes import ProductShape
from moejax.kernels.tuning import (
    FP8,
    PASSES,
    SHARED_BYTES,
    Pass,
    Tiles,
    bucket,
    default_tiles,
    layer_products,
    shared_bytes,
)
from moejax.kernels.tuning import read as read_file

ROWS, COLUMNS = (64, 128, 256), (64, 128, 192, 256)
MAX_SUMS = {"swiglu": 128, "swiglu_dgrad": 96, "fp8_forward": 64, "fp8_dgrad": 64}
MAX_SUMS_PLAIN = 192
"""Registers of a thread, of the 232 that it has; of more, and in the fused passes' long
epilogues at about these, the compiler spills."""
FP8_DEPTH = 128
SWIZZLED_COLUMNS = 64
"""Of two bytes: a part of a swizzled array begins at a multiple of it."""
MAX_STAGES = 6
OPERAND_ROWS = 64
"""A tile of so many rows and columns is taken to wait for operands as long as it
multiplies."""
MAX_GUESSED = 1.25
BATCH = 4
"""Candidates that are compiled at the same time, and then timed one by one."""


class Bucket(NamedTuple):
    name: str
    which: Pass
    shape: ProductShape

    def key(self, dtype: str) -> str:
        """In the file of tiles."""
        return bucket(self.which, self.shape, dtype)


@dataclasses.dataclass(frozen=True)
class Settings:
    buckets: list[Bucket]
    skews: list[str]
    dtype: str
    limit_sec: float
    seed: int
    is_again: bool
    path: pathlib.Path


def tuning_buckets(shapes: dict[str, ProductShape], is_layer: bool) -> Iterator[Bucket]:
    """Every pass of each shape, or what layers of these widths run, in fp8 too."""
    for name, shape in shapes.items():
        found = [(which, shape) for which in PASSES]
        if is_layer:
            found = dict.fromkeys(
                layer_products(shape) + layer_products(shape, is_fp8=True)
            )
        for which, of in found:
            yield Bucket(name, which, of)


def candidates(which: Pass, shape: ProductShape, itemsize: int) -> list[Tiles]:
    """Shapes of a tile, each with as many stages as fit: the rule's first, then others
    by their guessed cost, without those that are guessed much slower than the best."""
    first = default_tiles(which, shape)
    deepest = (_deepest(which, tiles, itemsize) for tiles in _shapes(which))
    cost = {
        tiles: guessed_cost(which, shape, tiles)
        for tiles in deepest
        if tiles not in (None, first)
    }
    most = MAX_GUESSED * min(cost.values())
    return [first, *sorted((t for t in cost if cost[t] <= most), key=cost.get)]


def guessed_cost(which: Pass, shape: ProductShape, tiles: Tiles) -> float:
    """Time for a useful FLOP, as a ratio: what a tile multiplies for each row and
    column that the result has, and how long it waits for what it reads."""
    high = shape.d if which == "wgrad" else shape.rows / shape.groups
    wide = shape.d if which in ("dgrad", "fp8_dgrad") else shape.f
    filled = _filled(high, tiles.rows) * _filled(wide, tiles.columns)
    columns = tiles.columns * (2 if which == "swiglu" else 1)
    waits = OPERAND_ROWS / 2 * (1 / tiles.rows + 1 / columns)
    return (1 + waits) / filled


def neighbours(which: Pass, tiles: Tiles, itemsize: int) -> list[Tiles]:
    """Those that fit and differ in one setting: how blocks walk, then the ring, then
    the chunk (of fewer columns, single rows would leave from addresses that TMA does
    not take), then which half of the tile a warpgroup has."""
    other = "columns" if tiles.halves == "rows" else "rows"
    changes = [
        *({"span": span} for span in (4, 16, 1, 32)),
        {"depth": 2 * tiles.depth, "stages": max(2, tiles.stages // 2)},
        {"stages": tiles.stages - 1},
        {"stages": tiles.stages + 1},
        *({"chunk": chunk} for chunk in (32, 64)),
        {"halves": other},
    ]
    made = (_made(tiles, change) for change in changes)
    return [
        near
        for near in made
        if near not in (None, tiles)
        and is_possible(which, near)
        and shared_bytes(which, near, itemsize) <= SHARED_BYTES
    ]


def is_possible(which: Pass, tiles: Tiles) -> bool:
    """Whether registers hold the sums, and swizzled arrays can be parted so."""
    own_rows, own_columns = tiles.warpgroup_tile
    sums = own_rows * own_columns // 128 * (2 if which == "swiglu" else 1)
    if sums > MAX_SUMS.get(which, MAX_SUMS_PLAIN):
        return False
    if which in FP8:  # a step and a warpgroup's columns have one scale of w
        return tiles.depth == FP8_DEPTH and own_columns in (64, 128) and own_rows == 64
    if which == "wgrad":  # each warpgroup blanks half of both operands
        parts = (tiles.rows // 2, tiles.columns // 2)
    elif which in ("forward", "swiglu"):
        parts = (own_columns,)
    else:  # matrices are parted in their rows
        parts = ()
    return not any(part % SWIZZLED_COLUMNS for part in parts)


@dataclasses.dataclass
class Found:
    """What a search of one bucket has seen."""

    msec: dict[Tiles, float] = dataclasses.field(default_factory=dict)
    """In the order of the search."""
    skipped: dict[Tiles, str] = dataclasses.field(default_factory=dict)
    """Why each has no time."""
    is_whole: bool = False
    """Whether nothing was left when it ended."""

    @property
    def best(self) -> Tiles | None:
        return min(self.msec, key=self.msec.get) if self.msec else None


def search(
    first: Sequence[Tiles],
    around: Callable[[Tiles], Sequence[Tiles]],
    measure: Callable[[Sequence[Tiles]], Sequence[float | str]],
    is_over: Callable[[], bool],
) -> Found:
    """All of `first`, then what is around the fastest, until nothing there is faster.

    measure(batch) has a time in msec for each, or why there is none. The first batch is
    measured in any case, `is_over` is asked before each other one.
    """
    found = Found()
    todo, centre = list(first), None
    while todo:
        batch, todo = todo[:BATCH], todo[BATCH:]
        for tiles, result in zip(batch, measure(batch), strict=True):
            seen = found.skipped if isinstance(result, str) else found.msec
            seen[tiles] = result
        if not todo and found.best != centre:
            centre = found.best
            known = found.msec.keys() | found.skipped.keys()
            todo = [tiles for tiles in around(centre) if tiles not in known]
        if todo and is_over():
            return found
    found.is_whole = True
    return found


def load(path: pathlib.Path, device_kind: str) -> dict:
    """What the file holds, or what one holds at first. Raises ValueError for a file of
    another device, or one that is none."""
    if not path.is_file():
        return {"device": device_kind, "tiles": {}, "measured": {}}
    record = read_file(path)
    if record.get("device") != device_kind:
        raise ValueError(
            f"{path} is of {record.get('device')} and this is {device_kind}: give "
            "another --out"
        )
    return {"measured": {}} | record


def keep(path: pathlib.Path, record: dict) -> None:
    """Write the file whole or not at all: a run may be cut off at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    number, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _shapes(which: Pass) -> Iterator[Tiles]:
    depth = FP8_DEPTH if which in FP8 else Tiles.depth
    for rows in ROWS:
        for columns in COLUMNS:
            sizes = {"rows": rows, "columns": columns, "depth": depth}
            tiles = _made(Tiles(128, 128), sizes)
            if tiles is not None and is_possible(which, tiles):
                yield tiles


def _made(tiles: Tiles, change: dict) -> Tiles | None:
    """None where there are no such tiles. 64 rows can only be shared by columns."""
    settings = dataclasses.asdict(tiles) | change
    if settings["rows"] == 64:
        settings["halves"] = "columns"
    try:
        return Tiles(**settings)
    except ValueError:
        return None


def _deepest(which: Pass, tiles: Tiles, itemsize: int) -> Tiles | None:
    """With as many stages as fit, MAX_STAGES at most; None where not even two do."""
    for stages in range(MAX_STAGES, 1, -1):
        deep = dataclasses.replace(tiles, stages=stages)
        if shared_bytes(which, deep, itemsize) <= SHARED_BYTES:
            return deep
    return None


def _filled(size: float, tile: int) -> float:
    """Share of the tiles over `size` that is not beyond it."""
    return size / (-(-size // tile) * tile)
