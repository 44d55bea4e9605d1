"""Count what aligned slots cost the grouped products, and what they save.

    python tools/bench/aligned_rows.py
    python tools/bench/aligned_rows.py --shapes olmoe_1b_7b --align 64 --json

For each shape of moejax/kernels/shapes.py, with all experts on one device and with an
eighth of them (8 devices, each with as many tokens), and for three loads:

    even    every row chooses a group at random
    zipf    rows of the groups are proportional to 1, 1/2, 1/3, ..
    worst   the most zero rows: groups of one row, and one group with all others

Nothing is timed: tiles and steps are counted as in the tables that the kernels read,
under the default tiles. docs/kernels.md shows the table and explains its columns.

Exit codes: 0 done, 2 bad input.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
from collections.abc import Iterable
from typing import Literal, get_args

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402

from moejax.kernels.grouped_dot.hopper.row_tiles import ALIGNMENT  # noqa: E402
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape, make_rows  # noqa: E402
from moejax.kernels.tuning import Tiles, default_tiles  # noqa: E402
from moejax.plan.layout import max_aligned_rows  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402

Load = Literal["even", "zipf", "worst"]
LOADS: tuple[Load, ...] = get_args(Load)
DEVICES = (1, 8)
"""Numbers of devices that the experts are split over."""
ITEMSIZE = 2
"""Bytes of a bfloat16."""
SEED = 0


@dataclasses.dataclass(frozen=True)
class Tally:
    """Work of one form of the products on some rows of groups, without padding past the
    last group."""

    tiles: int
    """Tiles of rows of the forward product. All of them take the same FLOPs."""
    part_tiles: int
    """Those of which only a part is stored."""
    part_copies: int
    """Serial copies that store these, each of one chunk of columns and a number of rows
    that is a power of two."""
    steps: int
    """Steps of wgrad through the rows of all groups, for one tile of the matrices. All
    of them take the same FLOPs."""
    blanked_steps: int
    """Those in which rows of other groups are set to zero."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Costs and savings of aligned groups on one device."""

    align_rows: int
    zero_rows: int
    """Rows between groups."""
    buffer_rows: int
    """Rows by which the buffer grows, which is the most zero rows that there can be."""
    permuted_mib: float
    """MiB that the permutations of one layer write more, forward and backward."""
    multiplied_mib: float
    """MiB that the products of one layer read and write more, forward and backward,
    where each array is read once."""
    first: Tally
    """Work of the first form of the kernels, on rows without alignment."""
    aligned: Tally
    """Work of the aligned form."""


