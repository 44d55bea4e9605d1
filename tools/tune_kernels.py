"""Find the fastest tiles of the Hopper kernels, on the GPU that is here.

    python tools/tune_kernels.py [--shapes ..] [--passes ..] [--skews zipf,uniform]
    python tools/tune_kernels.py --layer --limit_sec 500 --json

Shapes are named in moejax/kernels/shapes.py; each is one bucket of a pass, or with
--layer those that a feed-forward layer of these widths runs in training. Tiles are
tried as tools/tune_search.py says, checked as tools/tune_cases.py says, and the fastest
go to moejax/kernels/tuned/<device>.json after every bucket. A run goes on where the
file ends; --again measures anew. The buckets that are left share --limit_sec evenly,
and one that got less than it wanted is marked `is_whole: false`.

Exit codes: 0 done, or the time is up; 1 the rule's tiles compute something else; 2 bad
input; 3 there is no Hopper GPU here.
"""

import argparse
import dataclasses
import datetime
import functools
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # this folder's modules are tools.x, never top-level names

from moejax.kernels import tuning  # noqa: E402
from moejax.kernels.shapes import MODEL_SHAPES, SKEWS, Shape  # noqa: E402
from tools import tune_search  # noqa: E402
from tools.bench_grouped_dot import commit, named  # noqa: E402
from train.ending import CRASHED, DONE, emit, guarded, refuse  # noqa: E402

LIMIT_SEC = 300


class Bucket(NamedTuple):
    name: str
    which: tuning.Pass
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Settings:
    buckets: list[Bucket]
    skews: list[str]
    dtype: str
    limit_sec: float
    seed: int
    is_again: bool
    path: pathlib.Path


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", default="all", help="names with commas")
    add("--passes", default="all", help=", ".join(tuning.PASSES))
    add("--skews", default="zipf,uniform", help=", ".join(SKEWS))
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    add("--layer", action="store_true", help="the products of a layer in training")
    add("--limit_sec", type=float, default=LIMIT_SEC, help="of the whole search: 300")
    add("--seed", type=int, help="of the inputs; fresh ones without it")
    add("--again", action="store_true", help="also buckets that the file has")
    add("--json", action="store_true", help="end with one JSON object on the last line")
    add("--out", type=pathlib.Path, help="another file than tuned/<device>.json")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    shapes = {name: MODEL_SHAPES[name] for name in named_shapes(args.shapes)}
    passes = named("passes", args.passes, tuning.PASSES)
    skews = named("skews", args.skews, SKEWS)
    if not args.limit_sec > 0:
        raise ValueError(f"--limit_sec {args.limit_sec} must be above 0")
    kind = hopper_here()
    settings = Settings(
        buckets=[b for b in buckets_of(shapes, args.layer) if b.which in passes],
        skews=skews,
        dtype=args.dtype,
        limit_sec=args.limit_sec,
        seed=secrets.randbits(31) if args.seed is None else args.seed,
        is_again=args.again,
        path=args.out or tuning.file_of(kind),
    )
    from moejax.kernels.grouped_dot import hopper
    from tools import tune_cases

    def product(which: tuning.Pass, tiles: tuning.Tiles) -> Callable:
        return functools.partial(getattr(hopper, which), tiles=tiles)

    try:
        summary = tune(settings, kind, product, tune_cases.time_msec)
    except tune_cases.WrongKernel as error:
        return refuse(error, CRASHED, args.json)
    emit(summary, args.json)
    return DONE


def named_shapes(text: str) -> list[str]:
    return named("shapes", text, MODEL_SHAPES)


def hopper_here() -> str:
    """Its device_kind. Raises OSError, the machine's failure, where there is none."""
    import jax

    from moejax.kernels.choice import is_hopper

    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        raise OSError(
            "there is no GPU here, and tiles are measured on one: run this on a "
            "Hopper GPU"
        ) from None
    if not is_hopper(device):
        raise OSError(
            f"the kernels are for Hopper GPUs, and this is {device.device_kind}: run "
            "this on one"
        )
    return device.device_kind


