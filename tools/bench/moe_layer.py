"""Time one MoE layer, forward alone and with backward, against three baselines.

    python tools/bench/moe_layer.py [--json] [--skew zipf] [--splits] [--gpu]

    dense       a SwiGLU of equal FLOPs (width k*f), data parallel: the speed of light
    einsum      GShard's one-hot dispatch, one group per device; its capacity gives it
                as many buffer rows as the layer has, and rows beyond it are dropped
    ragged_dot  the layer with jax.lax.ragged_dot as grouped product
    moejax      the layer: exact exchange, blocked grouped product

With --splits also the layer with twice the slots, whose copies travel in each pass:

    even            two replicas of each expert, which share its rows evenly
    water_filling   the same replicas; the fullest device has as few rows as possible
    dynamic         replicas by the loads; every device has the mean number of rows

First all variants but dense must equal the definition of the layer, in values and
gradients, on a small case. Then all run in turns, and medians are shown. Exit codes: 0
done, 1 a variant computes something else, 2 bad input.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder's modules are tools.x, never top-level names

from moejax import simulate  # noqa: E402
from tools.bench.turns import median_sec  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import (  # noqa: E402
    BAD_INPUT,
    CRASHED,
    refuse,
    restart_with_huge_pages,
)

PASSES = ("fwd", "fwd_bwd")
SIZES = {
    "d": 256, "f": 512, "tokens": 2048, "experts": 64, "top_k": 2, "devices": 8,
    "repeats": 7,
}  # fmt: skip
MEANINGS = {
    "d": "width of the model",
    "f": "hidden width of an expert",
    "tokens": "tokens per device",
    "experts": "number of experts",
    "top_k": "experts that each token chooses",
    "devices": "number of simulated devices; with --gpu all GPUs are used",
    "repeats": "number of times that each variant is measured; medians are kept",
}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if argv is None and not args.gpu:
        restart_with_huge_pages()
    try:
        set_up_backend(args)
        record = run(args)
    except ValueError as error:
        return refuse(error, BAD_INPUT, args.json)
    except AssertionError as error:
        return refuse(error, CRASHED, args.json)
    show(record)
    if args.json:
        print(json.dumps(record), flush=True)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="use the GPUs of this machine, in bfloat16 (default: simulated devices on"
        " the CPU, in float32)",
    )
    parser.add_argument(
        "--splits",
        action="store_true",
        help="also measure the layer with replicas, under each split",
    )
    parser.add_argument(
        "--skew",
        choices=("uniform", "zipf"),
        default="uniform",
        help="distribution of the loads over experts",
    )
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=MEANINGS[name])
    return parser.parse_args(argv)


def set_up_backend(args: argparse.Namespace) -> None:
    """Set the environment variables that JAX and XLA read when JAX is imported."""
    flags = simulate.with_flags(os.environ, *simulate.COLLECTIVE_FLAGS)
    variables = {"XLA_FLAGS": flags}
    if not args.gpu:
        variables = simulate.environment(args.devices, os.environ)
    os.environ.update(variables)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))


def run(args: argparse.Namespace) -> dict:
    """Check and measure all variants of the layer, and return the record. Raises
    AssertionError if a variant computes wrong values."""
    import jax

    from tools.bench.moe_case import LayerShape, make_case

    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats} must be at least 1")
    sizes = {name: getattr(args, name) for name in SIZES if name != "repeats"}
    dtype = "float32"
    if args.gpu:
        dtype, sizes["devices"] = "bfloat16", len(jax.devices("gpu"))
    shape = LayerShape(**sizes, skew=args.skew, dtype=dtype)
    layout, capacity = shape.layout, shape.layout.rows_per_slot
    check(shape, has_splits=args.splits)
    case = make_case(shape)
    later = max(case.fullest_pair - layout.rows_per_peer, 0)
    described = dataclasses.asdict(shape) | {
        "rows_per_peer": layout.rows_per_peer,
        "fullest_pair": case.fullest_pair,
        "rounds": 1 + -(-later // layout.rows_per_round),
        "einsum_capacity": capacity,
        "einsum_dropped_share": case.dropped_share(capacity),
    }
    compiled = compile_variants(case, capacity, has_splits=args.splits)
    median_msec = measure(compiled, args.repeats)
    return report(jax.devices()[0].device_kind, described, compiled, median_msec)


def check(shape, *, has_splits: bool) -> None:
    """Raise AssertionError unless all variants but dense compute the layer and its
    gradients."""
    import jax

    from tools.bench.moe_case import compute_reference, make_case, variants

    small = dataclasses.replace(
        shape, d=max(64, shape.experts), f=32, tokens=64, dtype="float32"
    )
    case = make_case(small)

    def results(apply, params):
        def loss(params, x_btd):
            y_btd = apply(params, x_btd)
            return (y_btd**2).sum(), y_btd

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, y_btd), gradients = step(params, case.x_btd)
        return jax.device_get((y_btd, gradients))

    with jax.default_matmul_precision("highest"):
        expected = results(lambda p, x: compute_reference(case, p, x), case.params)
        all_variants = variants(case, small.tokens, has_splits=has_splits)
        for name, (apply, params) in all_variants.items():
            if name != "dense":
                assert_equal(name, results(apply, params), expected)


def assert_equal(name: str, actual, expected) -> None:
    """Raise AssertionError unless each leaf is right to 1e-5 of its largest value, the
    difference that another order of float32 sums makes."""
    import jax
    import numpy as np

    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, b), a in zip(leaves, jax.tree.leaves(actual), strict=True):
        error, largest = np.max(np.abs(a - b)), np.max(np.abs(b))
        assert error <= 1e-5 * largest, (
            f"{name} computes something else: leaf {jax.tree_util.keystr(path)} is off "
            f"by {error:.3g}, while its largest value is {largest:.3g}"
        )


def compile_variants(case, capacity: int, *, has_splits: bool) -> dict:
    """Return {(variant, pass): (compiled program, its arguments)}."""
    import jax
    import jax.numpy as jnp

    from tools.bench.moe_case import variants

    compiled = {}
    for name, (apply, params) in variants(
        case, capacity, has_splits=has_splits
    ).items():

        def loss(params, x_btd, apply=apply):
            return jnp.sum(apply(params, x_btd).astype(jnp.float32) ** 2)

        steps = {"fwd": apply, "fwd_bwd": jax.value_and_grad(loss, argnums=(0, 1))}
        for which, step in steps.items():
            arguments = (params, case.x_btd)
            compiled[name, which] = jax.jit(step).lower(*arguments).compile(), arguments
    return compiled


def measure(compiled: dict, repeats: int) -> dict[tuple[str, str], float]:
    """Return the median milliseconds of each program. The variants of one pass take
    turns, then those of the other pass."""
    msec = {}
    for which in PASSES:
        calls = {
            key: partial(step, *arguments)
            for key, (step, arguments) in compiled.items()
            if key[1] == which
        }
        msec |= {key: 1e3 * sec for key, sec in median_sec(calls, repeats).items()}
    return msec


def report(device: str, shape: dict, compiled: dict, msec: dict) -> dict:
    """Return the record: a row for each variant and pass, and speedups."""
    rows = [
        {
            "impl": name,
            "pass": which,
            "msec": msec[name, which],
            "ratio_to_moejax": msec[name, which] / msec["moejax", which],
            "share_of_dense_rate": msec["dense", which] / msec[name, which],
            "temp_mib": step.memory_analysis().temp_size_in_bytes / 2**20,
        }
        for (name, which), (step, _) in compiled.items()
    ]
    speedups = {
        f"speedup_over_{baseline}_{which}": msec[baseline, which]
        / msec["moejax", which]
        for baseline in ("einsum", "ragged_dot")
        for which in PASSES
    }
    return {"device": device, "shape": shape, "rows": rows, **speedups}


def show(record: dict) -> None:
    """Print the record as a table. Where a cell has two values, the first is of the
    forward pass and the second includes the backward pass. Temporary MiB are per
    device."""
    shape = record["shape"]
    print(f"{shape['devices']} x {record['device']}")
    print(", ".join(f"{name}={value}" for name, value in shape.items()))
    print(
        "| variant | fwd ms | fwd+bwd ms | / moejax | share of dense rate | temp MiB |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    by_variant = {}
    for row in record["rows"]:
        by_variant.setdefault(row["impl"], {})[row["pass"]] = row
    for name, passes in by_variant.items():
        fwd, both = (passes[which] for which in PASSES)
        print(
            f"| {name} | {fwd['msec']:.1f} | {both['msec']:.1f} "
            f"| {fwd['ratio_to_moejax']:.2f}, {both['ratio_to_moejax']:.2f} "
            f"| {fwd['share_of_dense_rate']:.0%}, {both['share_of_dense_rate']:.0%} "
            f"| {fwd['temp_mib']:.0f}, {both['temp_mib']:.0f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
