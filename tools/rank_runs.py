"""Rank runs by their measured and by their modelled time per step, side by side.

    python tools/rank_runs.py runs/home runs/flexmoe runs/micromoe [--json]

Each step of metrics.jsonl has `step_msec`, measured, and `modelled_step_msec`, which
the cost model gives to a step with these rows at the speeds of Balance.calibration. For
each run:

    measured, modelled   medians over steps, in milliseconds
    bias                 modelled over measured, minus 1: median over steps
    correlation          Pearson's, of the two times of a step; - where one is constant
    rank correlation     Spearman's: the same of their ranks

Then the runs from the fastest to the slowest by both, and how many pairs of runs the
model has in the order of the clock. Steps that adopted a plan or a layout or ran again,
and the first --skip steps, are left out. Nothing is changed, and jax is not needed.
Exit codes: 0 done, 2 bad input.
"""

import argparse
import pathlib
import sys
from typing import Any

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.launch.arguments import new_parser  # noqa: E402
from tools.predictions import figures, rank  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402
from train.logs.record_lines import read_records  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=pathlib.Path, help="run directories of train/main.py")
    add("--skip", type=int, default=5, help="first steps left out", metavar="N")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    """Print the figures of the runs and their order, and return the exit code."""
    names = [str(run) for run in args.runs]
    if len(set(names)) < len(names):
        raise ValueError("a run is named twice: name each run once")
    runs = {name: figures(*read_times(pathlib.Path(name), args.skip)) for name in names}
    order = rank(runs)
    show(runs, order)
    emit({"runs": runs, **order}, args.json)
    return DONE


def read_times(run: pathlib.Path, skip: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the measured and the modelled milliseconds of a run's steps, float [n]
    each."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} has no metrics.jsonl: name a run directory")
    pairs = []
    for record in read_records(path):
        pair = record.get("step_msec"), record.get("modelled_step_msec")
        is_plain = not record.get("redone") and "adopt_msec" not in record
        if is_plain and record["step"] > skip and all(map(_is_time, pair)):
            pairs.append(pair)
    if not pairs:
        raise ValueError(
            f"{path} has no step after step {skip} with step_msec and "
            "modelled_step_msec: give a lower --skip, or train again"
        )
    measured_n, modelled_n = np.array(pairs, float).T
    return measured_n, modelled_n


def show(runs: dict[str, dict[str, Any]], order: dict[str, Any]) -> None:
    """Print a line for each run, from the fastest to the slowest, and the verdict."""
    width = max(map(len, runs))
    heads = ("steps", "measured ms", "modelled ms", "bias", "corr.", "rank corr.")
    print(" " * width + "".join(f"{head:>13}" for head in heads) + "   rank, modelled")
    for place, name in enumerate(order["by_step_msec"], 1):
        run = runs[name]
        cells = [
            f"{run['num_steps']}",
            f"{run['step_msec']:.1f}",
            f"{run['modelled_step_msec']:.1f}",
            f"{run['bias']:+.0%}",
            *(_cell(run[name]) for name in ("correlation", "rank_correlation")),
        ]
        modelled = 1 + order["by_modelled_step_msec"].index(name)
        row = "".join(f"{cell:>13}" for cell in cells)
        print(f"{name:{width}}{row}   {place}, {modelled}")
    if order["num_pairs"]:
        print(
            f"the model has {order['num_pairs_in_order']} of {order['num_pairs']} "
            "pairs of runs in the order of the clock"
        )


def _cell(value: float | None) -> str:
    """Return a correlation as text."""
    return "-" if value is None else f"{value:.2f}"


def _is_time(value: Any) -> bool:
    """Return whether a value of a record is a number of milliseconds."""
    return type(value) in (int, float) and 0 < value < 1e12


if __name__ == "__main__":
    sys.exit(main())
