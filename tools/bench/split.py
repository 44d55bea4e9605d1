"""Compare our split of loads over replicas with other solvers, in time and quality.

    python tools/bench/split.py [--sizes 64/8/2,256/64/2] [--json] [--gpu]

    water_fill        load_e -> rows of each replica, inside a compiled step, with the
                      tolerance of training: the fullest device is at most 0.2 % of the
                      mean above the optimum
    water_fill_exact  the same, to the integer optimum
    water_fill_fused  water_fill with its sweeps as one kernel (Hopper GPUs, --gpu)
    split             all that the step does: counts_we -> rows of each source device to
                      each replica
    highs_cold        the linear program solved by HiGHS, with a new model each time
    highs_warm        HiGHS with the last model and basis, as MicroMoE runs it on the
                      host
    highs_callback    highs_warm from inside a compiled step (jax.pure_callback)
    lplb              LPLB's five steps of affine scaling, compiled

A size is experts / devices / replicas of each expert. Loads are Zipf's, at three skews,
each on a random Cayley plan. From one micro-batch to the next a twentieth of the
experts exchange their loads; warm solvers see the micro-batches in this order. Variants
take turns on every micro-batch. The gap is the relative distance of the fullest device
from the optimum, which max-flow computes as a fraction.

docs/split_tools.md lists the fields of --json. Exit codes: 0 done, 2 bad input.
"""

import argparse
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from tools.bench import program  # noqa: E402
from tools.bench.split_cases import SKEWS, Size, SplitCase, make_case  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import DONE, emit  # noqa: E402

SIZES = "64/8/2,128/16/2,256/64/2,256/64/4"
OURS, BASELINE = "water_fill", "highs_callback"
"""The two variants whose speeds are compared: both run inside a compiled step."""


class Variant(NamedTuple):
    """One way to split loads."""

    solve: Callable
    inputs: list
    """Argument of `solve` for each micro-batch."""
    get_rows: Callable
    """Function that returns the rows [r] of each replica from a result."""
    is_accepted: Callable = lambda result: True
    """Function that returns whether the solver accepted its own solution in a result;
    otherwise it fell back to an even split."""


