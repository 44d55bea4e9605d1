"""Tile sizes of the Hopper kernels: measured ones per device, else default ones.

Measured sizes are in the file of the device (device_file.py), by bucket: the pass, the
dtype, and each size of the product rounded up to a power of two.
"""

import dataclasses
from typing import Literal, get_args

from moejax.kernels import device_file
from moejax.kernels.shapes import ProductShape

Pass = Literal[
    "forward", "dgrad", "wgrad", "swiglu", "swiglu_dgrad", "fp8_forward", "fp8_dgrad"
]
"""Names of the kernels' matrix products; docs/kernels.md says what each computes."""
PASSES: tuple[Pass, ...] = get_args(Pass)
FUSED: tuple[Pass, ...] = ("swiglu", "swiglu_dgrad")
"""Passes with a part of SwiGLU in their epilogue."""
FP8: tuple[Pass, ...] = ("fp8_forward", "fp8_dgrad")
"""Passes that multiply 8-bit values."""

SHARED_BYTES = 227 * 1024
"""Bytes of shared memory that one block can have on Hopper."""
BUFFER_ALIGNMENT = 1024
"""Alignment in bytes of each array in shared memory: the swizzle pattern repeats every
1024 bytes."""
BARRIER_BYTES, SCALE_BYTES = 8, 4
WARPGROUPS = 2
"""Number of computing warpgroups of a block. One more warpgroup copies."""
MIN_CHUNK = 32
"""Minimum number of columns of a chunk."""
TILE_ROWS = (64, 128)
"""Numbers of rows of a tile."""
FEW_ROWS = 192
"""Largest mean number of rows of a group that gets tiles of 64 rows."""
DEFAULT_STAGES = 4
"""Default number of ring stages: three copies are in flight while one step is
multiplied."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of a grouped product, for a block with two computing warpgroups."""

    rows: int
    """Number of rows of the result that a block computes at a time."""
    columns: int
    """Number of columns of the result that a block computes at a time; in the pass
    `swiglu`, of gate and of up each."""
    depth: int = 64
    """Number of values of the contraction that one step multiplies. The default is 128
    bytes of a 2-byte dtype, the width of the widest swizzle; it must be 128 in fp8."""
    stages: int = DEFAULT_STAGES
    """Number of steps whose operands shared memory holds at once."""
    span: int = 8
    """Number of tiles of rows in a band. Blocks visit all columns of one band before
    the next band, so that they share operands in the L2 cache."""
    halves: Literal["rows", "columns"] = "rows"
    """Dim of the tile that is split between the two computing warpgroups."""
    chunk: int = 32
    """Number of columns that are written from registers to the result at a time."""

    def __post_init__(self) -> None:
        if self.halves not in ("rows", "columns"):
            raise ValueError(f"halves={self.halves!r} is neither 'rows' nor 'columns'")
        own_rows, own_columns = self.warpgroup_tile
        if own_rows not in (64, 128) or own_columns not in (64, 128, 192, 256):
            raise ValueError(
                f"a warpgroup has {own_rows} x {own_columns} of {self}: it must have "
                "64 or 128 rows, and a multiple of 64 and at most 256 columns"
            )
        if self.depth % 64:
            raise ValueError(f"depth={self.depth} must be a multiple of 64")
        if self.chunk % MIN_CHUNK or own_columns % self.chunk:
            raise ValueError(
                f"chunk={self.chunk} must divide {own_columns} columns and be a "
                f"multiple of {MIN_CHUNK}"
            )
        if self.stages < 2:
            # A slot is released when the next step has begun, which needs another one.
            raise ValueError(f"stages={self.stages} must be at least 2")

    @property
    def warpgroup_tile(self) -> tuple[int, int]:
        """Number of rows and columns of the tile that one warpgroup computes."""
        if self.halves == "rows":
            return self.rows // 2, self.columns
        return self.rows, self.columns // 2


def layer_products(
    shape: ProductShape, *, is_fp8: bool = False
) -> list[tuple[Pass, ProductShape]]:
    """Return the passes, with their shapes, that grouped_swiglu and its gradient run.

    `shape` is that of gate and of up: d is the width of a row and f the hidden width.
    """
    into = dataclasses.replace(shape, f=2 * shape.f)  # gate and up side by side
    down = dataclasses.replace(shape, d=shape.f, f=shape.d)
    if is_fp8:
        wgrads: list[tuple[Pass, ProductShape]] = [("wgrad", into), ("wgrad", down)]
        return [(which, side) for which in FP8 for side in (into, down)] + wgrads
    return [
        ("swiglu", shape),
        ("forward", down),
        ("swiglu_dgrad", shape),
        ("dgrad", into),
        ("wgrad", into),
        ("wgrad", down),
    ]


