"""Configurations in the real training loop, side by side on one cluster.

    compile each, and end it
    start all from the compilation cache, and stop each after its first steps
    set the quota, and let them do blocks of steps in turns: A B C  C B A  A B C ..
    do the same with links of another rate, where several are named
    the ratio of a pair of blocks is that of the seconds a step of B, C .. to those of A

Nothing of a run's time is left out but its start: swaps, relayouts, their compilation
and planning are in the blocks of the run that needs them.
"""

import argparse
import contextlib
import dataclasses
import math
import pathlib
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence

from tools.testbed.cluster import Cluster, LiveCluster, make_cluster
from tools.testbed.lock import say
from tools.testbed.trace import bindings
from tools.testbed.turns import Block, Metrics, Run, steady_steps, take_turns
from train.config import gin_reader

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIRST_STEPS = 2
"""Steps of each run before its first block. They run without a quota."""
LETTERS = "ABCDEFGH"
"""Names of the configurations, in the order in which they are given."""
START_SEC, BLOCK_SEC = 1500.0, 900.0
"""Limits of the time that a run takes to compile and do its first steps, and of the
time of a block."""


def pair(args: argparse.Namespace) -> dict:
    """Run all configurations, and return the record of their blocks. `args` are those
    of `run.py pair`.

    Raises ValueError for configurations that do not fit the cluster, before any runs,
    and OSError for a run that fails.
    """
    for name in ("blocks", "block_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)} must be 1 or more")
    if len(args.rate_mbit) > 1 and 0 in args.rate_mbit:
        raise ValueError("--rate_mbit 0 leaves links unshaped: name it alone")
    if len(args.others) >= len(LETTERS):
        raise ValueError(f"pair compares {len(LETTERS)} configurations at most")
    gin_files = args.a, *args.others
    spec = _cluster(gin_files, args)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="testbed-"))
        )
        params = [*args.gin_param]
        if args.trace is not None:
            params += bindings(args.trace, args.layer, folder)
        num_blocks = args.blocks * len(args.rate_mbit)
        num_steps = FIRST_STEPS + num_blocks * args.block_steps
        # The last step is never done: a run is ended after its last block, without the
        # evaluation and the checkpoint that stand at its end.
        params += [f"Train.num_steps = {num_steps + 1}"]
        live = stack.enter_context(make_cluster(spec))
        sides = list(zip(LETTERS, gin_files, strict=False))
        for letter, path in sides:
            say(f"{path}: compiling")
            with _first_steps(live, path, params, folder / letter):
                pass
        runs = [
            stack.enter_context(_first_steps(live, path, params, folder / letter))
            for letter, path in sides
        ]
        live.set_quota(args.quota)
        found = []
        for rate_mbit in args.rate_mbit:
            say(f"{args.blocks} blocks of {args.block_steps} steps each, in turns")
            live.set_rate(rate_mbit)
            blocks = take_turns(runs, args.block_steps, args.blocks, BLOCK_SEC)
            found.append({"rate_mbit": rate_mbit} | make_record(runs, blocks))
        return {
            "gin_files": [str(path) for path in gin_files],
            "rates": found,
            "is_shaped": live.is_shaped,
            "has_quota": live.groups is not None and args.quota is not None,
        }


def make_record(runs: Sequence[Run], blocks: Sequence[Block]) -> dict:
    """Return the record of blocks of runs: lists with the figures of each run, and for
    each but the first the ratios of its blocks to those of the first, in the order in
    which they ran."""
    sides = [[block for block in blocks if block.run == run.name] for run in runs]
    ratios = [
        [b.step_sec / a.step_sec for a, b in zip(sides[0], side, strict=True)]
        for side in sides[1:]
    ]
    steady = [_steady(run, side) for run, side in zip(runs, sides)]
    return {
        "num_steps": [sum(block.num_steps for block in side) for side in sides],
        "step_sec": [statistics.median(b.step_sec for b in side) for side in sides],
        "steady_sec": [sec for sec, _ in steady],
        "modelled_sec": [modelled for _, modelled in steady],
        "device_max_over_mean": [
            _max_over_mean(run, side[0].first_step) for run, side in zip(runs, sides)
        ],
        "last_loss": [_losses(run)[-1] for run in runs],
        "ratio": [statistics.median(each) for each in ratios],
        "ratios": ratios,
        "blocks": [dataclasses.asdict(block) for block in blocks],
    }


