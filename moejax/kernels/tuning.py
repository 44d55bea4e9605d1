"""Tile sizes of the Hopper kernels: measured ones per device, else default ones.

Measured sizes are in the file of the device (device_file.py), by bucket: the pass, the
dtype, and each size of the product rounded up to a power of two.
"""

import dataclasses
from typing import Literal, get_args

from moejax.kernels import device_file
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape

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
EDGE_ROWS, MIN_CHUNK = 2, 32
"""TMA reads shared memory from multiples of 128 bytes only, which are two rows of a
chunk of 32 columns in 2-byte dtypes. So the buffer through which part of a tile's rows
is stored has two rows more than the tile, to shift rows by one where needed."""
DEFAULT_STAGES = 4
"""Default number of ring stages: three copies are in flight while one step is
multiplied."""


MIN_TURN = 64 * 128
"""Minimum number of values of a tile that one warpgroup computes in turns. Smaller ones
would read more shared memory than the tensor cores can wait for."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of a grouped product, for a block with two computing warpgroups.

    halves='turns', `math`, `barriers` and `cluster` choose second forms of a kernel
    (docs/kernels.md), which are off by default.
    """

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
    halves: Literal["rows", "columns", "turns"] = "rows"
    """Dim of the tile that is split between the two computing warpgroups. 'turns'
    splits none: the warpgroups compute whole tiles, in turns."""
    chunk: int = 32
    """Number of columns that are written from registers to the result at a time."""
    math: Literal["precise", "approx"] = "precise"
    """Whether exp and division are approximate, in the passes with a part of SwiGLU."""
    barriers: Literal["auto", "own"] = "auto"
    """Who orders the threads of a warpgroup around copies and stores: the compiler
    ('auto'), or the kernel's code alone."""
    cluster: Literal[1, 2] = 1
    """Number of blocks that compute tiles side by side and copy their common operand,
    x, once for all of them."""
    spared: int = 0
    """Number of multiprocessors that get no block, and are left to collectives. No
    search varies it: it depends on what runs at the same time."""

    def __post_init__(self) -> None:
        self._check_choices()
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

    def _check_choices(self) -> None:
        for name in ("halves", "math", "barriers", "cluster"):
            known = get_args(type(self).__annotations__[name])
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {known}"
                )
        if self.spared < 0:
            raise ValueError(f"spared={self.spared} must be at least 0")
        if self.takes_turns and self.rows * self.columns < MIN_TURN:
            raise ValueError(
                f"a tile of {self.rows} x {self.columns} is too small for "
                f"halves='turns': it must have at least {MIN_TURN} values"
            )

    @property
    def warpgroup_tile(self) -> tuple[int, int]:
        """Number of rows and columns of the tile that one warpgroup computes."""
        if self.takes_turns:
            return self.rows, self.columns
        if self.halves == "rows":
            return self.rows // 2, self.columns
        return self.rows, self.columns // 2

    @property
    def takes_turns(self) -> bool:
        """Whether each computing warpgroup computes whole tiles."""
        return self.halves == "turns"

    @property
    def is_second_form(self) -> bool:
        """Whether the tiles choose a second form of the kernel."""
        return self != self.first_form()

    def first_form(self) -> "Tiles":
        """Return these tiles without any choice of a second form: the kernel then is
        the one that default tiles have. The result takes no more shared memory."""
        plain = {"math": "precise", "barriers": "auto", "cluster": 1}
        if not self.takes_turns:
            return dataclasses.replace(self, **plain)
        # Both warpgroups share a tile, which 64 rows let them do by columns only.
        columns = 128 if (self.rows, self.columns) == (64, 192) else self.columns
        halves = "rows" if self.rows == 128 else "columns"
        own_columns = columns if halves == "rows" else columns // 2
        chunk = self.chunk if own_columns % self.chunk == 0 else MIN_CHUNK
        cut = {"columns": columns, "halves": halves, "chunk": chunk}
        return dataclasses.replace(self, **plain, **cut)


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


def tiles_for(which: Pass, shape: ProductShape, dtype: str, device_kind: str) -> Tiles:
    """Return the measured tiles for a product's bucket, or else the default tiles."""
    measured = measured_tiles(which, shape, dtype, device_kind)
    return measured or default_tiles(which, shape)


def require_measured_tiles(
    which: Pass, shape: ProductShape, dtype: str, device_kind: str
) -> Tiles:
    """Return the measured tiles for a product's bucket. Benchmarks use it: where there
    are none, the ValueError names the command that measures them."""
    tiles = measured_tiles(which, shape, dtype, device_kind)
    if tiles is None:
        key = bucket(which, shape, dtype)
        names = [n for n, s in MODEL_SHAPES.items() if bucket(which, s, dtype) == key]
        how = (
            f"run `python tools/tune_kernels.py --shapes {names[0]} --passes {which} "
            f"--dtype {dtype}` on that device"
            if names
            else f"name {shape} in moejax/kernels/shapes.py, then run "
            "`python tools/tune_kernels.py` on that device"
        )
        raise ValueError(
            f"{device_file.path_of(device_kind)} has no measured tiles for '{key}': "
            f"{how}"
        )
    return tiles


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


def default_tiles(which: Pass, shape: ProductShape) -> Tiles:
    """Return default tiles, for a product that was not measured.

    128 x 256 reads the fewest bytes of shared memory per FLOP, among the tiles whose
    accumulators fit into the registers of two warpgroups. Groups of few rows would fill
    only a part of 128 rows and get 64. Fused passes get 128 columns, because they have
    two accumulators or read two more operands in the epilogue, and so do fp8 passes,
    which have a sum beside each accumulator. All fit into shared memory in 2-byte
    dtypes.
    """
    mean_rows = shape.rows // max(1, shape.groups)
    rows = 64 if mean_rows <= 192 and which != "wgrad" else 128
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


def has_whole_tiles(which: Pass, tiles: Tiles, align_rows: int) -> bool:
    """Return whether tiles of rows, or steps of wgrad, divide `align_rows`, so that
    groups whose rows are multiples of it consist of whole ones."""
    rows = tiles.depth if which == "wgrad" else tiles.rows
    return align_rows % rows == 0


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
    num_barriers = (3 if tiles.takes_turns else 2) * tiles.stages
    if which == "wgrad":
        num_barriers += not tiles.takes_turns
    else:
        sizes.append(WARPGROUPS * (own_rows + EDGE_ROWS) * tiles.chunk * itemsize)
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
