"""Find the fastest tiles of the Hopper kernels on this machine's GPU, and store them.

    python tools/tune_kernels.py [--shapes ..] [--passes ..] [--skews zipf,uniform]
    python tools/tune_kernels.py --layer --limit_sec 500 --json
    python tools/tune_kernels.py --forms all --spared 8

Tiles are searched for one bucket (a pass and a shape) after another. Each shape of
moejax/kernels/shapes.py has one bucket per pass, or with --layer one for each product
that a feed-forward layer of these widths runs in training. The search is that of
tools/bench/tune_search.py, the checks are those of tools/bench/tune_cases.py. The
fastest tiles are stored in moejax/kernels/tuned/<device>.json after every bucket. A run
skips the buckets that the file has, unless --again is given. The remaining buckets
share the remaining time evenly. A bucket whose search was cut off is marked
`is_whole: false`.

Exit codes: 0 done, or the time is up; 1 the rule's tiles compute something else; 2 bad
input; 3 there is no Hopper GPU here.
"""

import argparse
import datetime
import functools
import pathlib
import secrets
import sys
import time
from collections.abc import Callable

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.bench import program  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import CRASHED, DONE, emit, refuse  # noqa: E402
from train.logs.counter import counted  # noqa: E402

LIMIT_SEC = 300


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return program.run(work, args, is_gpu=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "--shapes",
        default="all",
        help="shapes with commas between, as in moejax/kernels/shapes.py",
    )
    add(
        "--passes",
        default="all",
        help="passes with commas between, as in moejax/kernels/tuning.py",
    )
    add(
        "--skews",
        default="zipf,uniform",
        help="distributions of rows over groups, over which times are averaged, with"
        " commas between: uniform, zipf, one_hot, with_empty",
    )
    add(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="dtype of all arrays",
    )
    add(
        "--forms",
        choices=("first", "all"),
        default="first",
        help="forms of the kernels to try: first forms (the default), or second forms"
        " too (docs/kernels.md)",
    )
    add(
        "--spared",
        type=int,
        default=0,
        help="number of multiprocessors to leave to collectives: tiles are measured on"
        " the others, and later run on these",
    )
    _add_search(add)
    return parser.parse_args(argv)


def _add_search(add: Callable) -> None:
    """Add the flags that say how long and where tiles are searched."""
    add(
        "--layer",
        action="store_true",
        help="tune the products that a layer runs in training, instead of each pass on"
        " each shape",
    )
    add(
        "--limit_sec",
        type=float,
        default=LIMIT_SEC,
        help="time limit of the whole search, in seconds",
    )
    add("--seed", type=int, help="random seed of the inputs (default: a new one)")
    add(
        "--again",
        action="store_true",
        help="also measure buckets that the file has",
    )
    add(
        "--out",
        type=pathlib.Path,
        help="file for the tiles (default: moejax/kernels/tuned/<device>.json)",
    )


def work(args: argparse.Namespace) -> int:
    from moejax.kernels import device_file, tuning
    from moejax.kernels.grouped_dot.hopper import kernels
    from moejax.kernels.shapes import MODEL_SHAPES, SKEWS
    from tools.bench import tune_cases, tune_search

    names = program.parse_names("shapes", args.shapes, MODEL_SHAPES)
    shapes = {name: MODEL_SHAPES[name] for name in names}
    passes = program.parse_names("passes", args.passes, tuning.PASSES)
    skews = program.parse_names("skews", args.skews, SKEWS)
    if not args.limit_sec > 0:
        raise ValueError(f"--limit_sec {args.limit_sec} must be above 0")
    if args.spared < 0:
        raise ValueError(f"--spared {args.spared} must be at least 0")
    kind = hopper_here()
    buckets = tune_search.tuning_buckets(shapes, args.layer)
    settings = tune_search.Settings(
        buckets=[bucket for bucket in buckets if bucket.which in passes],
        skews=skews,
        dtype=args.dtype,
        limit_sec=args.limit_sec,
        seed=secrets.randbits(31) if args.seed is None else args.seed,
        is_again=args.again,
        forms=args.forms,
        spared=args.spared,
        path=args.out or device_file.path_of(kind),
    )

    def product(which: tuning.Pass, tiles: tuning.Tiles) -> Callable:
        return functools.partial(getattr(kernels, which), tiles=tiles)

    try:
        summary = tune(settings, kind, product, tune_cases.time_msec)
    except tune_cases.WrongKernel as error:
        return refuse(error, CRASHED, args.json)
    emit(summary, args.json)
    return DONE


def hopper_here() -> str:
    """Return the device_kind of this machine's Hopper GPU. Raises OSError, which means
    that the machine failed, if there is none."""
    import jax

    from moejax.kernels.device import is_hopper

    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        raise OSError(
            "there is no GPU here, but tiles are measured on one: run this on a "
            "machine with a Hopper GPU"
        ) from None
    if not is_hopper(device):
        raise OSError(
            f"the kernels are for Hopper GPUs, but this is {device.device_kind}: run "
            "this on a machine with a Hopper GPU"
        )
    return device.device_kind


def tune(
    settings,
    kind: str,
    product: Callable,
    timer: Callable,
    clock: Callable[[], float] = time.monotonic,
) -> dict:
    """Search one bucket after another, store the tiles of each, and return a summary.

    `settings` are those of tune_search, `product` and `timer` those of tune_cases.
    """
    from moejax.kernels import device_file
    from tools.bench import tune_cases

    record = device_file.load(settings.path, kind)
    by_key = {b.key(settings.dtype): b for b in settings.buckets}
    known = () if settings.is_again else record["tiles"]
    todo = [bucket for key, bucket in by_key.items() if key not in known]
    print(f"{kind}: {len(todo)} buckets for {settings.path}", flush=True)
    rows, end = [], clock() + settings.limit_sec
    with counted("tiles", "candidates") as counter:

        def counted_timer(tiles, call):
            counter.advance(1 / len(settings.skews))
            return timer(tiles, call)

        while todo and clock() < end:
            share_end = clock() + (end - clock()) / len(todo)

            def is_over(share_end=share_end):
                return clock() >= share_end

            bucket = todo.pop(0)
            counter.text = (
                f"bucket {len(rows) + 1} of {len(rows) + 1 + len(todo)}, "
                f"{bucket.which} of {bucket.name}; {settings.limit_sec:g} s at most"
            )
            row = tune_cases.search_bucket(
                bucket, settings, product, counted_timer, is_over
            )
            record = add_bucket(record, row)
            device_file.save(settings.path, record)
            rows.append(row)
    if todo:
        print(f"the time is up: {len(todo)} buckets are left, run the tool again")
    file = str(settings.path)
    return {"device": kind, "file": file, "measured": rows, "num_left": len(todo)}


def add_bucket(record: dict, row: dict) -> dict:
    """Return the content of the file of tuned tiles, with one more bucket of shapes.

    The times of a bucket come with its own `when`, `jax` and `commit`; those of the
    last bucket are at the top too.
    """
    import jax

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"when": now, "jax": jax.__version__, "commit": program.commit()}
    key, tiles = row["bucket"], row["tiles"]
    figures = {k: v for k, v in row.items() if k not in ("bucket", "tiles")}
    return record | {
        **about,
        "tiles": record["tiles"] | {key: tiles},
        "measured": record["measured"] | {key: figures | about},
    }


if __name__ == "__main__":
    sys.exit(main())
