"""Predict the time of a grouped product's Hopper kernel, and say what limits it.

    python tools/bench/pipeline_model.py
    python tools/bench/pipeline_model.py --shapes deepseek_v3 --skew zipf --l2 narrow

The model counts, it does not fit: no constant was chosen to match a measurement. One
choice was: that of H100 before NARROW, whose L2 cache measured kernels exceed. A stage
takes as long as the slowest of the units that work on it:

    tensor   the tensor cores multiply it
    shared   WGMMA reads its operands from shared memory, where TMA has written them
    l2       TMA copies its operands from the L2 cache (--l2: see H100 and NARROW)
    latency  a copy takes LATENCY cycles, and `stages` - 1 of them are under way
    issue    the copying warpgroup issues its instructions

A tile has its stages, and then the epilogue: registers -> shared memory -> result, a
chunk at a time. Copies of the next tile run meanwhile, products do not, except where
warpgroups take turns. Blocks take every 132nd tile, and the last one to end decides;
`Tiles.spared` multiprocessors have none. No kernel is faster than its bytes from and to
HBM. docs/kernels.md has the predictions.

Predictions are of a clock of 1.755 GHz, which a GPU lowers under a load of products to
stay within its power. So they are bounds. What tokamax measured on an H100 for the same
tiles is 0.6 to 1.05 of them; a test compares.

Exit codes: 0 done, 2 bad input.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
from typing import NamedTuple

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from moejax.kernels.shapes import (  # noqa: E402
    MODEL_SHAPES,
    SKEWS,
    ProductShape,
    make_rows,
)
from moejax.kernels.tuning import (  # noqa: E402
    WARPGROUPS,
    Pass,
    Tiles,
    default_tiles,
)
from tools.bench import program  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402

ITEMSIZE = 2
"""Bytes of a value of bfloat16 or float16."""
ALIGNMENT = 8
"""Divisor of the first row of every tile (row_tiles.py)."""
WGMMA_ROWS, WGMMA_DEPTH = 64, 16
"""Rows and depth of one WGMMA; it has up to 256 columns."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Speeds of an H100 SXM."""

    num_cores: int = 132
    """Multiprocessors (H100 white paper)."""
    clock_hz: float = 1.755e9
    """Clock for which the other figures hold. The data sheet's 989 TFLOP/s are those of
    1.83 GHz, and the boost clock is 1.98 GHz."""
    flops_per_clock: int = 4096
    """FLOPs of a multiprocessor's tensor cores in a cycle: 989.4e12 / 132 / 1.83e9."""
    shared_bytes_per_clock: int = 128
    """Bytes that a multiprocessor's shared memory reads or writes in a cycle: 32 banks
    of 4 bytes (CUDA programming guide)."""
    l2_bytes_per_clock: int = 132 * 64
    """Bytes that the L2 cache delivers in a cycle to all multiprocessors, where 64 to
    each are the limit: requests of several for the same line are joined before they
    reach the cache (A100 white paper)."""
    l2_bytes: int = 50 * 2**20
    hbm_bytes_per_sec: float = 3.35e12
    """Data sheet."""
    instructions_per_clock: int = 4
    """Instructions that a multiprocessor issues in a cycle, one for each of its four
    schedulers."""


H100 = Gpu()
NARROW = Gpu(l2_bytes_per_clock=5120)
"""An H100 whose L2 cache reads no line for several multiprocessors at once: 5120 bytes
in a cycle is what that of the A100 reads (its white paper; the H100's gives no number).
tokamax's kernels reach up to 1.3 times what this one allows."""
LATENCY = 1000
"""Cycles from the start of a TMA copy until its data are in shared memory. An
assumption between a hit in the L2 cache and a read of HBM under load."""
COPY_CYCLES = {2: 106, 3: 133}
"""Cycles in which the copying warpgroup issues a stage of two or three copies (SASS:
docs/kernels.md)."""
BARRIER_CYCLES = 30
"""Cycles of a barrier among the 128 threads of a warpgroup. An assumption."""
BARRIERS = {"auto": (1, 4), "own": (0, 2)}
"""Barriers before each copy of a stage, and in each chunk of an epilogue, by who sets
them (SASS)."""
CHUNK_CYCLES, PART_CYCLES = 200, 600
"""Cycles that a chunk of a whole tile waits for room in shared memory, for the fence
and for the start of its copy; and a chunk of a part of a tile, whose copies are serial.
Assumptions."""
INSTRUCTIONS = {
    "forward": (3, 6),
    "dgrad": (3, 6),
    "wgrad": (3, 3),
    "swiglu": (26, 44),
    "swiglu_dgrad": (42, 61),
}
"""Instructions of an epilogue for each value of a whole tile, and of a part of one. Of
whole tiles they are those outside of the loops where groups are aligned, which have no
other epilogue, less 600; and of parts, what the first form has more (SASS)."""
INSTRUCTIONS_APPROX = {"swiglu": (18, 36), "swiglu_dgrad": (34, 53)}
"""The same where exp and division are approximate."""
RESULTS = {"swiglu": 3, "swiglu_dgrad": 3}
"""Number of results of a pass, if there are several."""


