"""The race: arms of configs/race_cpu.gin in the real training loop, beside exact home.

    start home, eight processes, from the compilation cache
    for each arm that has no result yet:
        start it too, and stop it after its first steps
        let the two do blocks of steps in turns, with a quota
        write DIR/<load>_seed<n>/<arm>.json, and end it

What is started was compiled before, by runs that were ended after their first steps. A
second call does the arms that are left, and prints all. Nothing of a run's time is left
out but its start: swaps, relayouts, their compilation and planning are in the blocks of
the arm that needs them. docs/race.md says what the figures mean.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from moejax.config import Config
from tools import predictions
from tools.testbed import arms, budget
from tools.testbed.cluster import Cluster, LiveCluster, make_cluster
from tools.testbed.loads import Sizes, make_load, thin
from tools.testbed.lock import say
from tools.testbed.standings import (
    Side,
    compare_losses,
    figures,
    series,
    standings,
)
from tools.testbed.turns import Run, started, take_turns
from train.config import gin_reader
from train.files import write_whole
from train.logs.counter import Counter, counted

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "race_cpu.gin"
FIRST_STEPS = 2
"""Steps of each run before its first block. The first compiles what was not yet, and
runs without a quota."""
HOME_LOAD = "home_load.npz"
"""File of the load that home follows beside an arm: a part of the arm's."""
HOME_STEPS = 1_000_000
"""Number of steps of home beside all arms, of which it does as many as they need."""
COMPILED_AT_ONCE = 2
"""Number of arms that compile at the same time: each does so in one process."""
START_SEC, BLOCK_SEC = 1500.0, 900.0
"""Limits of the time that a run takes to compile and do its first steps, and of the
time of a block."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a race."""

    arms: str | None
    """Names with commas between, or 'all'; None: the default ones of the load."""
    load: str
    trace: pathlib.Path
    steps: int
    block_steps: int
    home_steps: int
    """Steps of home in the time of a block."""
    seed: int
    gin_file: pathlib.Path
    gin_param: list[str]
    """Bindings for every arm, home included."""
    calibration: pathlib.Path | None
    """Speeds for the cost model; None: they are measured before the first arm."""
    rate_mbit: float | None
    quota: float | None
    out: pathlib.Path

    def __post_init__(self) -> None:
        if self.block_steps < 1 or self.steps < self.block_steps:
            raise ValueError(
                f"--steps {self.steps} must be at least --block_steps "
                f"{self.block_steps}, which must be at least 1"
            )
        if self.steps % self.block_steps:
            raise ValueError(
                f"--steps {self.steps} must be a multiple of --block_steps "
                f"{self.block_steps}"
            )
        if not 1 <= self.home_steps <= self.block_steps:
            raise ValueError(
                f"--home_steps {self.home_steps} must be from 1 to --block_steps "
                f"{self.block_steps}"
            )
        Cluster(2, 1, self.rate_mbit, self.quota)  # refuses wrong values of these
        if self.calibration is not None and not self.calibration.is_file():
            raise ValueError(
                f"--calibration {self.calibration} is not a file: name one by "
                "tools/calibrate.py, or leave it out"
            )

    @property
    def folder(self) -> pathlib.Path:
        """Folder of the results with this load and seed."""
        load = self.trace.stem if self.load == "recorded" else self.load
        return self.out / f"{load}_seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Options, gin bindings and speeds that all arms of a race share, and what follows
    from them for one arm."""

    options: Options
    bindings: tuple[str, ...]
    """Gin bindings of every run."""
    cfg: Config
    """Configuration of home."""
    calibration: pathlib.Path
    """File of the speeds that the cost model of every arm has."""

    def words(self, name: str) -> list[str]:
        """Return the arguments of train/main.py that configure an arm."""
        params = [*self.bindings, *arms.params(name, self.cfg)]
        return [f"--gin_file={self.options.gin_file}"] + [
            f"--gin_param={param}" for param in params
        ]

    def words_beside(self) -> list[str]:
        """Return the arguments of train/main.py for home beside the arms, which does
        fewer steps, on loads of an arm's blocks."""
        source = self.options.folder.resolve() / HOME_LOAD
        params = [f"Recorded.source = '{source}'", f"Train.num_steps = {HOME_STEPS}"]
        return self.words(arms.BASELINE) + [f"--gin_param={param}" for param in params]

    def run_dir(self, name: str) -> pathlib.Path:
        """Return the folder of an arm's run."""
        return self.options.folder / "runs" / name

    def config(self, name: str) -> Config:
        """Return the configuration of an arm."""
        params = [*self.bindings, *arms.params(name, self.cfg)]
        return gin_reader.load([self.options.gin_file], params)

    def settings(self, name: str) -> dict:
        """Return what a result depends on, for a later call to compare."""
        cfg, path = self.config(name), self.calibration
        cfg = dataclasses.replace(
            cfg, balance=dataclasses.replace(cfg.balance, calibration=None)
        )
        folder = str(self.options.out.resolve())  # results may be moved
        text = gin_reader.render(cfg).replace(folder, "")
        kept = ("load", "steps", "block_steps", "home_steps", "seed", "rate_mbit")
        kept += ("quota",)
        record = {field: getattr(self.options, field) for field in kept}
        return record | {
            "config_sha256": _sha256(text.encode()),
            "load_sha256": _sha256((self.options.folder / "load.npz").read_bytes()),
            "calibration_sha256": (
                _sha256(path.read_bytes()) if path.is_file() else None
            ),
        }


