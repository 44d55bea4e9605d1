"""Two configurations in the real training loop, side by side on one cluster.

    compile both, and end them
    start both from the compilation cache, and stop each after its first steps
    set the quota, and let them do blocks of steps in turns: A B  B A  A B ..
    the ratio of a pair of blocks is B's seconds a step over A's

Nothing of a run's time is left out but its start: swaps, relayouts, their compilation
and planning are in the blocks of the run that needs them.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence

from tools.testbed.cluster import Cluster, LiveCluster, make_cluster
from tools.testbed.lock import say
from tools.testbed.trace import bindings
from tools.testbed.turns import Block, Metrics, Run, take_turns
from train.config import gin_reader

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIRST_STEPS = 2
"""Steps of each run before its first block. They run without a quota."""
START_SEC, BLOCK_SEC = 1500.0, 900.0
"""Limits of the time that a run takes to compile and do its first steps, and of the
time of a block."""


def pair(args: argparse.Namespace) -> dict:
    """Run both configurations, and return the record of their blocks. `args` are those
    of `run.py pair`.

    Raises ValueError for configurations that do not fit the cluster, before any runs,
    and OSError for a run that fails.
    """
    for name in ("blocks", "block_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)} must be 1 or more")
    gin_files = args.a, args.b
    spec = _cluster(gin_files, args)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="testbed-"))
        )
        params = [*args.gin_param]
        if args.trace is not None:
            params += bindings(args.trace, args.layer, folder)
        num_steps = FIRST_STEPS + args.blocks * args.block_steps
        # The last step is never done: a run is ended after its last block, without the
        # evaluation and the checkpoint that stand at its end.
        params += [f"Train.num_steps = {num_steps + 1}"]
        live = stack.enter_context(make_cluster(spec))
        for side in (0, 1):
            say(f"{gin_files[side]}: compiling")
            with _first_steps(live, gin_files[side], params, folder, side):
                pass
        runs = [
            stack.enter_context(
                _first_steps(live, gin_files[side], params, folder, side)
            )
            for side in (0, 1)
        ]
        live.set_quota(args.quota)
        say(f"{args.blocks} blocks of {args.block_steps} steps each, in turns")
        blocks = take_turns(runs, args.block_steps, args.blocks, BLOCK_SEC)
        has_quota = live.groups is not None and args.quota is not None
        return make_record(runs, blocks) | {
            "gin_files": [str(path) for path in gin_files],
            "is_shaped": live.is_shaped,
            "has_quota": has_quota,
        }


def make_record(runs: Sequence[Run], blocks: Sequence[Block]) -> dict:
    """Return the record of two runs: figures of each, and the ratios of their pairs of
    blocks, B over A, in the order in which they ran."""
    sides = [[block for block in blocks if block.run == run.name] for run in runs]
    ratios = [b.step_sec / a.step_sec for a, b in zip(*sides, strict=True)]
    return {
        "num_steps": [sum(block.num_steps for block in side) for side in sides],
        "step_sec": [statistics.median(b.step_sec for b in side) for side in sides],
        "device_max_over_mean": [_max_over_mean(run) for run in runs],
        "last_loss": [_losses(run)[-1] for run in runs],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "blocks": [dataclasses.asdict(block) for block in blocks],
    }


def report(record: dict) -> list[str]:
    """Return the lines that say a record to a reader."""
    lines = [f"{'':4}{'s/step':>8}{'max/mean':>10}{'last loss':>11}{'steps':>7}"]
    for side, name in enumerate("AB"):
        lines.append(
            f"{name:4}{record['step_sec'][side]:>8.3f}"
            f"{record['device_max_over_mean'][side]:>10.2f}"
            f"{record['last_loss'][side]:>11.4f}{record['num_steps'][side]:>7}"
            f"  {record['gin_files'][side]}"
        )
    low, high = min(record["ratios"]), max(record["ratios"])
    lines.append(
        f"B / A  {record['ratio']:.3f} in the median of {len(record['ratios'])} pairs "
        f"({low:.3f} to {high:.3f})"
    )
    if not record["is_shaped"]:
        lines.append("links were NOT shaped")
    if not record["has_quota"]:
        lines.append("processes had no quota: they share the cores as they like")
    return lines


def _cluster(gin_files: Sequence[pathlib.Path], args: argparse.Namespace) -> Cluster:
    """Return the cluster for the devices of both configurations, a process each."""
    numbers = []
    for path in gin_files:
        cfg = gin_reader.load([path], list(args.gin_param))
        numbers.append(cfg.train.num_simulated_devices)
    num_devices, other = numbers
    if num_devices != other or not num_devices or num_devices % args.dcs:
        raise ValueError(
            f"Train.num_simulated_devices is {num_devices} and {other}: it must be the "
            f"same multiple of --dcs={args.dcs} in both, a process for each device"
        )
    return Cluster(args.dcs, num_devices // args.dcs, args.rate_mbit or None)


@contextlib.contextmanager
def _first_steps(
    live: LiveCluster,
    gin_file: pathlib.Path,
    params: Sequence[str],
    folder: pathlib.Path,
    side: int,
) -> Iterator[Run]:
    """Start a run in an empty folder, let it do its first steps, and stop it, for a
    `with` block. A process that has compiled would be no equal of one that has not: its
    memory is in pieces, and its steps take 1.5 times as long."""
    run_dir = folder / "AB"[side]
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [str(ROOT / "train" / "main.py"), f"--gin_file={gin_file}"]
    command += [f"--gin_param={param}" for param in params] + [f"--run_dir={run_dir}"]
    with live.held(command) as program:
        run = Run(run_dir.name, program, Metrics(run_dir / "metrics.jsonl"))
        run.advance(FIRST_STEPS, START_SEC)
        yield run


def _max_over_mean(run: Run) -> float:
    """Return the device max/mean of a run's worst layer, the mean over its steps."""
    values = [
        max(record["device_max_over_mean"])
        for record in run.metrics.records
        if "device_max_over_mean" in record
    ]
    return statistics.mean(values)


def _losses(run: Run) -> list[float]:
    return [record["loss"] for record in run.metrics.records if "loss" in record]
