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
import datetime
import itertools
import json
import pathlib
import secrets
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from tools.bench import program  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import CRASHED, DONE, emit  # noqa: E402

PASSES = ("forward", "dgrad", "wgrad", "fused", "grads")
"""fused is `swiglu` of moejax/kernels/cases.py, and grads is forward and both gradients
in one program."""


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
    import jax

    from moejax.kernels.shapes import CPU_SHAPES, MODEL_SHAPES, SKEWS
    from tools.bench import grouped_dot_jobs as jobs
    from tools.bench import grouped_dot_peers as peers

    known = CPU_SHAPES if args.device == "cpu" else MODEL_SHAPES
    here = peers.ON_CPU if args.device == "cpu" else peers.IMPLEMENTATIONS
    names = program.parse_names("shapes", args.shapes, known)
    passes = program.parse_names("passes", args.passes, PASSES)
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
    about = {
        "device": program.first_device(settings.device).device_kind,
        "dtype": settings.dtype,
        "jax": jax.__version__,
        "commit": program.commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "repeats": settings.repeats,
        "seed": settings.seed,
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    rows = []
    for name, which in itertools.product(names, passes):
        kernel = "swiglu" if which == "fused" else which
        new_rows = jobs.measure(settings, known[name], kernel)
        new_rows = [about | {"shape": name, "pass": which} | row for row in new_rows]
        show(new_rows)
        rows += new_rows
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    emit(rows, args.json)
    return CRASHED if any("failed" in row for row in rows) else DONE


def show(rows: list[dict]) -> None:
    """Print the rows of one shape and pass as a table."""
    first = rows[0]
    sizes = f"{first['rows']} rows, {first['d']} -> {first['f']}"
    print(f"\n{first['shape']}, {first['pass']}: {sizes}, {first['groups']} groups")
    print("| skew | impl | ms | TFLOP/s | / dense | GB/s | error | tiles |")
    print("|---|---|--:|--:|--:|--:|--:|---|")
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
                f"{row['gb_per_sec']:.3g}",
                f"{row['error']:.1e}",
                row["tiles"],
            ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