class Limits(NamedTuple):
    """Cycles of one stage of a block, by the unit that works on it."""

    tensor: float
    shared: float
    l2: float
    latency: float
    issue: float

    @property
    def compute(self) -> float:
        """Cycles until the stage is multiplied, once its operands are there."""
        return max(self.tensor, self.shared)

    @property
    def copy(self) -> float:
        """Cycles until the next stage is there."""
        return max(self.l2, self.latency, self.issue, self.shared)


class Prediction(NamedTuple):
    """Predicted time of a product."""

    msec: float
    tflops: float
    """Rate of the useful FLOPs: rows of groups, not those of tiles."""
    limit: str
    """The unit that takes longest for a stage, or hbm."""
    stage: Limits
    shares: dict[str, float]
    """Share of the time that would be saved without each loss: `fill`, tiles that are
    partly empty; `epilogue`; `waves`, blocks that wait for the last one."""


def predict(
    which: Pass,
    shape: ProductShape,
    tiles: Tiles,
    rows_g: np.ndarray,
    *,
    align_rows: int = 0,
    gpu: Gpu = H100,
) -> Prediction:
    """Return the predicted time of a product whose groups have these rows.

    With `align_rows` every group begins at a multiple of that number of rows, with zero
    rows between: they are computed, no tile stores a part, and no step is blanked.
    """
    stage = stage_limits(which, tiles, gpu)
    flops = 2 * int(rows_g.sum()) * shape.d * shape.f * num_products(which)
    if align_rows:
        rows_g = -(-rows_g // align_rows) * align_rows
    cost = tile_cycles(which, shape, tiles, rows_g, stage, gpu, bool(align_rows))
    blocks = (gpu.num_cores - tiles.spared) // tiles.cluster
    busy_b = np.bincount(np.arange(len(cost.cycles_t)) % blocks, cost.cycles_t, blocks)
    cycles = busy_b.max() + LATENCY
    hbm = hbm_bytes(which, shape, tiles, rows_g, gpu)
    hbm_cycles = hbm / gpu.hbm_bytes_per_sec * gpu.clock_hz
    seconds = max(cycles, hbm_cycles) / gpu.clock_hz
    shares = {
        "fill": 1 - flops / cost.computed,
        "epilogue": cost.epilogue / float(cost.cycles_t.sum()),
        "waves": 1 - float(busy_b.mean() / cycles),
    }
    units = stage._asdict()
    limit = max(units, key=units.get)
    if hbm_cycles > cycles:
        limit = "hbm"
    msec, tflops = float(1e3 * seconds), float(flops / seconds / 1e12)
    return Prediction(msec, tflops, limit, stage, shares)


def stage_limits(which: Pass, tiles: Tiles, gpu: Gpu = H100) -> Limits:
    """Return the cycles of one stage, by unit."""
    products = num_products(which)
    x_bytes = tiles.rows * tiles.depth * ITEMSIZE
    w_bytes = products * tiles.columns * tiles.depth * ITEMSIZE
    own_rows, own_columns = tiles.warpgroup_tile
    readers = 1 if tiles.takes_turns else WARPGROUPS
    wgmmas = readers * products * own_rows // WGMMA_ROWS * tiles.depth // WGMMA_DEPTH
    read = wgmmas * (WGMMA_ROWS + own_columns) * WGMMA_DEPTH * ITEMSIZE
    flops = 2 * products * tiles.rows * tiles.columns * tiles.depth
    barriers, _ = BARRIERS[tiles.barriers]
    copies = 1 + products
    return Limits(
        tensor=flops / gpu.flops_per_clock,
        shared=(read + x_bytes + w_bytes) / gpu.shared_bytes_per_clock,
        l2=(x_bytes / tiles.cluster + w_bytes) * gpu.num_cores / gpu.l2_bytes_per_clock,
        latency=LATENCY / (tiles.stages - 1),
        issue=COPY_CYCLES[copies] + barriers * copies * BARRIER_CYCLES,
    )


class TileCycles(NamedTuple):
    """Cycles of all tiles of a product."""

    cycles_t: np.ndarray
    """Cycles of each tile, or of the tiles of a cluster, in the order of the walk."""
    epilogue: float
    """Cycles of all epilogues that nothing hides."""
    computed: float
    """FLOPs of whole tiles."""


def tile_cycles(
    which: Pass,
    shape: ProductShape,
    tiles: Tiles,
    rows_g: np.ndarray,
    stage: Limits,
    gpu: Gpu,
    is_aligned: bool,
) -> TileCycles:
    """Return the cycles of the tiles of a product."""
    first_g = np.cumsum(rows_g) - rows_g
    first_g = np.zeros_like(first_g) if is_aligned else first_g % ALIGNMENT
    if which == "wgrad":
        steps_g = -(-(rows_g + first_g) // tiles.depth)
        is_cut_g = (first_g > 0).astype(int) + ((rows_g + first_g) % tiles.depth > 0)
        # Threads read and write the stage in shared memory.
        moved = 2 * (tiles.rows + tiles.columns) * tiles.depth * ITEMSIZE
        blank = 0 if is_aligned else moved / gpu.shared_bytes_per_clock + CHUNK_CYCLES
        high = -(-shape.d // tiles.rows)
        wide = math.ceil(math.ceil(shape.f / tiles.columns) / tiles.cluster)
        steps_t = np.repeat(np.sort(steps_g)[::-1], high * wide)
        extra_t = np.repeat(is_cut_g[np.argsort(-steps_g)], high * wide) * blank
        is_part_t = np.zeros(len(steps_t), bool)
    else:
        width, depth = (shape.d, shape.f) if which == "dgrad" else (shape.f, shape.d)
        wide = math.ceil(math.ceil(width / tiles.columns) / tiles.cluster)
        tiles_g = -(-(rows_g + first_g) // tiles.rows)
        ends = (first_g > 0).astype(int) + ((rows_g + first_g) % tiles.rows > 0)
        parts_g = np.zeros_like(tiles_g) if is_aligned else np.minimum(tiles_g, ends)
        group_t = np.repeat(np.arange(len(rows_g)), tiles_g)
        number_t = np.arange(len(group_t)) - (np.cumsum(tiles_g) - tiles_g)[group_t]
        is_part_t = np.repeat(number_t < parts_g[group_t], wide)
        steps_t = np.full(len(is_part_t), -(-depth // tiles.depth))
        extra_t = 0
    steps_flops = 2 * num_products(which) * tiles.rows * tiles.columns * tiles.depth
    computed = float(steps_t.sum()) * steps_flops * tiles.cluster
    epilogue_t = np.where(
        is_part_t,
        epilogue_cycles(which, tiles, gpu, is_part=True),
        epilogue_cycles(which, tiles, gpu, is_part=False),
    )
    products_t = steps_t * stage.compute + extra_t
    copies_t = steps_t * stage.copy
    if tiles.takes_turns:
        chain_t = (products_t + epilogue_t) / WARPGROUPS
        cycles_t = np.maximum(np.maximum(products_t, chain_t), copies_t)
        shown = np.maximum(0, cycles_t - np.maximum(products_t, copies_t)).sum()
        return TileCycles(cycles_t, float(shown), computed)
    ahead = np.minimum(epilogue_t, tiles.stages * stage.copy)
    cycles_t = np.maximum(products_t + epilogue_t, copies_t + epilogue_t - ahead)
    shown = (cycles_t - np.maximum(products_t, copies_t)).sum()
    return TileCycles(cycles_t, float(shown), computed)


def epilogue_cycles(
    which: Pass, tiles: Tiles, gpu: Gpu = H100, *, is_part: bool
) -> float:
    """Return the cycles in which a tile's sums leave the registers.

    The warpgroups of a tile do so at the same time: their instructions share the
    schedulers, and their chunks the waits.
    """
    chunks = tiles.warpgroup_tile[1] // tiles.chunk
    _, barriers = BARRIERS[tiles.barriers]
    per_value = INSTRUCTIONS[which]
    if tiles.math == "approx":
        per_value = INSTRUCTIONS_APPROX.get(which, per_value)
    per_value = per_value[is_part]
    threads = 32 * gpu.instructions_per_clock
    issue = tiles.rows * tiles.columns * per_value / threads
    results = RESULTS.get(which, 1)
    moved = 2 * results * tiles.rows * tiles.columns * ITEMSIZE
    wait = (PART_CYCLES if is_part else CHUNK_CYCLES) * results
    waits = chunks * (wait + barriers * BARRIER_CYCLES)
    return max(issue, moved / gpu.shared_bytes_per_clock) + waits


def hbm_bytes(
    which: Pass,
    shape: ProductShape,
    tiles: Tiles,
    rows_g: np.ndarray,
    gpu: Gpu = H100,
) -> float:
    """Return the bytes of a product from and to HBM.

    Blocks that run at the same time read the same operands at the same time: `span`
    tiles of rows by as many tiles of columns as there are blocks for. What a band reads
    again is in the L2 cache, if the band's rows (in wgrad the group's operands) fit
    into half of it.
    """
    rows, d, f = float(rows_g.sum()), shape.d, shape.f
    width, depth = (d, f) if which == "dgrad" else (f, d)
    columns = -(-width // tiles.columns)
    together = gpu.num_cores / tiles.span
    passes = max(1, columns / together)
    if which == "wgrad":
        groups = max(1, int((rows_g > 0).sum()))
        is_kept = rows / groups * (d + f) * ITEMSIZE < gpu.l2_bytes / 2
        bands = 1 if is_kept else -(-d // (tiles.rows * tiles.span))
        passes = 1 if is_kept else passes
        return ITEMSIZE * (rows * (d * passes + f * bands) + shape.groups * d * f)
    matrix = depth * width * num_products(which)
    bands_g = -(-rows_g // (tiles.rows * tiles.span))
    if tiles.rows * tiles.span * depth * ITEMSIZE < gpu.l2_bytes / 2:
        passes = 1
    moved = rows * depth * passes + float(bands_g.sum()) * matrix
    values = {"swiglu": 3, "swiglu_dgrad": 5}.get(which, 1)  # gate and up are read too
    return ITEMSIZE * (moved + values * rows * width)


def num_products(which: Pass) -> int:
    """Return the number of products of a pass."""
    return 2 if which == "swiglu" else 1


def nearly_even(shape: ProductShape, seed: int = 0) -> np.ndarray:
    """Return the rows of groups [g] of a balanced router: every row draws its group."""
    share_g = np.full(shape.groups, 1 / shape.groups)
    return np.random.default_rng(seed).multinomial(shape.rows, share_g)


GPUS = {"joined": H100, "narrow": NARROW}
COLUMNS = ("shape", "pass", "tiles", "TFLOP/s", "limit", "fill", "epilogue", "waves")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--shapes", default="all", help="shapes with commas between")
    add("--passes", default="all", help="passes with commas between")
    add(
        "--skew",
        choices=("balanced", *SKEWS),
        default="balanced",
        help="rows of groups: each row draws its group, or as in the benchmark",
    )
    add("--l2", choices=tuple(GPUS), default="joined", help="model of the L2 cache")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    from tools.compiled import kernel_cases

    names = program.parse_names("shapes", args.shapes, MODEL_SHAPES)
    passes = program.parse_names("passes", args.passes, kernel_cases.PRODUCTS)
    forms = [form for form in kernel_cases.FORMS if form != "first"]
    print("modelled, not measured: the gain of each form over the first")
    columns = (*COLUMNS, *forms)
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    rows = []
    for name in names:
        for which in passes:
            rows.append(compare(name, which, args.skew, GPUS[args.l2]))
            print(line(rows[-1], forms))
    emit(rows, args.json)
    return DONE


def compare(name: str, which: Pass, skew: str, gpu: Gpu) -> dict:
    """Return the prediction for the first form of a product, and the speed of each
    other form over it."""
    from tools.compiled import kernel_cases

    shape = MODEL_SHAPES[name]
    rows_g = nearly_even(shape)
    if skew != "balanced":
        rows_g = make_rows(skew, shape.rows, shape.groups, 0)
    tiles = default_tiles(which, shape)
    first = predict(which, shape, tiles, rows_g, gpu=gpu)
    msec = {}
    for form, passes in kernel_cases.FORMS.items():
        if which not in passes or form == "first":
            continue
        fields, is_aligned = passes[which]
        other = kernel_cases.changed_tiles(tiles, fields)
        if other is not None:
            align = default_tiles("forward", shape).rows if is_aligned else 0
            found = predict(which, shape, other, rows_g, align_rows=align, gpu=gpu)
            msec[form] = found.msec
    return {
        "shape": name,
        "pass": which,
        "tiles": f"{tiles.rows} x {tiles.columns}",
        "tflops": first.tflops,
        "limit": first.limit,
        "stage_cycles": first.stage._asdict(),
        "shares": first.shares,
        "speed": {form: first.msec / value for form, value in msec.items()},
    }


def line(row: dict, forms: list[str]) -> str:
    """Return a row of the table."""
    cells = [row["shape"], row["pass"], row["tiles"], f"{row['tflops']:.0f}"]
    cells += [row["limit"], *(f"{share:.0%}" for share in row["shares"].values())]
    for form in forms:
        speed = row["speed"].get(form)
        cells.append("-" if speed is None else f"{speed - 1:+.0%}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
