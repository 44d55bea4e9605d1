"""Time our grouped products against other implementations, on shapes of real models.

    python tools/bench/grouped_dot.py [--device gpu|cpu] [--json] [--out rows.json]
    python tools/bench/grouped_dot.py --shapes narrow,wide --skews zipf --passes grads

Passes are defined in tools/bench/grouped_dot_cases.py, implementations in
tools/bench/grouped_dot_peers.py, shapes and skews in moejax/kernels/shapes.py. On a CPU
each size of a shape is an eighth of the model's, in float32; on a GPU shapes are whole,
in bfloat16.

First every implementation is compared with NumPy in float64: on a small case of the
same skew, where our inputs hold NaN in padding, and on a sample of the case itself.
Then implementations and skews take turns, and medians are shown. An implementation that
cannot compute a case is left out, with its reason.

docs/bench_kernels.md explains the results. Exit codes: 0 done, 1 an implementation
computes something else, 2 bad input, 3 the machine failed.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import secrets
import sys
from collections.abc import Iterable
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from tools.bench import program  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import CRASHED, DONE, emit, refuse  # noqa: E402

Rows = list[dict]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    is_gpu = args.device == "gpu"
    return program.run(work, args, is_gpu=is_gpu, has_huge_pages=argv is None)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    program.add_device(parser, ("float32", "float16", "bfloat16"))
    add(
        "--shapes",
        default="all",
        help="shapes with commas between, as in moejax/kernels/shapes.py",
    )
    add(
        "--skews",
        default="all",
        help="distributions of rows over groups, with commas between: uniform, zipf,"
        " one_hot, with_empty",
    )
    add(
        "--passes",
        default="all",
        help="passes with commas between: forward, dgrad, wgrad, fused, grads",
    )
    add(
        "--impls",
        default="all",
        help="implementations with commas between, as in"
        " tools/bench/grouped_dot_peers.py",
    )
    program.add_repeats(parser, 7)
    add(
        "--seed",
        type=int,
        help="random seed of the inputs (default: a new one, which is printed)",
    )
    add(
        "--untuned",
        action="store_true",
        help="let the Hopper kernels run with tiles that were never measured",
    )
    add(
        "--out",
        type=pathlib.Path,
        help="JSON file for the rows, rewritten after every pass (default: none)",
    )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    from moejax.kernels.shapes import CPU_SHAPES, MODEL_SHAPES, SKEWS
    from tools.bench import grouped_dot_cases as cases
    from tools.bench import grouped_dot_jobs as jobs
    from tools.bench import grouped_dot_peers as peers

    known = CPU_SHAPES if args.device == "cpu" else MODEL_SHAPES
    names = program.parse_names("shapes", args.shapes, known)
    shapes = {name: known[name] for name in names}
    passes = program.parse_names("passes", args.passes, cases.PASSES)
    here = peers.ON_CPU if args.device == "cpu" else peers.IMPLEMENTATIONS
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats} must be at least 1")
    settings = jobs.Settings(
        args.device,
        args.dtype or program.DTYPES[args.device],
        program.parse_names("skews", args.skews, SKEWS),
        program.parse_names("impls", args.impls, here),
        args.repeats,
        secrets.randbits(31) if args.seed is None else args.seed,
    )
    record = describe_run(settings)
    needing = [impl for impl in settings.impls if impl in KERNELS]
    for impl in () if args.untuned else needing:
        require_tuned(shapes, passes, settings.dtype, record["device"], impl)
    settings = dataclasses.replace(settings, impls=find_installed(settings.impls))
    print(", ".join(f"{name} {value}" for name, value in record.items()), flush=True)
    rows = []
    try:
        for name, shape in shapes.items():
            for which in passes:
                new_rows = jobs.measure(settings, shape, which)
                rows += [record | {"shape": name} | row for row in new_rows]
                show_pass(rows[-len(new_rows) :], peers.OURS)
                if args.out:
                    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    except jobs.WrongResult as error:
        return refuse(error, CRASHED, args.json)
    show_summary(rows, peers.OURS)
    show_bars(rows, peers.OURS)
    emit(rows, args.json)
    return DONE


def describe_run(settings) -> dict[str, Any]:
    """Return the fields that all rows have in common."""
    import jax

    return {
        "device": program.first_device(settings.device).device_kind,
        "dtype": settings.dtype,
        "jax": jax.__version__,
        "commit": program.commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "repeats": settings.repeats,
        "seed": settings.seed,
    }


KERNELS = {
    "hopper": {
        "forward": ["forward"],
        "dgrad": ["dgrad"],
        "wgrad": ["wgrad"],
        "fused": ["swiglu"],
        "grads": ["forward", "dgrad", "wgrad"],
    },
    "hopper_fp8": {
        "forward": ["fp8_forward"],
        "dgrad": ["fp8_dgrad"],
        "wgrad": [],
        "fused": ["fp8_forward"],
        "grads": ["fp8_forward", "fp8_dgrad", "wgrad"],
    },
}
"""Kernels that an implementation runs in each pass, by their names in tables of
tiles."""


def require_tuned(
    shapes: dict, passes: list[str], dtype: str, device_kind: str, impl: str = "hopper"
) -> None:
    """Raise ValueError if an implementation would run with tiles that were never
    measured. Shapes that it declines need none: their rows give the reason."""
    from moejax.kernels import tuning
    from moejax.kernels.grouped_dot.hopper import kernels

    is_fp8 = impl == "hopper_fp8"
    for shape in shapes.values():
        if kernels.declines(dtype, shape.rows, shape.d, shape.f, is_fp8=is_fp8):
            continue
        for which in passes:
            is_wide = is_fp8 and which == "fused"
            product = dataclasses.replace(shape, f=2 * shape.f) if is_wide else shape
            for kernel in KERNELS[impl][which]:
                try:
                    tuning.require_measured_tiles(kernel, product, dtype, device_kind)
                except ValueError as error:
                    raise ValueError(f"{error}; or give --untuned") from error


def find_installed(impls: Iterable[str]) -> list[str]:
    """Return the implementations that can be imported, and print one line for each of
    the others."""
    from tools.bench import grouped_dot_peers as peers

    names = []
    for impl in impls:
        try:
            peers.variants(impl, "forward", int(impl == "batched"))
            names.append(impl)
        except (ImportError, OSError) as error:  # OSError: a shared library is missing
            print(f"{impl} is not installed: {error}", flush=True)
    return names


def show_pass(rows: Rows, ours: Iterable[str]) -> None:
    """Print the rows of one shape and pass as a table. `faster` is our speed over that
    of the row's implementation."""
    first = rows[0]
    sizes = f"{first['rows']} rows, {first['d']} -> {first['f']}"
    print(f"\n{first['shape']}, {first['pass']}: {sizes}, {first['groups']} groups")
    print(
        "| skew | impl | ms | min - max | TFLOP/s | / dense | GB/s | faster | error |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    by_key = {(row["skew"], row["impl"]): row for row in rows}
    own = first_measured(rows, ours)
    for (skew, impl), row in by_key.items():
        if "declined" in row:
            print(f"| {skew} | {impl} | declined: {row['declined']} |")
            continue
        share = "" if row["share_of_dense"] is None else f"{row['share_of_dense']:.0%}"
        mine = by_key.get((skew, own), {}).get("msec")
        faster = f"{row['msec'] / mine:.2f}" if mine and impl != own else ""
        print(
            f"| {skew} | {impl} | {row['msec']:.3f} "
            f"| {row['msec_min']:.3f} - {row['msec_max']:.3f} "
            f"| {row['tflops']:.3g} | {share} | {row['gb_per_sec']:.3g} | {faster} "
            f"| {row['error']:.1e} |"
        )
    print("", end="", flush=True)


def show_summary(rows: Rows, ours: Iterable[str]) -> None:
    """Print, for each pass, the minimum of our speed over that of others, with the
    shape and skew where it occurs."""
    own = first_measured(rows, ours)
    if own is None:
        print("\nnone of our implementations was measured")
        return
    print(f"\n{own}: minimum of its speed over that of others, with shape and skew")
    print("| pass | / best peer | / ragged_dot | / dense | skewed / uniform |")
    print("|---|---|---|---|---|")
    for which in dict.fromkeys(row["pass"] for row in rows):
        rows_of_pass = [row for row in rows if row["pass"] == which]
        cells = [format_min(speed) for speed in ratios(rows_of_pass, own, ours)]
        print(f"| {which} | {' | '.join(cells)} |")
    print("", end="", flush=True)


def show_bars(rows: Rows, ours: Iterable[str]) -> None:
    """Print our rates on even rows beside those that others published for these shapes
    and this device, if there are any."""
    from moejax.kernels.shapes import ProductShape
    from tools.bench import published_rates

    own = first_measured(rows, ours)
    lines = []
    for row in rows:
        if (row["impl"], row["skew"]) != (own, "uniform") or row["msec"] is None:
            continue
        shape = ProductShape(row["rows"], row["d"], row["f"], row["groups"])
        bar = published_rates.find(row["pass"], shape, row["device"])
        if bar is not None:
            lines.append(
                f"| {row['shape']} | {row['pass']} | {row['tflops']:.0f} "
                f"| {bar.tflops:.0f} | {row['tflops'] / bar.tflops:.2f} "
                f"| {bar.impl} {bar.version}, H100, {bar.shape.rows} rows |"
            )
    if lines:
        print(f"\n{own} in TFLOP/s beside published rates")
        print("| shape | pass | ours | bar | ours / bar | bar of |")
        print("|---|---|--:|--:|--:|---|")
        print("\n".join(lines), flush=True)


def first_measured(rows: Rows, ours: Iterable[str]) -> str | None:
    """Return the first of our implementations that was timed, or None."""
    measured = {row["impl"] for row in rows if row["msec"] is not None}
    return next((impl for impl in ours if impl in measured), None)


def ratios(rows: Rows, own: str, ours: Iterable[str]) -> tuple[dict, ...]:
    """Return four tables for the rows of one pass, each by (shape, skew): our speed
    over that of the best peer, of `ragged_dot`, of `dense`, and over our own speed on
    even rows."""
    msec = {
        (row["shape"], row["skew"], row["impl"]): row["msec"]
        for row in rows
        if row["msec"] is not None
    }
    over_peer, over_ragged, over_dense, over_uniform = {}, {}, {}, {}
    for (shape, skew, impl), mine in msec.items():
        if impl != own:
            continue
        case = shape, skew
        peer_msec = [
            other
            for (*where, name), other in msec.items()
            if (*where,) == case and name not in (*ours, "dense")
        ]
        if peer_msec:
            over_peer[case] = min(peer_msec) / mine
        for name, over in (("ragged_dot", over_ragged), ("dense", over_dense)):
            if (*case, name) in msec:
                over[case] = msec[*case, name] / mine
        if skew != "uniform" and (shape, "uniform", own) in msec:
            over_uniform[case] = msec[shape, "uniform", own] / mine
    return over_peer, over_ragged, over_dense, over_uniform


def format_min(ratio: dict[tuple[str, str], float]) -> str:
    """Format the minimum of a table of ratios with its shape and skew; '-' if the table
    is empty."""
    if not ratio:
        return "-"
    case = min(ratio, key=ratio.get)
    return f"{ratio[case]:.2f} ({', '.join(case)})"


if __name__ == "__main__":
    sys.exit(main())