def buckets_of(shapes: dict[str, Shape], is_layer: bool) -> Iterator[Bucket]:
    """Every pass of each shape; of a layer, what grouped_swiglu and its gradient run:
    gate and up lie side by side in one matrix, and the second product goes back."""
    for name, shape in shapes.items():
        into = dataclasses.replace(shape, f=2 * shape.f)
        down = dataclasses.replace(shape, d=shape.f, f=shape.d)
        layer = [
            *(("swiglu", shape), ("forward", down), ("swiglu_dgrad", shape)),
            *(("dgrad", into), ("wgrad", into), ("wgrad", down)),
        ]
        plain = [(which, shape) for which in tuning.PASSES]
        for which, of in layer if is_layer else plain:
            yield Bucket(name, which, of)


def tune(
    settings: Settings,
    kind: str,
    product: Callable,
    timer: Callable,
    clock: Callable[[], float] = time.monotonic,
) -> dict:
    """Search bucket after bucket, and keep each; a summary. `product` and `timer` are
    those of tune_cases."""
    record = tune_search.load(settings.path, kind)
    by_key = {key_of(bucket, settings): bucket for bucket in settings.buckets}
    known = () if settings.is_again else record["tiles"]
    todo = [bucket for key, bucket in by_key.items() if key not in known]
    print(f"{kind}: {len(todo)} buckets for {settings.path}", flush=True)
    rows, end = [], clock() + settings.limit_sec
    while todo and clock() < end:
        share_end = clock() + (end - clock()) / len(todo)

        def is_over(share_end=share_end):
            return clock() >= share_end

        row = searched(todo.pop(0), settings, product, timer, is_over)
        record = recorded(record, row)
        tune_search.keep(settings.path, record)
        rows.append(row)
    if todo:
        print(f"the time is up: {len(todo)} buckets are left, run it again")
    file = str(settings.path)
    return {"device": kind, "file": file, "measured": rows, "num_left": len(todo)}


def searched(
    bucket: Bucket,
    settings: Settings,
    product: Callable,
    timer: Callable,
    is_over: Callable[[], bool],
) -> dict:
    """The fastest tiles of one bucket, and how they were found."""
    import jax.numpy as jnp

    from tools import tune_cases

    name, which, shape = bucket
    itemsize = jnp.dtype(settings.dtype).itemsize
    case = tune_cases.prepare(
        which, shape, settings.dtype, settings.skews, settings.seed, product
    )
    found = tune_search.search(
        tune_search.candidates(which, shape, itemsize),
        lambda tiles: tune_search.neighbours(which, tiles, itemsize),
        tune_cases.measurer(case, product, timer),
        is_over,
    )
    rule = tuning.by_rule(which, shape)
    if rule not in found.msec:
        raise RuntimeError(f"{rule} of the rule has no time: {found.skipped[rule]}")
    for tiles, why in found.skipped.items():
        print(f"  skipped {tiles}: {why}")
    best, best_msec = found.best, found.msec[found.best]
    print(
        f"{which} of {name}, {shape.d} -> {shape.f}: {best_msec:.3f} ms by {best}; "
        f"{found.msec[rule]:.3f} ms by the rule; {len(found.msec)} timed, "
        f"{len(found.skipped)} skipped" + ("" if found.is_whole else ", not whole"),
        flush=True,
    )
    return {
        "bucket": key_of(bucket, settings),
        "shape": name,
        "tiles": dataclasses.asdict(best),
        "msec": best_msec,
        "rule_msec": found.msec[rule],
        "skews": settings.skews,
        "num_timed": len(found.msec),
        "num_skipped": len(found.skipped),
        "is_whole": found.is_whole,
    }


def recorded(record: dict, row: dict) -> dict:
    """The file's content with one bucket more; `when`, `jax` and `commit` of a bucket
    stand with its times, and those of the last one at the top."""
    import jax

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"when": now, "jax": jax.__version__, "commit": commit()}
    key, tiles = row["bucket"], row["tiles"]
    told = {k: v for k, v in row.items() if k not in ("bucket", "tiles")}
    return {
        "device": record["device"],
        **about,
        "tiles": record["tiles"] | {key: tiles},
        "measured": record["measured"] | {key: told | about},
    }


def key_of(bucket: Bucket, settings: Settings) -> str:
    return tuning.bucket(bucket.which, bucket.shape, settings.dtype)


if __name__ == "__main__":
    sys.exit(main())
