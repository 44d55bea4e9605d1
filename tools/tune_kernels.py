"""Find the fastest tiles of the Hopper kernels on this machine's GPU, and store them.

    python tools/tune_kernels.py [--shapes olmoe_1b_7b] [--passes forward,wgrad]
    python tools/tune_kernels.py --layer --limit_sec 500 --json
    python tools/tune_kernels.py --gin_file configs/olmoe_1b_7b.gin

Tiles are searched for one bucket (a pass and a shape) after another: for each pass of
each shape of moejax/kernels/shapes.py, with --layer for each product that a layer of
these widths runs in training, and with --gin_file for those of a configuration's layer.

The default tiles come first. A sample of their results must equal the definition in
float64, and all results of other tiles must equal theirs. Then all sizes of a tile are
tried, likely ones first, and tiles that differ from the fastest in one setting, until
none is faster. The fastest are stored in moejax/kernels/tuned/<device>.json after every
bucket. A run skips the buckets that the file has: delete it to measure again. The
remaining buckets share the remaining time evenly. A bucket whose search was cut off is
marked `is_whole: false`.

Exit codes: 0 done, or the time is up; 1 the default tiles of a bucket compute something
else; 2 bad input; 3 there is no Hopper GPU here.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from moejax.kernels import device_file, tuning  # noqa: E402
from moejax.kernels.cases import TOLERANCES  # noqa: E402
from moejax.kernels.device import is_hopper  # noqa: E402
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape, make_rows  # noqa: E402
from moejax.kernels.tuning import FP8, Pass, Tiles  # noqa: E402
from moejax.plan.layout import max_aligned_rows  # noqa: E402
from tools.bench import grouped_dot_cases, program  # noqa: E402
from tools.bench.timer import median_sec  # noqa: E402
from tools.launch.arguments import add_gin_flags, new_parser  # noqa: E402
from train.launch.program import CRASHED, DONE, emit  # noqa: E402
from train.logs.counter import counted  # noqa: E402

DTYPE = "bfloat16"
"""Dtype of all arrays, unless a configuration names another one."""
ROWS, COLUMNS = (64, 128, 256), (64, 128, 192, 256)
MAX_STAGES = 6
MAX_SUMS = 192
"""Maximum number of a thread's 232 registers that hold sums. With more, the compiler
spills registers."""
FP8_DEPTH = 128
OPERAND_ROWS = 64
"""Number of rows and columns of a tile that is taken to wait for its operands as long
as it multiplies."""
BATCH = 4
"""Number of candidates that are compiled at the same time, and then timed in turns."""
TURNS, CALLS_PER_TURN = 5, 10


class Bucket(NamedTuple):
    """A pass on a shape, to find tiles for."""

    name: str
    which: Pass
    shape: ProductShape
    """Its rows are those of the buffer, padding included."""
    num_rows: int
    """Number of rows that groups have, without padding."""
    align_rows: int
    dtype: str = DTYPE

    @property
    def key(self) -> str:
        return tuning.bucket(self.which, self.shape, self.dtype)


class Case(NamedTuple):
    """Inputs of a bucket, and the results of the default tiles."""

    which: Pass
    arguments: tuple
    expected: Any


class WrongKernel(Exception):
    """Error raised when the kernel computes wrong values with the default tiles."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return program.run(work, args, is_gpu=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--shapes", default="all", help="shapes with commas between, by their names")
    add("--passes", default="all", help="passes with commas between")
    add("--layer", action="store_true", help="tune the products of a layer in training")
    add_gin_flags(parser, default="none: --shapes are tuned")
    add("--limit_sec", type=float, default=300, help="limit of the search, in seconds")
    add(
        "--out",
        type=pathlib.Path,
        help="file for the tiles (default: moejax/kernels/tuned/<device>.json)",
    )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    names = program.parse_names("shapes", args.shapes, MODEL_SHAPES)
    passes = program.parse_names("passes", args.passes, tuning.PASSES)
    if not args.limit_sec > 0:
        raise ValueError(f"--limit_sec {args.limit_sec} must be above 0")
    kind = hopper_here()
    buckets = [b for name in names for b in shape_buckets(name, args.layer)]
    if args.gin_file:
        buckets = layer_buckets(args.gin_file, args.gin_param, kind)
    buckets = [bucket for bucket in buckets if bucket.which in passes]
    path = args.out or device_file.path_of(kind)
    summary = tune(buckets, kind, path, args.limit_sec)
    emit(summary, args.json)
    return CRASHED if summary["failed"] else DONE