def _steady(run: Run, blocks: Sequence[Block]) -> tuple[float, float]:
    """Return the median seconds of the steps that do not follow a switch, and what the
    cost model gives them."""
    kept = set(steady_steps(blocks))
    found = [
        (record["step_msec"], record.get("modelled_step_msec", math.nan))
        for record in run.metrics.records
        if record.get("step") in kept and "step_msec" in record
    ]
    measured, modelled = zip(*found)
    return statistics.median(measured) / 1e3, statistics.median(modelled) / 1e3


def report(record: dict) -> list[str]:
    """Return the lines that say a record to a reader."""
    lines = [f"{letter}  {path}" for letter, path in zip(LETTERS, record["gin_files"])]
    for at in record["rates"]:
        lines += [f"links of {at['rate_mbit']:g} Mb/s", *_table(at)]
    if not record["is_shaped"]:
        lines.append("links were NOT shaped")
    if not record["has_quota"]:
        lines.append("processes had no quota: they share the cores as they like")
    return lines


def _table(at: dict) -> list[str]:
    """Return the lines with the figures of each run at one rate."""
    head = "s/step", "steady", "modelled", "max/mean", "last loss", "steps"
    lines = ["    " + "".join(f"{word:>10}" for word in head)]
    for side, letter in enumerate(LETTERS[: len(at["step_sec"])]):
        lines.append(
            f"{letter:4}{at['step_sec'][side]:>10.3f}"
            f"{at['steady_sec'][side]:>10.3f}{at['modelled_sec'][side]:>10.3f}"
            f"{at['device_max_over_mean'][side]:>10.2f}"
            f"{at['last_loss'][side]:>10.4f}{at['num_steps'][side]:>10}"
        )
    for letter, middle, ratios in zip(LETTERS[1:], at["ratio"], at["ratios"]):
        lines.append(
            f"{letter} / A  {middle:.3f} in the median of {len(ratios)} pairs "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    return lines


def _cluster(gin_files: Sequence[pathlib.Path], args: argparse.Namespace) -> Cluster:
    """Return the cluster for the devices of all configurations, a process each."""
    numbers = []
    for path in gin_files:
        cfg = gin_reader.load([path], list(args.gin_param))
        numbers.append(cfg.train.num_simulated_devices)
    num_devices = numbers[0]
    if len(set(numbers)) > 1 or not num_devices or num_devices % args.dcs:
        raise ValueError(
            f"Train.num_simulated_devices is {' and '.join(map(str, numbers))}: it "
            f"must be the same multiple of --dcs={args.dcs} in all, a process for each "
            "device"
        )
    return Cluster(args.dcs, num_devices // args.dcs, args.rate_mbit[0] or None)


@contextlib.contextmanager
def _first_steps(
    live: LiveCluster,
    gin_file: pathlib.Path,
    params: Sequence[str],
    run_dir: pathlib.Path,
) -> Iterator[Run]:
    """Start a run in an empty folder, let it do its first steps, and stop it, for a
    `with` block. A process that has compiled would be no equal of one that has not: its
    memory is in pieces, and its steps take 1.5 times as long."""
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [str(ROOT / "train" / "main.py"), f"--gin_file={gin_file}"]
    command += [f"--gin_param={param}" for param in params] + [f"--run_dir={run_dir}"]
    with live.held(command) as program:
        run = Run(run_dir.name, program, Metrics(run_dir / "metrics.jsonl"))
        run.advance(FIRST_STEPS, START_SEC)
        yield run


def _max_over_mean(run: Run, first_step: int) -> float:
    """Return the device max/mean of a run's worst layer, the mean over its steps from
    `first_step` on."""
    values = [
        max(record["device_max_over_mean"])
        for record in run.metrics.records
        if "device_max_over_mean" in record and record["step"] >= first_step
    ]
    return statistics.mean(values)


def _losses(run: Run) -> list[float]:
    return [record["loss"] for record in run.metrics.records if "loss" in record]