def race(options: Options) -> dict:
    """Run the arms that have no result yet, and return the record of all that have.

    Raises ValueError for arms, loads and settings that cannot be, before any runs, and
    for a folder with results of other settings; OSError for a run that fails.
    """
    chosen = arms.names(options.arms, options.load)
    plan = make_plan(options)
    results = {name: _read_result(plan, name) for name in [*chosen, arms.BASELINE]}
    left = [name for name in chosen if results[name] is None]
    if left:
        layouts, most_bytes = _checked_layouts(plan, left)
        with _cluster(plan) as live:
            _calibrate(plan, live)
            with (
                _home_beside(plan, live) as home,
                counted("race", "steps", len(left) * options.steps) as counter,
            ):
                for index, name in enumerate(left):
                    counter.text = f"arm {index + 1} of {len(left)}: {name}"
                    if index % COMPILED_AT_ONCE == 0:
                        _compile(plan, live, left[index : index + COMPILED_AT_ONCE])
                    pair = Pair(name, layouts[name], home, counter)
                    result = _run_pair(plan, live, pair)
                    results[name] = result | {"budget_bytes": most_bytes}
                    path = options.folder / f"{name}.json"
                    write_whole(path, json.dumps(results[name]))
                    _show(name, result["figures"])
    made = {name: results[name] for name in chosen}
    return make_record(options, made, results[arms.BASELINE])


def make_plan(options: Options) -> Plan:
    """Write the load of a race into its folder, and return what is to be run."""
    cfg = gin_reader.load([options.gin_file], options.gin_param)
    calibration = _calibration(options, cfg)
    num_steps = options.steps + FIRST_STEPS
    sizes = Sizes(
        num_steps=num_steps,
        micro_batches=cfg.train.accumulate_steps,
        num_layers=cfg.model.num_moe_layers,
        num_experts=cfg.moe.num_experts,
        num_devices=cfg.mesh.expert,
    )
    count_rle = make_load(options.load, sizes, options.seed, options.trace)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "load.npz", tokens=count_rle)
    of_home = thin(
        count_rle, sizes, FIRST_STEPS, options.block_steps, options.home_steps
    )
    np.savez(folder / HOME_LOAD, tokens=of_home)
    bindings = (
        *options.gin_param,
        f"Recorded.source = '{folder / 'load.npz'}'",
        # The last step is never done: a run is ended after its last block, without the
        # evaluation and the checkpoint that stand at its end.
        f"Train.num_steps = {num_steps + 1}",
        f"Train.seed = {options.seed}",
        f"Data.seed = {options.seed}",
        f"Balance.calibration = '{calibration}'",
    )
    cfg = gin_reader.load([options.gin_file], bindings)
    return Plan(options, bindings, cfg, calibration)


def make_record(options: Options, results: dict[str, dict], home: dict | None) -> dict:
    """Return the record of a race: `arms` by name, and what they have in common. `home`
    is the result of the arm home, if there is one, for losses to be compared with."""
    made = {
        name: result["figures"] | {"loss": _compare_losses(name, result, home)}
        for name, result in results.items()
    }
    return {
        "load": options.load,
        "trace": options.trace.name if options.load == "recorded" else None,
        "steps": options.steps,
        "block_steps": options.block_steps,
        "home_steps": options.home_steps,
        "seeds": [options.seed],
        "has_quota": all(x["has_quota"] for x in results.values()),
        "is_shaped": all(x["is_shaped"] for x in results.values()),
        "budget_bytes": max(x["budget_bytes"] for x in results.values()),
        "order": predictions.rank({k: x["prediction"] for k, x in made.items()}),
        "arms": standings(made, arms.CEILING),
    }


