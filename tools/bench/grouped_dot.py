"""Time our grouped products against other implementations, on shapes of real models.

    python tools/bench/grouped_dot.py [--device gpu|cpu] [--json] [--out rows.json]
    python tools/bench/grouped_dot.py --shapes narrow,wide --skews zipf --passes grads

Implementations are those of tools/bench/grouped_dot_peers.py, shapes and skews those of
moejax/kernels/shapes.py. On a CPU each size of a shape is an eighth of the model's, in
float32; on a GPU shapes are whole, in bfloat16.

First every implementation is compared with the definition in float64: on a small case,
and on a sample of the case itself. Then the implementations take turns, and medians are
shown. An implementation that is wrong, or cannot compute a case, is left out with the
reason, and the others go on.

docs/bench_kernels.md explains the results. Exit codes: 0 done, 1 an implementation
computes something else, or one of ours failed, 2 bad input.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import pathlib
import secrets
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import jax  # noqa: E402
import numpy as np  # noqa: E402

from moejax.kernels import shapes, tuning  # noqa: E402
from moejax.kernels.cases import FP8_TOLERANCE  # noqa: E402
from moejax.kernels.device import device_here  # noqa: E402
from moejax.kernels.shapes import ProductShape, make_rows  # noqa: E402
from tools.bench import grouped_dot_cases as cases  # noqa: E402
from tools.bench import grouped_dot_peers as peers  # noqa: E402
from tools.bench import program  # noqa: E402
from tools.bench.timer import median_sec  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import CRASHED, DONE, emit  # noqa: E402

PASSES = ("forward", "dgrad", "wgrad", "grads")
"""grads is forward and both gradients in one program."""
SMALL_ROWS = np.array((64, 0, 200, 1, 191), np.int32)
"""Rows of each group of the small case, whose widths are SMALL_WIDTH."""
SMALL_WIDTH = 256
SEED_OF_ROWS = 0
ROTATED_BYTES = 256 * 2**20
"""Bytes of the input sets that calls on a GPU cycle through: more than four times the
L2 of a Hopper GPU."""
MAX_SETS = 8
SAMPLE_SEC = 0.02
"""Intended duration of the calls of one turn on a GPU, together. The limits on the
number of calls take precedence."""
MIN_CALLS, MAX_CALLS = 3, 50


class WrongResult(Exception):
    """Error raised when an implementation computes wrong values."""


class Inputs(NamedTuple):
    """Arrays of a pass before rows_g, through whose sets calls cycle, and samples of
    the results of the first set."""

    sets: list[tuple]
    rows_g: np.ndarray
    samples: list[cases.Sample]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    is_gpu = args.device == "gpu"
    return program.run(work, args, is_gpu=is_gpu, has_huge_pages=argv is None)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    program.add_device(parser, ("float32", "float16", "bfloat16"))
    add("--shapes", default="all", help="shapes with commas between, by their names")
    add("--skews", default="all", help="distributions of rows over groups, with commas")
    add("--passes", default="all", help=f"with commas between: {', '.join(PASSES)}")
    add("--impls", default="all", help="implementations with commas between")
    program.add_repeats(parser, 7)
    add("--seed", type=int, help="random seed of the inputs (default: a new one)")
    add("--out", type=pathlib.Path, help="JSON file, rewritten after every pass")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    is_cpu = args.device == "cpu"
    known = shapes.CPU_SHAPES if is_cpu else shapes.MODEL_SHAPES
    here = peers.ON_CPU if is_cpu else peers.IMPLEMENTATIONS
    args.shapes = program.parse_names("shapes", args.shapes, known)
    args.passes = program.parse_names("passes", args.passes, PASSES)
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats} must be at least 1")
    args.dtype = args.dtype or program.DTYPES[args.device]
    args.skews = program.parse_names("skews", args.skews, shapes.SKEWS)
    args.impls = program.parse_names("impls", args.impls, here)
    if args.seed is None:
        args.seed = secrets.randbits(31)
    about = {
        "device": program.devices(args.device)[0].device_kind,
        "dtype": args.dtype,
        "jax": jax.__version__,
        "commit": program.commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "repeats": args.repeats,
        "seed": args.seed,
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    rows = []
    for name, which in itertools.product(args.shapes, args.passes):
        new_rows = measure(args, known[name], which)
        new_rows = [about | {"shape": name, "pass": which} | row for row in new_rows]
        show(new_rows)
        rows += new_rows
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    emit(rows, args.json)
    return CRASHED if any("failed" in row for row in rows) else DONE


def measure(args: argparse.Namespace, shape: ProductShape, which: str) -> list[dict]:
    """Check and time the implementations of a pass, and return a row for each skew and
    implementation. Without a time, its `declined` or `failed` has the reason."""
    sizes = SMALL_ROWS.sum(), SMALL_WIDTH, SMALL_WIDTH, len(SMALL_ROWS)
    few = cases.draw(which, ProductShape(*sizes), args.dtype, args.seed)
    samples = cases.make_samples(which, few, SMALL_ROWS, max_rows=SMALL_ROWS.max())
    small = Inputs([few], SMALL_ROWS, samples)
    sets = draw_sets(args, shape, which)
    rows = []
    for skew in args.skews:
        rows_g = make_rows(skew, shape.rows, shape.groups, SEED_OF_ROWS)
        case = Inputs(sets, rows_g, cases.make_samples(which, sets[0], rows_g))
        calls, found = {}, {}
        for impl in args.impls:
            try:
                calls[impl], found[impl] = prepare(impl, which, shape, small, case)
            except Exception as error:
                # A peer may decline by any exception; ours do so by one kind only.
                is_refusal = isinstance(error, NotImplementedError | ImportError)
                is_peer = impl not in peers.OURS and not isinstance(error, WrongResult)
                text = " ".join(str(error).split()) or type(error).__name__
                outcome = "declined" if is_refusal or is_peer else "failed"
                found[impl] = {outcome: text[:300]}
        sec = time_calls(calls, args)
        dense_sec = sec.get("dense")
        num_products = 3 if which == "grads" else 1
        flops = num_products * 2 * shape.rows * shape.d * shape.f
        for impl, about in found.items():
            row = {"skew": skew, "impl": impl, "msec": None} | about
            if impl in sec:
                row["msec"] = 1e3 * sec[impl]
                row["tflops"] = flops / sec[impl] / 1e12
                row["share_of_dense"] = dense_sec / sec[impl] if dense_sec else None
            rows.append(row | dataclasses.asdict(shape))
    return rows


def draw_sets(args: argparse.Namespace, shape: ProductShape, which: str) -> list[tuple]:
    """Return one set of inputs on a CPU, and several on a GPU, so that they do not come
    from its L2 cache."""
    first = cases.draw(which, shape, args.dtype, args.seed)
    if args.device == "cpu":
        return [first]
    num_sets = -(-ROTATED_BYTES // sum(array.nbytes for array in first))
    seeds = range(args.seed + 1, args.seed + min(MAX_SETS, max(2, num_sets)))
    return [first, *(cases.draw(which, shape, args.dtype, seed) for seed in seeds)]


def prepare(
    impl: str, which: str, shape: ProductShape, small: Inputs, case: Inputs
) -> tuple[Callable[[], Any], dict]:
    """Return a call of an implementation's fastest variant, and its error and tiles.
    Raises WrongResult if it computes wrong values."""
    if impl == "dense":
        small, case = without_groups(which, small), without_groups(which, case)
    align_rows = 1
    if impl in peers.ALIGNED:
        align_rows = tuning.align_rows_for(shape.rows, shape.groups)
    variants = peers.variants(impl, which, align_rows)
    arguments = [
        cases.aligned_arguments(operands, case.rows_g, align_rows)
        for operands in case.sets
    ]
    tiles = fastest(variants, arguments[0])
    run, errors = variants[tiles], []
    for inputs in (small, case):
        own = cases.aligned_arguments(inputs.sets[0], inputs.rows_g, align_rows)
        results = peers.as_jax(run(*own))
        results = cases.without_gaps(results, inputs.rows_g, align_rows)
        by_part = results if which == "grads" else [results]
        for sample, result in zip(inputs.samples, by_part, strict=True):
            limit = FP8_TOLERANCE if impl == "hopper_fp8" else sample.case.tolerance
            errors.append(sample.error(result))
            if not errors[-1] <= limit:
                raise WrongResult(
                    f"{sample.case.kernel} of {inputs.rows_g.sum()} rows computes "
                    f"something else: error {errors[-1]:.2g}, at most {limit:.2g}"
                )
    if impl in peers.ALIGNED:
        padded = dataclasses.replace(shape, rows=len(arguments[0][0]))
        dtype = arguments[0][0].dtype.name
        tiles = describe_tiles(impl, which, padded, dtype, align_rows)
    sets = itertools.cycle(arguments)
    return lambda: run(*next(sets)), {"error": max(errors), "tiles": tiles}


def without_groups(which: str, inputs: Inputs) -> Inputs:
    """Return the inputs of `dense`: all rows belong to the first matrix."""
    sets = [tuple(a[:1] if a.ndim == 3 else a for a in one) for one in inputs.sets]
    rows_g = np.array([inputs.rows_g.sum()], np.int32)
    return Inputs(sets, rows_g, cases.make_samples(which, sets[0], rows_g))


def fastest(variants: dict[str, Callable], arguments: tuple) -> str:
    """Return the tiles of the fastest variant. Variants that raise are left out; if all
    do, the last error is raised."""
    if len(variants) == 1:
        return next(iter(variants))
    sec, last = {}, None
    for tiles, run in variants.items():
        try:
            sec |= median_sec({tiles: partial(run, *arguments)}, 1, MIN_CALLS)
        except Exception as error:
            last = error
    if not sec:
        raise last
    return min(sec, key=sec.get)


def describe_tiles(
    impl: str, which: str, shape: ProductShape, dtype: str, align_rows: int
) -> str:
    """Return the tiles of our kernels for a pass on a shape, padding included, and
    whether they were measured."""
    names = ["forward", "dgrad", "wgrad"] if which == "grads" else [which]
    if impl == "hopper_fp8":
        names = [name if name == "wgrad" else f"fp8_{name}" for name in names]
    texts, where = [], (dtype, device_here().device_kind)
    for name in names:
        tiles = tuning.tiles_for(name, shape, *where, align_rows)
        is_measured = tiles == tuning.measured_tiles(name, shape, *where)
        source = "measured" if is_measured else "default"
        texts.append(f"{name} {source} {dataclasses.astuple(tiles)}")
    return "; ".join(texts)


def time_calls(
    calls: dict[str, Callable], args: argparse.Namespace
) -> dict[str, float]:
    """Return the median seconds of each call. On a GPU there are as many calls between
    two waits as last SAMPLE_SEC."""
    if args.device == "cpu":
        return median_sec(calls, args.repeats)
    numbers = {
        impl: min(MAX_CALLS, max(MIN_CALLS, round(SAMPLE_SEC / sec)))
        for impl, sec in median_sec(calls, 1, MIN_CALLS, peers.wait).items()
    }
    return median_sec(calls, args.repeats, numbers, peers.wait)


def show(rows: list[dict]) -> None:
    """Print the rows of one shape and pass as a table."""
    first = rows[0]
    sizes = f"{first['rows']} rows, {first['d']} -> {first['f']}"
    print(f"\n{first['shape']}, {first['pass']}: {sizes}, {first['groups']} groups")
    print("| skew | impl | ms | TFLOP/s | / dense | error | tiles |")
    print("|---|---|--:|--:|--:|--:|---|")
    for row in rows:
        cells = [row["skew"], row["impl"]]
        for outcome in ("failed", "declined"):
            if outcome in row:
                cells.append(f"{outcome}: {row[outcome]}")
        if row["msec"] is not None:
            cells += [
                f"{row['msec']:.3f}",
                f"{row['tflops']:.3g}",
                f"{row['share_of_dense']:.0%}" if row["share_of_dense"] else "",
                f"{row['error']:.1e}",
                row["tiles"],
            ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
