"""Tile sizes of kernels: measured ones as data per device, a rule where there are none.

    tuned/<device>.json     {"tiles": {"forward bfloat16 r16384 d4096 f16384 g8":
                                       {"rows": 128, "columns": 256, ..}, ..}}

A key is a bucket: the pass, the dtype, and each size up to the next power of two. No
file has been measured on a GPU yet: `tools/tune_kernels.py` writes one.
"""

import dataclasses
import functools
import json
import pathlib
import re
from typing import Literal, get_args

from moejax.kernels.shapes import MODEL_SHAPES, ProductShape

Pass = Literal[
    "forward", "dgrad", "wgrad", "swiglu", "swiglu_dgrad", "fp8_forward", "fp8_dgrad"
]
PASSES: tuple[Pass, ...] = get_args(Pass)
FUSED: tuple[Pass, ...] = ("swiglu", "swiglu_dgrad")
FP8: tuple[Pass, ...] = ("fp8_forward", "fp8_dgrad")
FOLDER = pathlib.Path(__file__).parent / "tuned"

SHARED_BYTES = 227 * 1024
"""That a block may have on Hopper."""
BUFFER_ALIGNMENT = 1024
"""Bytes, of each array in shared memory: where the pattern of a swizzle repeats."""
BARRIER_BYTES, SCALE_BYTES = 8, 4
WARPGROUPS = 2
"""That multiply; one more copies."""
EDGE_ROWS, MIN_CHUNK = 2, 32
"""TMA takes shared memory from multiples of 128 bytes: two rows of a chunk of 32, in
2-byte dtypes. So single rows leave through a chunk of two rows more than it has."""
RULE_STAGES = 4
"""Three copies in flight while a step is multiplied."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a grouped product is cut for a block of two computing warpgroups."""

    rows: int
    """Of a block's tile of the result."""
    columns: int
    """Of the same; in `swiglu` of each of gate and up."""
    depth: int = 64
    """Of one step of the contraction: 128 bytes, the widest swizzle; 128 in fp8."""
    stages: int = RULE_STAGES
    """Steps that shared memory holds."""
    span: int = 8
    """Tiles of rows that blocks walk through before the next columns: for the L2."""
    halves: Literal["rows", "columns"] = "rows"
    """What the two warpgroups share out."""
    chunk: int = 32
    """Columns that leave registers at a time."""

    def __post_init__(self) -> None:
        own_rows, own_columns = self.own
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
            # A slot is given back when the step after has begun: it needs its own.
            raise ValueError(f"stages={self.stages} must be at least 2")

    @property
    def own(self) -> tuple[int, int]:
        """Rows and columns of one of the two warpgroups."""
        if self.halves == "rows":
            return self.rows // 2, self.columns
        return self.rows, self.columns // 2


def layer_products(
    shape: ProductShape, *, is_fp8: bool = False
) -> list[tuple[Pass, ProductShape]]:
    """What grouped_swiglu of rows x d -> f and its gradient run: the first product has
    gate and up, and the second is turned round."""
    wide = dataclasses.replace(shape, f=2 * shape.f)
    back = dataclasses.replace(shape, d=shape.f, f=shape.d)
    if is_fp8:
        plain: list[tuple[Pass, ProductShape]] = [("wgrad", wide), ("wgrad", back)]
        return [(which, of) for which in FP8 for of in (wide, back)] + plain
    return [
        ("swiglu", shape),
        ("forward", back),
        ("swiglu_dgrad", shape),
        ("dgrad", wide),
        ("wgrad", wide),
        ("wgrad", back),
    ]


def tiles_for(which: Pass, shape: ProductShape, dtype: str, device_kind: str) -> Tiles:
    """The measured tiles of this bucket, or else the rule's."""
    return tuned(which, shape, dtype, device_kind) or by_rule(which, shape)


def require(which: Pass, shape: ProductShape, dtype: str, device_kind: str) -> Tiles:
    """The measured tiles of this bucket, for benchmarks. Raises ValueError, which names
    the command that measures it, where there are none."""
    found = tuned(which, shape, dtype, device_kind)
    if found is None:
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
            f"{tuned_file(device_kind)} has no measured tiles for '{key}': {how}"
        )
    return found


def tuned(
    which: Pass, shape: ProductShape, dtype: str, device_kind: str
) -> Tiles | None:
    """None where nothing was measured. Raises ValueError for a file that is none, or
    that has tiles which cannot be."""
    path, key = tuned_file(device_kind), bucket(which, shape, dtype)
    found = _table(path).get(key)
    if found is None:
        return None
    try:
        return Tiles(**found)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must hold tiles for '{key}', and has {found}: {error}; measure it "
            "with tools/tune_kernels.py --again"
        ) from error


def by_rule(which: Pass, shape: ProductShape) -> Tiles:
    """Without a measurement. 128 x 256 reads least from shared memory for a FLOP that
    two warpgroups' registers can hold; groups of few rows would fill a part of it, and
    take lower tiles. The fused passes have two accumulators, or two more operands in
    the epilogue, and half of the columns; those in fp8 a sum beside each accumulator.
    All fit in 2-byte dtypes."""
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
    return shape.d if which == "dgrad" else shape.f


def shared_bytes(which: Pass, tiles: Tiles, itemsize: int) -> int:
    """Shared memory of a block: what the kernels allocate for results of this size."""
    own_rows, own_columns = tiles.own
    num_results = 3 if which in FUSED else 1
    in_turns = num_results == 1 and own_columns // tiles.chunk % 2 == 0
    num_slots = 2 if in_turns else num_results
    step = tiles.stages * tiles.depth * (1 if which in FP8 else itemsize)
    sizes = [
        step * tiles.rows,
        step * tiles.columns * (2 if which == "swiglu" else 1),
        WARPGROUPS * num_slots * own_rows * tiles.chunk * itemsize,
    ]
    num_barriers = 2 * tiles.stages
    if which == "wgrad":
        num_barriers += 1
    else:
        sizes.append(WARPGROUPS * (own_rows + EDGE_ROWS) * tiles.chunk * itemsize)
    if which in FP8:
        sizes.append(tiles.stages * tiles.rows * SCALE_BYTES)
    if which == "swiglu_dgrad":
        num_barriers += WARPGROUPS
    aligned = (-(-size // BUFFER_ALIGNMENT) for size in sizes)
    return sum(aligned) * BUFFER_ALIGNMENT + num_barriers * BARRIER_BYTES


def bucket(which: Pass, shape: ProductShape, dtype: str) -> str:
    """Sizes up to the next power of two: of a bucket the tiles differ little."""
    sizes = {"r": shape.rows, "d": shape.d, "f": shape.f, "g": shape.groups}
    named = [f"{name}{_power(size)}" for name, size in sizes.items()]
    return " ".join([which, dtype, *named])


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def tuned_file(device_kind: str) -> pathlib.Path:
    """'NVIDIA H200' has tuned/nvidia_h200.json."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()) + ".json")


@functools.cache
def _table(path: pathlib.Path) -> dict[str, dict]:
    return read(path)["tiles"] if path.is_file() else {}


def read(path: pathlib.Path) -> dict:
    """A file of measured tiles. Raises ValueError for one that is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["tiles"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must hold tiles by bucket, and does not ({error!r}): write it "
            "with tools/tune_kernels.py"
        ) from error
    return record