def align_rows_for(num_rows: int, num_groups: int) -> int:
    """Return the rows of a tile for groups with this mean number of rows: 64 or 128.

    Kernels for Hopper need groups whose rows are a multiple of a tile's. Groups of few
    rows would fill only a part of 128.
    """
    return 64 if num_rows <= FEW_ROWS * max(1, num_groups) else 128


def tiles_for(
    which: Pass, shape: ProductShape, dtype: str, device_kind: str, align_rows: int
) -> Tiles:
    """Return the measured tiles for a product's bucket, or else the default tiles, for
    groups whose rows are multiples of `align_rows`."""
    measured = measured_tiles(which, shape, dtype, device_kind)
    if measured and divides(which, measured, align_rows):
        return measured
    return default_tiles(which, shape, align_rows)


def divides(which: Pass, tiles: Tiles, align_rows: int) -> bool:
    """Return whether tiles of rows, or steps of wgrad, divide `align_rows`."""
    return align_rows % (tiles.depth if which == "wgrad" else tiles.rows) == 0


def measured_tiles(
    which: Pass, shape: ProductShape, dtype: str, device_kind: str
) -> Tiles | None:
    """Return the measured tiles for a product's bucket, or None if there are none.

    Raises ValueError for a file that cannot be read or that holds impossible tiles.
    """
    key = bucket(which, shape, dtype)
    sizes = device_file.known(device_kind)["tiles"].get(key)
    if sizes is None:
        return None
    try:
        return Tiles(**sizes)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{device_file.path_of(device_kind)} must hold tiles for '{key}', and has "
            f"{sizes}: {error}; measure them again with tools/tune_kernels.py --again"
        ) from error


def default_tiles(which: Pass, shape: ProductShape, align_rows: int) -> Tiles:
    """Return default tiles, for a product that was not measured, with groups whose rows
    are multiples of `align_rows`.

    128 x 256 reads the fewest bytes of shared memory per FLOP, among the tiles whose
    accumulators fit into the registers of two warpgroups. Fused passes get 128 columns,
    because they have two accumulators or read two more operands in the epilogue, and so
    do fp8 passes, which have a sum beside each accumulator. All fit into shared memory
    in 2-byte dtypes.
    """
    rows = 128 if which == "wgrad" or align_rows % 128 == 0 else 64
    halves = "rows" if rows == 128 else "columns"
    if which in FUSED:
        return Tiles(rows, 128, halves=halves)
    if which in FP8:
        return Tiles(rows, 128, depth=128, halves=halves)
    columns = 256 if _width(which, shape) >= 256 else 128
    return Tiles(rows, columns, halves=halves)


def _width(which: Pass, shape: ProductShape) -> int:
    """Return the number of columns of a pass's result."""
    return shape.d if which == "dgrad" else shape.f


def shared_bytes(which: Pass, tiles: Tiles, itemsize: int) -> int:
    """Return the bytes of shared memory that a block of a pass allocates, for results
    of `itemsize` bytes per value."""
    own_rows, own_columns = tiles.warpgroup_tile
    num_results = 3 if which in FUSED else 1
    alternates = num_results == 1 and own_columns // tiles.chunk % 2 == 0
    num_slots = 2 if alternates else num_results
    step = tiles.stages * tiles.depth * (1 if which in FP8 else itemsize)
    sizes = [
        step * tiles.rows,
        step * tiles.columns * (2 if which == "swiglu" else 1),
        WARPGROUPS * num_slots * own_rows * tiles.chunk * itemsize,
    ]
    num_barriers = 2 * tiles.stages
    if which in FP8:
        sizes.append(tiles.stages * tiles.rows * SCALE_BYTES)
    if which == "swiglu_dgrad":
        num_barriers += WARPGROUPS
    aligned = (-(-size // BUFFER_ALIGNMENT) for size in sizes)
    return sum(aligned) * BUFFER_ALIGNMENT + num_barriers * BARRIER_BYTES


def bucket(which: Pass, shape: ProductShape, dtype: str) -> str:
    """Return the key of a product in a file of measured tiles. Its sizes are rounded up
    to powers of two, because the best tiles of similar sizes differ little."""
    sizes = {"r": shape.rows, "d": shape.d, "f": shape.f, "g": shape.groups}
    named = [f"{name}{_power(size)}" for name, size in sizes.items()]
    return " ".join([which, dtype, *named])


def _power(size: int) -> int:
    """Return `size` rounded up to a power of two, at least 1."""
    return 1 << max(0, size - 1).bit_length()