def hopper_here() -> str:
    """Return the device_kind of this machine's Hopper GPU. Raises OSError, which means
    that the machine failed, if there is none."""
    device = jax.devices()[0]
    if not is_hopper(device):
        raise OSError(
            f"tiles are measured on a Hopper GPU, but this is {device.device_kind}: "
            "run this on a machine with a Hopper GPU"
        )
    return device.device_kind


def shape_buckets(name: str, is_layer: bool) -> Iterator[Bucket]:
    """Yield a bucket for every pass of a named shape, or with `is_layer` for every
    product that a layer of these widths runs, with fp8 and without."""
    shape = MODEL_SHAPES[name]
    align_rows = tuning.align_rows_for(shape.rows, shape.groups)
    num_rows = max_aligned_rows(shape.rows, shape.groups, align_rows)
    padded = dataclasses.replace(shape, rows=num_rows)
    products = [(which, padded) for which in tuning.PASSES]
    if is_layer:
        in_fp8 = tuning.layer_products(padded, is_fp8=True)
        products = dict.fromkeys(tuning.layer_products(padded) + in_fp8)
    for which, side in products:
        yield Bucket(name, which, side, shape.rows, align_rows)


def layer_buckets(files: list, params: list, kind: str) -> Iterator[Bucket]:
    """Yield a bucket for every product of a configuration's layer on such a device."""
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    from moejax.axes import AXES
    from moejax.resolve.kernels import product_widths
    from moejax.resolve.partition import micro_batch_tokens
    from moejax.resolve.resolved import resolve
    from train.config import gin_reader

    cfg = gin_reader.load(files, params)
    options = {"axis_types": (AxisType.Auto,) * len(AXES)}
    options["abstract_device"] = AbstractDevice(kind, None, "gpu")
    layout = resolve(cfg, AbstractMesh(cfg.mesh.sizes, AXES, **options)).layout
    if layout.align_rows == 1:
        raise ValueError(f"{files[-1]} has layers that do not run the Hopper kernels")
    view = layout.exchanged.topped_up
    rows, groups = view.num_sorted_rows(view.rows_per_device), view.slots_per_device
    shape = ProductShape(rows, *product_widths(cfg, layout), groups)
    made = micro_batch_tokens(cfg) * cfg.moe.top_k // layout.num_exchanges
    num_rows = min(made, rows - groups * layout.align_rows)  # gaps fit into the rest
    about = num_rows, layout.align_rows, cfg.model.compute_dtype
    for product in tuning.layer_products(shape, is_fp8=layout.fp8 != "none"):
        yield Bucket(pathlib.Path(files[-1]).stem, *product, *about)


def tune(
    buckets: Sequence[Bucket], kind: str, path: pathlib.Path, limit_sec: float
) -> dict:
    """Search one bucket after another, store the tiles of each, and return a
    summary."""
    record = device_file.load(path, kind)
    todo = {x.key: x for x in buckets if x.key not in record["tiles"]}
    print(f"{kind}: {len(todo)} buckets for {path}", flush=True)
    rows, failed, end = [], {}, time.monotonic() + limit_sec
    with counted("tiles", "candidates") as counter:
        while todo and (now := time.monotonic()) < end:
            share_end = now + (end - now) / len(todo)
            key, bucket = next(iter(todo.items()))
            del todo[key]
            text = f"{bucket.which} of {bucket.name}, {len(todo)} more buckets"
            counter.set(text=text)
            try:
                tiles, figures = search(bucket, share_end, counter.advance)
            except (WrongKernel, jax.errors.JaxRuntimeError) as error:
                failed[key] = " ".join(str(error).split())
                print(f"{bucket.which} of {bucket.name} failed: {failed[key]}")
                continue
            rows.append({"bucket": key, "tiles": tiles} | figures)
            record["tiles"] = record["tiles"] | {key: tiles}
            record["measured"] = record["measured"] | {key: figures}
            device_file.save(path, record)
    if todo:
        print(f"the time is up: {len(todo)} buckets are left, run the tool again")
    summary = {"device": kind, "file": str(path), "measured": rows}
    return summary | {"failed": failed, "num_left": len(todo)}