def _compare_losses(name: str, result: dict, home: dict | None) -> dict | None:
    """Return how far an arm's losses are from those of the arm home; None without."""
    if home is None:
        return None
    should_equal = not arms.ARMS[name].changes_function
    apart = compare_losses(result["arm"], home["arm"])
    return apart | {"should_equal_home": should_equal}


def _cluster(plan: Plan) -> contextlib.AbstractContextManager[LiveCluster]:
    """Return the cluster of a race: a process for each device, in two data centres."""
    num_devices, options = plan.cfg.train.num_simulated_devices, plan.options
    if num_devices is None or num_devices % 2:
        raise ValueError(
            f"Train.num_simulated_devices={num_devices} must be even: a race has two "
            "data centres, and a process for each device"
        )
    return make_cluster(Cluster(2, num_devices // 2, options.rate_mbit, None))


def _calibration(options: Options, cfg: Config) -> pathlib.Path:
    """Return the path of the speeds for the cost model: --calibration, or a file for
    this configuration, rate and quota, which all loads and seeds share."""
    if options.calibration is not None:
        return options.calibration.resolve()
    text = f"{gin_reader.render(cfg)}\n{options.rate_mbit} {options.quota}"
    name = f"calibration_{_sha256(text.encode())[:8]}.json"
    return (options.out / name).resolve()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _calibrate(plan: Plan, live: LiveCluster) -> None:
    """Measure the speeds of the cluster under its quota, unless the file is there."""
    options, path = plan.options, plan.calibration
    if path.is_file():
        return
    say(f"measuring the speeds of collectives and products: {path}")
    live.set_quota(options.quota)
    program = [str(ROOT / "tools" / "calibrate.py"), f"--gin_file={options.gin_file}"]
    program += [f"--gin_param={param}" for param in options.gin_param]
    # Without --compile a relayout would count as free, and it is not under a quota.
    program += ["--compile", "--turns", "3", f"--out={path}"]
    result = live.run(program, timeout_sec=START_SEC)
    if result.exit_code:
        raise OSError(f"tools/calibrate.py ended with code {result.exit_code}")


def _checked_layouts(plan: Plan, left: Sequence[str]) -> tuple[dict[str, dict], int]:
    """Return the layout of the first step of each arm that is left, and the budget of
    each: the slots of one that replicates, in all layers, and home's buffers, in bytes.

    Raises ValueError for an arm that cannot run, or that exceeds the budget.
    """
    layouts = {name: _dry_layout(plan, name) for name in left}
    home = layouts.get(arms.BASELINE) or _dry_layout(plan, arms.BASELINE)
    most_bytes = budget.limit(home, arms.num_slots(plan.cfg), plan.cfg)
    for name, layout in layouts.items():
        budget.require_within(name, layout, most_bytes, plan.config(name))
    return layouts, most_bytes


def _dry_layout(plan: Plan, name: str) -> dict:
    """Return the layout of an arm's first step, from a dry run."""
    # The calibration may not be there yet, and a layout does not depend on it.
    command = [sys.executable, str(ROOT / "train" / "main.py"), *plan.words(name)]
    command += ["--gin_param=Balance.calibration = None", "--dry_run", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise ValueError(f"arm {name} cannot run: {lines[-1]}")
    return json.loads(result.stdout.splitlines()[-1])["layout"]


@dataclasses.dataclass(frozen=True)
class Pair:
    """An arm, the layout of its first step, and home, which is alive and stopped."""

    name: str
    layout: dict
    home: Run
    counter: Counter
    """Counter of the steps of all arms."""


def _run_pair(plan: Plan, live: LiveCluster, pair: Pair) -> dict:
    """Run an arm beside home, and return its result."""
    options, name, home, counter = plan.options, pair.name, pair.home, pair.counter
    say(f"{name}: starting it")
    live.set_quota(None)
    with _first_steps(live, plan.words(name), plan.run_dir(name)) as arm:
        live.set_quota(options.quota)
        block_steps = options.block_steps, options.home_steps
        say(f"{name}: {options.steps} steps, {block_steps} at a time of it and of home")
        num_blocks, before = options.steps // options.block_steps, counter.done
        counter.poll = lambda: before + max(arm.metrics.last_step - FIRST_STEPS, 0)
        blocks = take_turns((arm, home), block_steps, num_blocks, BLOCK_SEC)
        counter.poll, counter.done = None, before + options.steps
    sides = [
        Side([b for b in blocks if b.run == run.name], run.metrics.records)
        for run in (arm, home)
    ]
    has_quota = live.groups is not None and options.quota is not None
    made = figures(*sides, pair.layout, plan.config(name))
    if not has_quota:
        made["speedup"] = None  # all processes share the cores as they like
    return {
        "settings": plan.settings(name),
        "figures": made,
        "has_quota": has_quota,
        "is_shaped": live.is_shaped,
        "blocks": [dataclasses.asdict(block) for block in blocks],
        "arm": series(sides[0]),
        "home": series(sides[1]),
    }


@contextlib.contextmanager
def _home_beside(plan: Plan, live: LiveCluster) -> Iterator[Run]:
    """Start home, which is stopped whenever no arm has it beside it, for a `with`
    block.

    Before the first arm it does as many steps as beside one: its heap grows meanwhile,
    in steps of a second or two.
    """
    say("home, beside all arms: compiling and starting it")
    live.set_quota(None)
    options = plan.options
    words, run_dir = plan.words_beside(), options.folder / "runs" / "beside"
    num_blocks = options.steps // options.block_steps
    for is_compiled in (False, True):
        with _first_steps(live, words, run_dir) as home:
            if is_compiled:
                live.set_quota(options.quota)
                home.advance(num_blocks * options.home_steps, BLOCK_SEC)
                yield home


def _compile(plan: Plan, live: LiveCluster, names: Sequence[str]) -> None:
    """Leave the programs of arms in the compilation cache.

    A process that has compiled is no equal of the others: its memory is in pieces, and
    each step takes 1.5 times the processor time of theirs.
    """
    say(f"{' and '.join(names)}: compiling")
    live.set_quota(None)
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(_started(live, plan.words(name), plan.run_dir(name)))
            for name in names
        ]
        for run in runs:
            run.advance(FIRST_STEPS, START_SEC)


@contextlib.contextmanager
def _first_steps(
    live: LiveCluster, words: Sequence[str], run_dir: pathlib.Path
) -> Iterator[Run]:
    """Start a run, let it do its first steps, and stop it, for a `with` block."""
    with _started(live, words, run_dir) as run:
        run.advance(FIRST_STEPS, START_SEC)
        yield run


def _started(
    live: LiveCluster, words: Sequence[str], run_dir: pathlib.Path
) -> contextlib.AbstractContextManager[Run]:
    """Return a run that is started, in an empty folder, for a `with` block."""
    run_dir = run_dir.resolve()
    # What a race that was ended has left would pass for this run's first steps.
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [str(ROOT / "train" / "main.py"), *words, f"--run_dir={run_dir}"]
    return started(live, run_dir.name, command, run_dir)


def _read_result(plan: Plan, name: str) -> dict | None:
    """Return the result of an arm in the folder, or None.

    Raises ValueError for one that was made with other settings.
    """
    path = plan.options.folder / f"{name}.json"
    if not path.is_file():
        return None
    result, settings = json.loads(path.read_text()), plan.settings(name)
    other = [key for key in settings if result["settings"].get(key) != settings[key]]
    if other:
        raise ValueError(
            f"{path} was made with another {' and '.join(other)}: name another --out, "
            "or remove it"
        )
    return result


def _show(name: str, made: dict) -> None:
    """Print one line about an arm that has just run."""
    speedup = "without a quota" if made["speedup"] is None else f"{made['speedup']:.2f}"
    say(
        f"{name}: {made['sec_per_step']:.3f} s per step, home "
        f"{made['home_sec_per_step']:.3f} s, speedup {speedup}, device max/mean "
        f"{made['max_over_mean_p50']:.2f}"
    )


def table(record: dict) -> list[str]:
    """Return the lines of a race's table for a reader, the ceiling first."""
    head = f"{'arm':<14}{'s/step':>8}{'speedup':>9}{'of forced':>10}{'max/mean':>9}"
    head += f"{'dropped':>9}{'slots MiB':>10}{'buffers MiB':>12}  losses"
    lines = [head]
    for name in (x for x in arms.ARMS if x in record["arms"]):
        arm = record["arms"][name]
        loss = arm["loss"]
        same = "?" if loss is None else "home's" if loss["equals_home"] else "others"
        is_wrong = same == "others" and loss["should_equal_home"]
        cells = [
            f"{name:<14}{arm['sec_per_step']:>8.3f}",
            _cell(arm["speedup"], 9),
            _cell(arm["of_forced_balance"], 10),
            _cell(arm["max_over_mean_p50"], 9),
            f"{arm['dropped_share']:>9.3f}",
            f"{arm['bytes_of_slots'] / 2**20:>10.1f}",
            f"{arm['bytes_of_buffers'] / 2**20:>12.1f}",
            f"  {same}{', WRONG' if is_wrong else ''}",
        ]
        lines.append("".join(cells))
    return lines


def _cell(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.2f}"
