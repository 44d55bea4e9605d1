"""Time of the grouped products against others, on named shapes of real models.

    python tools/bench/grouped_dot.py [--device gpu|cpu] [--json] [--out rows.json]
    python tools/bench/grouped_dot.py --shapes narrow,wide --skews zipf --passes grads

Passes, arms and what they compute are told in grouped_dot_cases.py and
grouped_dot_peers.py, shapes and skews in moejax/kernels/shapes.py. On a processor the
models' shapes are an eighth in every size, in float32; on a GPU they are whole, in
bfloat16.

First every arm must equal float64 on a small case of the same skew, ours with NaN in
padding, and on a sample of the case itself. Then arms and skews take turns, and medians
are shown. An arm that cannot take a case says why and is left out.

docs/bench_kernels.md tells how to read it. Exit codes: 0 done, 1 an arm computes
something else, 2 bad input, 3 the machine failed.
"""

import argparse
import dataclasses
import datetime
import difflib
import json
import os
import pathlib
import secrets
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder's modules are tools.x, never top-level names

from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.allocator import restart_with_huge_pages  # noqa: E402
from train.launch.ending import CRASHED, DONE, emit, guarded, refuse  # noqa: E402

DTYPES = {"cpu": "float32", "gpu": "bfloat16"}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if argv is None and args.device == "cpu":
        restart_with_huge_pages()
    if args.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--shapes", default="all", help="names with commas")
    add("--skews", default="all", help="uniform, zipf, one_hot, with_empty")
    add("--passes", default="all", help="forward, dgrad, wgrad, fused, grads")
    add("--impls", default="all", help="arms, as in tools/bench/grouped_dot_peers.py")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="of all arrays")
    add("--repeats", type=int, default=7, help="turns of which the median counts: 7")
    add("--seed", type=int, help="of the inputs; fresh ones without it")
    add("--untuned", action="store_true", help="allow tiles that were never measured")
    add("--out", type=pathlib.Path, help="write the same list to this file")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    from moejax.kernels.shapes import CPU_SHAPES, MODEL_SHAPES, SKEWS
    from tools.bench import grouped_dot_cases as cases
    from tools.bench import grouped_dot_jobs as jobs
    from tools.bench import grouped_dot_peers as peers
    from tools.bench import grouped_dot_table as table

    known = CPU_SHAPES if args.device == "cpu" else MODEL_SHAPES
    shapes = {name: known[name] for name in named("shapes", args.shapes, known)}
    passes = named("passes", args.passes, cases.PASSES)
    here = peers.ON_CPU if args.device == "cpu" else peers.VARIANTS
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats} must be at least 1")
    settings = jobs.Settings(
        args.device,
        args.dtype or DTYPES[args.device],
        named("skews", args.skews, SKEWS),
        named("impls", args.impls, here),
        args.repeats,
        secrets.randbits(31) if args.seed is None else args.seed,
    )
    record = about(settings)
    needing = [impl for impl in settings.impls if impl in KERNELS]
    for impl in () if args.untuned else needing:
        require_tuned(shapes, passes, settings.dtype, record["device"], impl)
    settings = dataclasses.replace(settings, impls=installed(settings.impls))
    print(", ".join(f"{name} {value}" for name, value in record.items()), flush=True)
    rows = []
    try:
        for name, shape in shapes.items():
            for which in passes:
                found = jobs.measure(settings, shape, which)
                rows += [record | {"shape": name} | row for row in found]
                table.show_pass(rows[-len(found) :], peers.OURS)
                if args.out:
                    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    except jobs.WrongArm as error:
        return refuse(error, CRASHED, args.json)
    table.show_summary(rows, peers.OURS)
    emit(rows, args.json)
    return DONE


def named(option: str, text: str, known: Iterable[str]) -> list[str]:
    """The names of a list with commas, in its order, or all."""
    if text == "all":
        return list(known)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
            raise ValueError(
                f"--{option} has '{name}', which is none of {', '.join(known)} here: "
                f"did you mean '{near[0]}'?"
            )
    return names


def about(settings) -> dict[str, Any]:
    """What all rows have in common."""
    import jax

    try:
        device = jax.devices(settings.device)[0]
    except RuntimeError:
        raise ValueError("--device gpu, and there is no GPU here: use cpu") from None
    return {
        "device": device.device_kind,
        "dtype": settings.dtype,
        "jax": jax.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "repeats": settings.repeats,
        "seed": settings.seed,
    }


def commit() -> str:
    """Short, with a + where files differ from it; 'unknown' outside a repository."""
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.check_output(
            [*git, "rev-parse", "--short", "HEAD"], text=True
        )
        changed = subprocess.check_output([*git, "status", "--porcelain"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.strip() + ("+" if changed.strip() else "")


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
"""What an arm runs in a pass, as tiles know it."""


def require_tuned(
    shapes: dict, passes: list[str], dtype: str, device_kind: str, impl: str = "hopper"
) -> None:
    """ValueError where an arm would run with tiles that were never measured. What it
    declines needs none: the rows say why."""
    from moejax.kernels import tuning
    from moejax.kernels.grouped_dot.hopper import kernels

    is_fp8 = impl == "hopper_fp8"
    for shape in shapes.values():
        if kernels.declines(dtype, shape.rows, shape.d, shape.f, is_fp8=is_fp8):
            continue
        for which in passes:
            is_wide = is_fp8 and which == "fused"
            of = dataclasses.replace(shape, f=2 * shape.f) if is_wide else shape
            for kernel in KERNELS[impl][which]:
                try:
                    tuning.require(kernel, of, dtype, device_kind)
                except ValueError as error:
                    raise ValueError(f"{error}; or give --untuned") from error


def installed(impls: Iterable[str]) -> list[str]:
    """Those that can be imported; the others are told, once, in one line each."""
    from tools.bench import grouped_dot_peers as peers

    found = []
    for impl in impls:
        try:
            peers.arms(impl, "forward", int(impl == "batched"))
            found.append(impl)
        except (ImportError, OSError) as error:  # OSError: a library of theirs
            print(f"{impl} is not here: {error}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