class Measurement(NamedTuple):
    """Results of one variant on the micro-batches n."""

    msec_n: np.ndarray
    """Median milliseconds over turns."""
    gap_n: np.ndarray
    """Rows of the fullest device over the optimum, minus 1."""
    above_n: np.ndarray
    """Whole rows of the fullest device above the integer optimum."""
    is_accepted_n: np.ndarray


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return program.run(work, args, is_gpu=args.gpu)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "--sizes",
        default=SIZES,
        help="sizes experts/devices/replicas with commas between",
    )
    program.add_repeats(parser, 5)
    add(
        "--micro_batches",
        type=int,
        default=6,
        help="number of micro-batches of each skew",
    )
    add("--tokens", type=int, default=512, help="tokens per device and micro-batch")
    add("--seed", type=int, default=0, help="random seed of plans and loads")
    add(
        "--gpu",
        action="store_true",
        help="compile for this machine's GPU (default: the CPU)",
    )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    sizes = [Size.of(text) for text in args.sizes.split(",")]
    for name in ("repeats", "micro_batches", "tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    device = program.first_device("gpu" if args.gpu else "cpu")
    record = {
        "device": device.device_kind,
        "cores": os.cpu_count(),
        "repeats": args.repeats,
        "num_micro_batches": args.micro_batches * len(SKEWS),
        "tokens_per_device": args.tokens,
        "sizes": {},
    }
    for size in sizes:
        rng = np.random.default_rng((args.seed, *size))
        busy = os.getloadavg()[0]
        shape = (args.micro_batches, args.tokens)
        cases = [make_case(rng, size, skew, *shape) for skew in SKEWS]
        parts = [measure(case, args.repeats) for case in cases]
        variants = {name: figures([part[name] for part in parts]) for name in parts[0]}
        record["sizes"][str(size)] = {
            "cpu_load": busy,
            "speedup_over_highs_callback": (
                variants[BASELINE]["msec_p50"] / variants[OURS]["msec_p50"]
            ),
            "variants": variants,
        }
        show(size, record)
    emit(record, args.json)
    return DONE


def make_variants(case: SplitCase) -> dict[str, Variant]:
    """Return all variants by name, for the micro-batches of a case."""
    import jax
    import jax.numpy as jnp

    from tools.bench import split_baselines as baselines

    problem = baselines.Problem.of(case.row_p, case.size.experts, case.size.devices)
    loads, counts = list(jnp.array(case.load_ne)), list(jnp.array(case.counts_nwe))
    warm, from_step = baselines.warm(problem), baselines.warm(problem)
    fill, split = compile_ours(case)
    jax.block_until_ready((loads, counts))

    def second(result):
        return result[1]

    def cold(load_e):
        return baselines.highs_cold(problem, load_e)

    return {
        "water_fill": Variant(lambda load_e: fill(load_e, 1), loads, np.asarray),
        "water_fill_exact": Variant(lambda load_e: fill(load_e, 0), loads, np.asarray),
        "split": Variant(split, counts, lambda quota_wq: quota_wq.sum(axis=0)),
        **fused_variant(case, loads),
        "highs_cold": Variant(cold, case.load_ne, second),
        "highs_warm": Variant(
            lambda load_e: baselines.solve_warm(warm, load_e), case.load_ne, second
        ),
        "highs_callback": Variant(
            baselines.with_callback(from_step), loads, np.asarray
        ),
        "lplb": Variant(
            baselines.affine_scaling(problem),
            loads,
            lambda result: result[0],
            lambda result: bool(result[1]),
        ),
    }


def fused_variant(case: SplitCase, loads: list) -> dict[str, Variant]:
    """Return `water_fill` with its sweeps in one kernel on a Hopper GPU, and nothing on
    another device."""
    import jax

    if getattr(jax.devices()[0], "compute_capability", "") != "9.0":
        return {}
    fill, _ = compile_ours(case, fused_split=True)
    return {"water_fill_fused": Variant(lambda x: fill(x, 1), loads, np.asarray)}


def compile_ours(case: SplitCase, **changes) -> tuple[Callable, Callable]:
    """Return two compiled functions: (load_e, whether with tolerance) -> rows_q, and
    counts_we -> quota_wq.

    All slots are full, and no expert has two on a device, so the slots sorted by expert
    (q) are the replicas (r) of the baselines.
    """
    import jax
    import jax.numpy as jnp

    from moejax.moe.split import water_filling
    from moejax.moe.split.divide import SPLITS, mean_rows
    from moejax.moe.types import Placement
    from moejax.plan.expert_plan import ExpertPlan
    from moejax.plan.layout import Layout
    from moejax.plan.water_filling import TOLERANCE_BITS

    e, w, _ = case.size
    layout = Layout(
        e, w, len(case.row_p) // w, rows_per_peer=1, store="sharded",
        split="water_filling", **changes,
    )  # fmt: skip
    plan = ExpertPlan(case.row_p[None], e).validate(layout)
    placement = jax.device_put(Placement.from_plan(plan, layout).layer(0))
    tolerance = mean_rows(case.counts_nwe[0], layout) >> TOLERANCE_BITS
    rows_above = (jnp.int32(0), jnp.asarray(tolerance, jnp.int32))

    @jax.jit
    def fill(load_e, placement, tolerance):
        return water_filling.fill(load_e, placement, layout, tolerance).rows_q

    @jax.jit
    def split(counts_we, placement):
        return SPLITS["water_filling"](counts_we, placement, layout).quota_wq

    return (
        lambda load_e, tolerant: fill(load_e, placement, rows_above[tolerant]),
        lambda counts_we: split(counts_we, placement),
    )


def measure(case: SplitCase, repeats: int) -> dict[str, Measurement]:
    """Measure each variant on each micro-batch in order.

    Variants take turns, every other turn backwards, so that no variant always follows
    the same one.
    """
    import jax

    variants = make_variants(case)
    count = len(case.load_ne)
    msec = {name: np.zeros((repeats, count)) for name in variants}
    results = {name: [None] * count for name in variants}
    for turn in range(-1, repeats):  # the first turn warms up
        for n in range(count):
            for name in variants if turn % 2 else reversed(variants):
                variant = variants[name]
                begin = time.perf_counter()
                result = variant.solve(variant.inputs[n])
                results[name][n] = jax.block_until_ready(result)
                if turn >= 0:
                    msec[name][turn, n] = 1e3 * (time.perf_counter() - begin)
    return {
        name: judge(case, variant, np.median(msec[name], axis=0), results[name])
        for name, variant in variants.items()
    }


def judge(
    case: SplitCase, variant: Variant, msec_n: np.ndarray, results: list
) -> Measurement:
    """Compare a variant's results on each micro-batch with the optimum, and return them
    with its times."""
    from tools.bench import split_baselines as baselines

    problem = baselines.Problem.of(case.row_p, case.size.experts, case.size.devices)
    gap_n, above_n = np.zeros((2, len(results)))
    for n, (load_e, result) in enumerate(zip(case.load_ne, results, strict=True)):
        optimum = baselines.flow_optimum(problem, load_e)
        rows_r = np.asarray(variant.get_rows(result), np.float64)
        whole_r = baselines.round_rows(problem, rows_r, load_e)
        gap_n[n] = baselines.max_device_rows(problem, rows_r) / float(optimum) - 1
        above_n[n] = baselines.max_device_rows(problem, whole_r) - math.ceil(optimum)
    is_accepted_n = np.array([variant.is_accepted(result) for result in results])
    return Measurement(msec_n, gap_n, above_n, is_accepted_n)


def figures(parts: list[Measurement]) -> dict[str, float]:
    """Summarize the times and optimality gaps of a variant over the micro-batches of
    all skews."""
    whole = Measurement(*map(np.concatenate, zip(*parts)))
    return {
        "msec_p50": float(np.percentile(whole.msec_n, 50)),
        "msec_p90": float(np.percentile(whole.msec_n, 90)),
        "gap_mean": float(whole.gap_n.mean()),
        "gap_max": float(whole.gap_n.max()),
        "rows_above_ceil_max": int(whole.above_n.max()),
        "accepted_share": float(whole.is_accepted_n.mean()),
    }


def show(size: Size, record: dict) -> None:
    """Print the table of one size."""
    part = record["sizes"][str(size)]
    print(
        f"\n{size}: {record['num_micro_batches']} micro-batches on {record['device']}, "
        f"{record['cores']} cores, load average {part['cpu_load']:.1f}"
    )
    print("| variant | ms p50 | ms p90 | gap mean | gap max | rows above | accepted |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, variant in part["variants"].items():
        print(
            f"| {name} | {variant['msec_p50']:.3f} | {variant['msec_p90']:.3f} "
            f"| {max(variant['gap_mean'], 0):.2%} | {max(variant['gap_max'], 0):.2%} "
            f"| {variant['rows_above_ceil_max']} | {variant['accepted_share']:.0%} |"
        )
    faster = part["speedup_over_highs_callback"]
    print(f"{OURS} is {faster:.1f} times as fast as {BASELINE}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