def search(bucket: Bucket, end_sec: float, advance: Callable) -> tuple[dict, dict]:
    """Return the fastest tiles of a bucket, and the figures of the search.

    After the first batch it ends at `end_sec` of time.monotonic(). `advance` is called
    for each candidate. Raises WrongKernel if the default tiles compute wrong values.
    """
    rule, *others = candidates(bucket)
    case, todo = prepare(bucket, rule), [rule, *others]
    msec, skipped, centre = {}, {}, None
    while todo:
        batch, todo = todo[:BATCH], todo[BATCH:]
        for tiles, value in measure(case, batch).items():
            (skipped if isinstance(value, str) else msec)[tiles] = value
            advance()
        if rule not in msec:
            raise WrongKernel(f"{rule} cannot be timed: {skipped[rule]}")
        best = min(msec, key=msec.get)
        if not todo and best != centre:
            centre, known = best, msec.keys() | skipped.keys()
            todo = [tiles for tiles in neighbours(bucket, best) if tiles not in known]
        if todo and time.monotonic() >= end_sec:
            break
    for tiles, why in skipped.items():
        print(f"  skipped {tiles}: {why}")
    print(
        f"{bucket.which} of {bucket.name}, {bucket.shape.d} -> {bucket.shape.f}: "
        f"{msec[best]:.3f} ms by {best}; {msec[rule]:.3f} ms by the default tiles; "
        f"{len(msec)} timed, {len(skipped)} skipped" + (", cut off" if todo else ""),
        flush=True,
    )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return dataclasses.asdict(best), {
        "shape": bucket.name,
        "msec": msec[best],
        "rule_msec": msec[rule],
        "num_timed": len(msec),
        "num_skipped": len(skipped),
        "is_whole": not todo,
        "when": now,
        "jax": jax.__version__,
        "commit": program.commit(),
    }


def candidates(bucket: Bucket) -> list[Tiles]:
    """Return the default tiles, then tiles of all sizes, each with as many stages as
    fit, in the order of their guessed cost."""
    first = tuning.default_tiles(bucket.which, bucket.shape, bucket.align_rows)
    others = []
    for rows, columns in itertools.product(ROWS, COLUMNS):
        sizes = {"rows": rows, "columns": columns}
        sizes["halves"] = "columns" if rows == 64 else "rows"
        stages = ({"stages": n} for n in range(MAX_STAGES, 1, -1))
        others += changed(bucket, first, [sizes | n for n in stages])[:1]
    others = [tiles for tiles in others if tiles != first]
    return [first, *sorted(others, key=functools.partial(guessed_cost, bucket))]


