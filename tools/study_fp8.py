"""What 8-bit values cost in accuracy: errors of forward and dgrad against float64.

    python tools/study_fp8.py
    python tools/study_fp8.py --seed 1 --json

Inputs are float32, the reference is NumPy in float64 on them. All arms but that begin
with bfloat16, sum in float32 and end in bfloat16; `bfloat16` does nothing else. Blocks
are those of moejax/kernels/grouped_dot/fp8.py, `tensor` has one scale for x or dy and
one for w. w is in e4m3 always; the arm names the format of x or dy.

    normal    x and dy are normal numbers, w too, over the root of its height
    rows      rows of x and dy times exp(2 n), n normal: tokens of unlike size
    columns   one column in 100 of x and dy times 100: features that stand out
    mixed     blocks of 128 values of x and dy times exp(2 n) each

An error is ||out - ref|| / ||ref||: of all, and of the row that one row in ten exceeds.
docs/decisions/0014-fp8.md has the table.
"""

import argparse
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.kernels.grouped_dot import fp8  # noqa: E402
from moejax.kernels.grouped_dot.choose import products  # noqa: E402
from moejax.kernels.shapes import Shape, rows_of  # noqa: E402
from tools.bench.grouped_dot_cases import defined, relative_error  # noqa: E402
from train.launch.ending import DONE, emit, guarded  # noqa: E402

SHAPE = Shape(rows=2048, d=1024, f=1024, groups=8)
PASSES = ("forward", "dgrad")
INPUTS = ("normal", "rows", "columns", "mixed")
ARMS = {
    "bfloat16": None,
    "e4m3 blocks": ("e4m3", "blocks"),
    "e4m3 tensor": ("e4m3", "tensor"),
    "e5m2 blocks": ("e5m2", "blocks"),
    "e5m2 tensor": ("e5m2", "tensor"),
}
SPREAD, HOT_COLUMN, HOT_TIMES = 2.0, 100, 100.0
ROW_PERCENTILE = 90


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs: 0")
    parser.add_argument("--json", action="store_true", help="end with the rows")
    args = parser.parse_args(argv)
    return guarded(lambda: study(args), as_json=args.json)


def study(args: argparse.Namespace) -> int:
    rows_g = rows_of("zipf", SHAPE.rows, SHAPE.groups, seed=args.seed)
    rows = []
    print("| pass | inputs | arm | error | of a row, 90 % |")
    print("|---|---|---|--:|--:|")
    for which in PASSES:
        for kind in INPUTS:
            x, w = inputs(which, kind, args.seed)
            reference = defined(which, [x.astype(np.float64), w], rows_g)
            for arm in ARMS:
                out = computed(which, arm, x, w, rows_g)
                row = {"pass": which, "inputs": kind, "arm": arm}
                row |= errors(out, reference)
                rows.append(row)
                told = f"{row['error']:.2%} | {row['row_error']:.2%}"
                print(f"| {which} | {kind} | {arm} | {told} |", flush=True)
    emit({"seed": args.seed, "rows": rows}, args.json)
    return DONE


def inputs(which: str, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 x or dy, and w."""
    random = np.random.default_rng([seed, INPUTS.index(kind)])
    width = SHAPE.d if which == "forward" else SHAPE.f
    x = random.standard_normal((SHAPE.rows, width))
    w = random.standard_normal((SHAPE.groups, SHAPE.d, SHAPE.f)) / SHAPE.d**0.5
    if kind == "rows":
        x *= np.exp(SPREAD * random.standard_normal((SHAPE.rows, 1)))
    elif kind == "columns":
        x[:, ::HOT_COLUMN] *= HOT_TIMES
    elif kind == "mixed":
        blocks = (SHAPE.rows, -(-width // fp8.BLOCK))
        times = np.exp(SPREAD * random.standard_normal(blocks))
        x *= np.repeat(times, fp8.BLOCK, axis=1)[:, :width]
    return x.astype(np.float32), w.astype(np.float32)


def computed(which: str, arm: str, x, w, rows_g) -> np.ndarray:
    """One pass in float64, of bfloat16 results."""
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, w))
    if ARMS[arm] is not None:
        gradients, form = ARMS[arm]
        dtype, is_whole = fp8.GRADIENTS[gradients], form == "tensor"
        # All matrices one under the other: a tensor has one scale.
        flat = w.reshape(-1, w.shape[2])
        x = fp8.rounded(x, dtype, x.shape if is_whole else fp8.OF_ROWS)
        round_w = functools.partial(fp8.rounded, dtype=fp8.VALUES)
        w = (
            round_w(flat, block=flat.shape).reshape(w.shape)
            if is_whole
            else round_w(w, block=fp8.OF_MATRICES)
        )
    out = compiled(which)(x, w, jnp.asarray(rows_g))
    return np.asarray(out).astype(np.float64)


@functools.cache
def compiled(which: str):
    return jax.jit(getattr(products("blocked"), which))


def errors(out: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    by_row = np.linalg.norm(out - reference, axis=1) / np.linalg.norm(reference, axis=1)
    of_row = float(np.percentile(by_row, ROW_PERCENTILE))
    return {"error": relative_error(out, reference), "row_error": of_row}


if __name__ == "__main__":
    sys.exit(main())
