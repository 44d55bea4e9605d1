"""Time one MoE layer, forward alone and with backward, against three baselines.

    python tools/bench/moe_layer.py [--json] [--gpu] [--tokens 8192 --experts 64 ..]

    dense       a SwiGLU of equal FLOPs (width k*f), data parallel: the speed of light
    einsum      GShard's one-hot dispatch, one group per device; its capacity gives it
                as many buffer rows as the layer has, and rows beyond it are dropped
    ragged_dot  the layer with jax.lax.ragged_dot as grouped product
    moejax      the layer: exact exchange, our grouped product

The router's matrix and inputs are random, so that loads are nearly even. First all
variants but dense must equal the definition of the layer, in values and gradients, on a
small case. Then all run in turns, and medians are shown. --out has the rows of a pass
as soon as it is measured. Exit codes: 0 done, 1 a variant computes something else,
2 bad input.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from functools import partial

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from moejax import simulate  # noqa: E402
from moejax.config import Moe  # noqa: E402
from tools.bench import moe_variants, program  # noqa: E402
from tools.bench.timer import median_sec  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.files import write_whole  # noqa: E402
from train.launch.program import CRASHED, DONE, emit, refuse  # noqa: E402

SIZES = {
    "d": (256, "width of the model"),
    "f": (512, "hidden width of an expert"),
    "tokens": (2048, "tokens per device"),
    "experts": (64, "number of experts"),
    "top_k": (2, "experts that each token chooses"),
    "devices": (8, "number of simulated devices; with --gpu all GPUs are used"),
    "repeats": (7, "number of times that each variant is measured"),
}
SMALL = {"d": 128, "f": 128, "tokens": 64}
"""Sizes of the case that is checked."""
MAX_ERROR = 2
"""Largest error of a right layer, over that of a product: several of them follow one
another, and each rounds."""
GPU_CALLS = 5
"""Calls of one turn on GPUs, which hide the time in which the host starts a step."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return program.run(work, args, is_gpu=args.gpu, has_huge_pages=argv is None)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="use the GPUs of this machine, in bfloat16 (default: simulated devices on"
        " the CPU, in float32)",
    )
    for name, (default, meaning) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="JSON file for the rows, rewritten after each pass (default: none)",
    )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    for name in SIZES:
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    devices = program.devices("gpu") if args.gpu else simulate.devices(args.devices)
    moe = Moe(num_experts=args.experts, top_k=args.top_k, d_expert=args.f)
    about = ("bfloat16" if args.gpu else "float32"), devices
    case = moe_variants.make_case(moe, args.d, args.tokens, *about)
    few = dataclasses.replace(moe, d_expert=SMALL["f"])
    few = moe_variants.make_case(few, SMALL["d"], SMALL["tokens"], *about)
    for name, error in moe_variants.check(few).items():
        if not error <= MAX_ERROR:
            line = (
                f"{name} computes something else: {error:.3g} times a product's error"
            )
            return refuse(line, CRASHED, args.json)
    sizes = {name: getattr(args, name) for name in SIZES} | {"devices": len(devices)}
    record = {"device": devices[0].device_kind, "shape": sizes, "rows": []}
    for rows in measure(case, args.repeats, GPU_CALLS if args.gpu else 1):
        record["rows"] += rows
        if args.out:
            write_whole(args.out, json.dumps(record))
    show(record)
    emit(record, args.json)
    return DONE


def measure(
    case: moe_variants.LayerCase, repeats: int, calls_per_turn: int
) -> Iterator[list[dict]]:
    """Yield the rows of each pass, one for each variant. The variants of a pass take
    turns. One that does not fit on the device, or that XLA refuses, has `failed`."""

    def loss(params, x_btd, apply):
        return jnp.sum(apply(params, x_btd).astype(jnp.float32) ** 2)

    def both(apply):
        return jax.value_and_grad(partial(loss, apply=apply), argnums=(0, 1))

    own = moe_variants.variants(case, case.setup.layout.rows_per_slot)
    for which, step in {"fwd": lambda apply: apply, "fwd_bwd": both}.items():
        programs, failed = {}, {}
        for name, (apply, params) in own.items():
            try:
                lowered = jax.jit(step(apply)).lower(params, case.x_btd)
                programs[name] = lowered.compile()
                jax.block_until_ready(programs[name](params, case.x_btd))
            except jax.errors.JaxRuntimeError as error:
                failed[name] = str(error).partition("\n")[0]
        calls = {
            name: partial(compiled, own[name][1], case.x_btd)
            for name, compiled in programs.items()
        }
        sec = median_sec(calls, repeats, calls_per_turn)
        yield [
            {
                "impl": name,
                "pass": which,
                "msec": 1e3 * sec[name],
                "ratio_to_moejax": ratio(sec, name, "moejax"),
                "share_of_dense_rate": ratio(sec, "dense", name),
                "temp_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
            }
            for name, compiled in programs.items()
        ] + [
            {"impl": name, "pass": which, "msec": None, "failed": why}
            for name, why in failed.items()
        ]


def ratio(sec: dict[str, float], name: str, of: str) -> float | None:
    """Return a time over another one; None where one of them is not known."""
    return sec[name] / sec[of] if {name, of} <= sec.keys() else None


def show(record: dict) -> None:
    """Print the record as a table. Temporary MiB are per device."""
    print(f"{record['shape']['devices']} x {record['device']}")
    print(", ".join(f"{name}={value}" for name, value in record["shape"].items()))
    print("| variant | pass | ms | / moejax | share of dense rate | temp MiB |")
    print("|---|---|--:|--:|--:|--:|")
    for row in record["rows"]:
        cells = [row.get("failed", ""), "", "", ""]
        if row["msec"] is not None:
            to_moejax, share = row["ratio_to_moejax"], row["share_of_dense_rate"]
            cells = [
                f"{row['msec']:.2f}",
                "-" if to_moejax is None else f"{to_moejax:.2f}",
                "-" if share is None else f"{share:.0%}",
                f"{row['temp_mib']:.0f}",
            ]
        print(f"| {row['impl']} | {row['pass']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