def guessed_cost(bucket: Bucket, tiles: Tiles) -> float:
    """Return a guess of the time per useful FLOP with these tiles, as a ratio.

    It grows with the part of a tile that lies beyond the result, and with the time that
    the tile waits for its operands.
    """
    which, shape = bucket.which, bucket.shape
    high = shape.d if which == "wgrad" else bucket.num_rows / shape.groups
    wide = shape.d if which in ("dgrad", "fp8_dgrad") else shape.f
    num_tiles = -(-high // tiles.rows) * -(-wide // tiles.columns)
    columns = tiles.columns * (2 if which == "swiglu" else 1)
    waits = OPERAND_ROWS / 2 * (1 / tiles.rows + 1 / columns)
    return (1 + waits) * num_tiles * tiles.rows * tiles.columns / (high * wide)


def neighbours(bucket: Bucket, tiles: Tiles) -> list[Tiles]:
    """Return the tiles that fit and differ from `tiles` in one setting: the order of
    blocks, the number of stages, the chunk, or the share of a warpgroup."""
    changes = [
        *({"span": span} for span in (4, 16, 1, 32)),
        {"depth": 2 * tiles.depth, "stages": max(2, tiles.stages // 2)},
        {"stages": tiles.stages - 1},
        {"stages": tiles.stages + 1},
        *({"chunk": chunk} for chunk in (32, 64)),
        {"halves": "columns" if tiles.halves == "rows" else "rows"},
    ]
    return [near for near in changed(bucket, tiles, changes) if near != tiles]


def changed(bucket: Bucket, tiles: Tiles, changes: Sequence[dict]) -> list[Tiles]:
    """Return the tiles with each of some changes. Left out are those that do not exist,
    do not fit into shared memory or registers, or do not divide the groups."""
    found, which = [], bucket.which
    for change in changes:
        try:
            new = dataclasses.replace(tiles, **change)
        except ValueError:
            continue
        own_rows, own_columns = new.warpgroup_tile
        sums = own_rows * own_columns // 128 * (2 if which in ("swiglu", *FP8) else 1)
        size = tuning.shared_bytes(which, new, jnp.dtype(bucket.dtype).itemsize)
        if (
            tuning.divides(which, new, bucket.align_rows)
            and size <= tuning.SHARED_BYTES
            and sums <= MAX_SUMS
            and (which not in FP8 or new.depth == FP8_DEPTH)
        ):
            found.append(new)
    return found


def prepare(bucket: Bucket, rule: Tiles) -> Case:
    """Return the inputs of a bucket, with the results of the default tiles. Raises
    WrongKernel if these are not those of the definition."""
    which, shape = bucket.which, bucket.shape
    operands = grouped_dot_cases.draw(which, shape, bucket.dtype, seed=0)
    rows_g = make_rows("zipf", bucket.num_rows, shape.groups, seed=0)
    rows_g = -(-rows_g // bucket.align_rows) * bucket.align_rows
    arguments = *operands, jnp.asarray(rows_g)
    results = jax.jit(kernel(which, rule))(*arguments)
    (sample,) = grouped_dot_cases.make_samples(which, operands, rows_g)
    error, limit = sample.error(results), sample.case.tolerance
    if not error <= limit:
        raise WrongKernel(f"{rule} has an error of {error:.2g}, at most {limit:.2g}")
    return Case(which, arguments, results)


def measure(case: Case, batch: Sequence[Tiles]) -> dict[Tiles, float | str]:
    """Return the milliseconds of each of the tiles, or the reason why it has none.

    Programs are compiled in threads, but lowered one at a time, since lowering is
    Python. All results must equal those of the default tiles.
    """

    def lower(tiles: Tiles):
        return jax.jit(kernel(case.which, tiles)).lower(*case.arguments)

    def finish(lowered) -> Callable | str:
        return lowered if isinstance(lowered, str) else attempt(lowered.compile)

    lowered = [attempt(lower, tiles) for tiles in batch]
    with concurrent.futures.ThreadPoolExecutor(BATCH) as pool:
        found = dict(zip(batch, pool.map(finish, lowered), strict=True))
    calls = {}
    for tiles, compiled in found.items():
        if not isinstance(compiled, str):
            # Results most likely take the memory of this NaN, so that elements that a
            # kernel does not write are seen.
            jax.block_until_ready(jax.tree.map(_nan_like, case.expected))
            call = functools.partial(compiled, *case.arguments)
            error = attempt(lambda call=call: float(_error(call(), case.expected)))
            if isinstance(error, str):
                found[tiles] = error
            elif error <= TOLERANCES[case.arguments[0].dtype]:
                calls[tiles] = call
            else:
                found[tiles] = f"computes something else: error {error:.2g}"
    sec = median_sec(calls, TURNS, CALLS_PER_TURN)
    return found | {tiles: 1e3 * value for tiles, value in sec.items()}


def attempt(function: Callable, *arguments) -> Any:
    """Return the result of a function, or the text of the error that it raises: a
    compiler may raise anything, and it is reported."""
    try:
        return function(*arguments)
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return text[:200]


@jax.jit
def _error(results, expected):
    """Return the largest error over the largest value; infinite if a result is not
    finite."""

    def error(out, right):
        out, right = out.astype(jnp.float32), right.astype(jnp.float32)
        off = jnp.where(jnp.isfinite(out), jnp.abs(out - right), jnp.inf)
        return jnp.max(off) / jnp.max(jnp.abs(right))

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(error, results, expected))))


def _nan_like(array):
    return jnp.full_like(array, jnp.nan)


def kernel(which: Pass, tiles: Tiles) -> Callable:
    """Return the kernel of a pass with these tiles, a function of its arrays."""
    from moejax.kernels.grouped_dot.hopper import kernels

    return functools.partial(getattr(kernels, which), tiles=tiles)


if __name__ == "__main__":
    sys.exit(main())