def cost(shape: ProductShape, rows_g: np.ndarray, align_rows: int) -> Cost:
    """Return what aligning groups to a multiple costs and saves, with default tiles.

    `rows_g` are the rows of each group, with sum shape.rows. The tiles' rows must
    divide `align_rows`.
    """
    tiles, wgrad = default_tiles("forward", shape), default_tiles("wgrad", shape)
    aligned_g = -(-rows_g // align_rows) * align_rows
    most = max_aligned_rows(shape.rows, shape.groups, align_rows)
    forms = (tally(rows, shape.f, tiles, wgrad.depth) for rows in (rows_g, aligned_g))
    more, zero_rows = most - shape.rows, int(aligned_g.sum() - rows_g.sum())
    moved = moved_mib(shape, zero_rows, more)
    return Cost(align_rows, zero_rows, more, *moved, *forms)


def moved_mib(shape: ProductShape, zero_rows: int, more: int) -> tuple[float, float]:
    """Return the MiB that permutations and products of a layer move more, for zero rows
    in groups and for `more` rows of the buffer.

    Dispatch writes each row of the buffer, and the gradient of combine does so again.
    Products write every row: h, [gate, up] and y, and their gradients, with h again.
    They read rows of groups: swiglu x, forward h, swiglu_dgrad dy and [gate, up], dgrad
    the latter's gradient, and the two wgrads x, h and both gradients.
    """
    d, f = shape.d, shape.f
    permuted = 2 * more * d
    multiplied = more * (6 * f + 2 * d) + zero_rows * (4 * d + 8 * f)
    return permuted * ITEMSIZE / 2**20, multiplied * ITEMSIZE / 2**20


def tally(rows_g: np.ndarray, width: int, tiles: Tiles, depth: int) -> Tally:
    """Return the work on rows of groups, as in the tables that the kernels read.

    Results have `width` columns, and steps of wgrad have `depth` rows.
    """
    low_t, high_t = parts_of_tiles(rows_g, tiles.rows)
    own_rows, _ = tiles.warpgroup_tile
    first_p = np.arange(0, tiles.rows, own_rows)[:, None]  # parts of a tile
    rows_pt = np.minimum(high_t - first_p, own_rows) - np.maximum(low_t - first_p, 0)
    rows_pt = np.where(rows_pt < own_rows, np.maximum(rows_pt, 0), 0)
    # Each warpgroup stores all columns of its rows, or its columns of all rows.
    chunks = math.ceil(width / tiles.columns) * (tiles.columns // tiles.chunk)
    low_s, high_s = parts_of_tiles(rows_g, depth)
    return Tally(
        tiles=len(low_t),
        part_tiles=int(np.sum(high_t - low_t < tiles.rows)),
        part_copies=int(np.bitwise_count(rows_pt).sum()) * chunks,
        steps=len(low_s),
        blanked_steps=int(np.sum(high_s - low_s < depth)),
    )


def parts_of_tiles(rows_g: np.ndarray, tile_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the range of rows [low, high) of each tile that belongs to the tile's
    group, [t] each, for tiles that begin at a multiple of ALIGNMENT: those of
    row_tiles without padding. Steps of wgrad are the same, with their depth as rows."""
    end_g = np.cumsum(rows_g)
    first_g = end_g - rows_g
    base_g = first_g - first_g % ALIGNMENT
    tiles_g = np.where(rows_g > 0, -(-(end_g - base_g) // tile_rows), 0)
    group_t = np.repeat(np.arange(len(rows_g)), tiles_g)
    number_t = np.arange(len(group_t)) - (np.cumsum(tiles_g) - tiles_g)[group_t]
    start_t = base_g[group_t] + number_t * tile_rows
    low_t = np.maximum(first_g[group_t] - start_t, 0)
    return low_t, np.minimum(end_g[group_t] - start_t, tile_rows)


def draw_rows(load: Load, shape: ProductShape) -> np.ndarray:
    """Return the rows of each group under a load, int64 [g]."""
    if load == "even":
        share_g = np.full(shape.groups, 1 / shape.groups)
        return np.random.default_rng(SEED).multinomial(shape.rows, share_g)
    if load == "zipf":
        return make_rows("zipf", shape.rows, shape.groups, SEED).astype(np.int64)
    rows_g = np.ones(shape.groups, np.int64)
    rows_g[-1] += shape.rows - shape.groups
    return rows_g


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", default="all", help="names with commas between")
    parser.add_argument(
        "--align",
        type=int,
        choices=(64, 128),
        help="multiple (default: the rows of a tile of each shape)",
    )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    rows = []
    print(HEADER)
    for name in read_shapes(args.shapes):
        for devices in DEVICES:
            groups = MODEL_SHAPES[name].groups // devices
            shape = dataclasses.replace(MODEL_SHAPES[name], groups=groups)
            tile_rows = default_tiles("forward", shape).rows
            align_rows = args.align or tile_rows
            if align_rows % tile_rows:
                raise ValueError(
                    f"--align {align_rows} is no multiple of the {tile_rows} rows of "
                    f"a tile of {name} on {devices}: use --align {tile_rows}, or none"
                )
            found = {
                load: cost(shape, draw_rows(load, shape), align_rows) for load in LOADS
            }
            print(line(name, devices, shape, list(found.values())))
            about = {"shape": name, "devices": devices}
            rows += [
                about | {"load": load} | dataclasses.asdict(each)
                for load, each in found.items()
            ]
    emit({"rows": rows}, args.json)
    return DONE


def read_shapes(names: str) -> list[str]:
    """Return names of shapes. Raises ValueError for an unknown one."""
    chosen = list(MODEL_SHAPES) if names == "all" else names.split(",")
    for name in set(chosen) - set(MODEL_SHAPES):
        raise ValueError(f"--shapes={name} is not one of {', '.join(MODEL_SHAPES)}")
    return chosen


HEADER = """\
| shape | devices | rows a slot | multiple | zero rows, % | buffer, % | MiB more | \
rows FLOPs, % | wgrad FLOPs, % | part tiles, % | serial copies | blanked steps, % |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""


def line(name: str, devices: int, shape: ProductShape, found: list[Cost]) -> str:
    """Return a row of the table, from the costs under LOADS."""
    forms = [(cost.first, cost.aligned) for cost in found]
    cells = [
        name, devices, shape.rows // shape.groups, found[0].align_rows,
        _each(f"{100 * cost.zero_rows / shape.rows:.1f}" for cost in found),
        f"{100 * found[0].buffer_rows / shape.rows:.1f}",
        f"{found[0].permuted_mib:.0f} / {found[0].multiplied_mib:.0f}",
        _each(f"{100 * (a.tiles / f.tiles - 1):+.1f}" for f, a in forms),
        _each(f"{100 * (a.steps / f.steps - 1):+.1f}" for f, a in forms),
        _each(f"{100 * f.part_tiles / f.tiles:.0f}" for f, _ in forms),
        _each(f.part_copies for f, _ in forms),
        _each(f"{100 * f.blanked_steps / f.steps:.0f}" for f, _ in forms),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _each(values: Iterable) -> str:
    return " / ".join(map(str, values))


if __name__ == "__main__":
    sys.exit(main())
