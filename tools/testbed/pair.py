"""Two configurations in the real training loop, side by side on one cluster.

    compile both, and end them
    start both from the compilation cache, and stop each after its first steps
    set the quota, and let them do blocks of steps in turns: A B  B A  A B ..
    the ratio of a pair of blocks is B's seconds a step over A's

Nothing of a run's time is left out but its start: swaps, relayouts, their compilation
and planning are in the blocks of the run that needs them.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence

from tools.testbed.cluster import Cluster, LiveCluster, make_cluster
from tools.testbed.lock import say
from tools.testbed.trace import LAYER, bindings
from tools.testbed.turns import Block, Run, started, take_turns
from train.config import gin_reader

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIRST_STEPS = 2
"""Steps of each run before its first block. They run without a quota."""
START_SEC, BLOCK_SEC = 1500.0, 900.0
"""Limits of the time that a run takes to compile and do its first steps, and of the
time of a block."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a comparison: two configurations, a cluster, and turns."""

    gin_files: tuple[pathlib.Path, pathlib.Path]
    gin_param: tuple[str, ...] = ()
    """Bindings of both."""
    dcs: int = 2
    rate_mbit: float | None = 100.0
    quota: float | None = None
    blocks: int = 5
    block_steps: int = 20
    trace: pathlib.Path | None = None
    """File of a recorded routing that both follow; None: the configurations' load."""
    layer: int = LAYER

    def __post_init__(self) -> None:
        for name in ("blocks", "block_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)} must be 1 or more")


def pair(options: Options) -> dict:
    """Run both configurations, and return the record of their blocks.

    Raises ValueError for configurations that do not fit the cluster, before any runs,
    and OSError for a run that fails.
    """
    spec = _cluster(options)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="testbed-"))
        )
        params = [*options.gin_param]
        if options.trace is not None:
            params += bindings(options.trace, options.layer, folder)
        num_steps = FIRST_STEPS + options.blocks * options.block_steps
        # The last step is never done: a run is ended after its last block, without the
        # evaluation and the checkpoint that stand at its end.
        params += [f"Train.num_steps = {num_steps + 1}"]
        live = stack.enter_context(make_cluster(spec))
        for side in (0, 1):
            say(f"{options.gin_files[side]}: compiling")
            with _first_steps(live, options.gin_files[side], params, folder, side):
                pass
        runs = [
            stack.enter_context(
                _first_steps(live, options.gin_files[side], params, folder, side)
            )
            for side in (0, 1)
        ]
        live.set_quota(options.quota)
        say(f"{options.blocks} blocks of {options.block_steps} steps each, in turns")
        steps = (options.block_steps, options.block_steps)
        blocks = take_turns(runs, steps, options.blocks, BLOCK_SEC)
        has_quota = live.groups is not None and options.quota is not None
        return make_record(runs, blocks) | {
            "gin_files": [str(path) for path in options.gin_files],
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


def _cluster(options: Options) -> Cluster:
    """Return the cluster for the devices of both configurations, a process each."""
    numbers = []
    for path in options.gin_files:
        cfg = gin_reader.load([path], list(options.gin_param))
        numbers.append(cfg.train.num_simulated_devices)
    num_devices, other = numbers
    if num_devices != other or not num_devices or num_devices % options.dcs:
        raise ValueError(
            f"Train.num_simulated_devices is {num_devices} and {other}: it must be the "
            f"same multiple of --dcs={options.dcs} in both, a process for each device"
        )
    return Cluster(options.dcs, num_devices // options.dcs, options.rate_mbit, None)


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
    with started(live, run_dir.name, command, run_dir) as run:
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
