"""Disturb real runs by faults at random moments, and check what moejax promises.

    python tools/chaos.py --faults 100 --seed 0
    python tools/chaos.py --faults 12 --only 'kill,checkpoint' --processes 1

Each run trains a toy model with a balancer on eight simulated devices, in one, two or
four processes, and is hit by three to five faults: processes that die, stop or are
terminated, full and read-only disks, damaged checkpoints, mismatched processes, and
flipped bits in parameters. Then it goes on to its end, where
its parameters, metrics and sample ids must be those of an undisturbed run, bit for bit,
and nothing may be left behind. docs/reliability.md lists the promises.

The plan follows from --seed alone. A run whose promises are broken keeps its folder.
Faults that need mounts are left out unless this is root. Exit codes: 0 all promises
were kept, 1 one was not, 2 bad input, 130 interrupted.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence

# This folder must not be searched, or `import chaos` would find this file.
if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.faults.reference import (
    Result,
    Workshop,
    expect_nothing_left,
    expect_same,
    expect_untouched,
    listing,
    read_result,
)
from tools.faults.run import Broken, Run, can_mount, small_disk
from tools.faults.table import FAULTS, NAMES, Fault
from tools.launch.arguments import new_parser
from tools.testbed.lock import handle_signals, interrupt
from train.launch.program import DONE, emit, guarded
from train.logs.counter import counted

BROKEN = 1
NUM_PROCESSES = (1, 2, 4)
"""Numbers of processes. Eight simulated devices are divided among them equally."""
MIN_FAULTS, MAX_FAULTS = 3, 5
"""Number of faults of one run."""
PACE_SEC = 0.04
MAX_STEPS_BETWEEN = 6
EARLY_SHARE, EARLY_SEC = 0.25, 5.0
"""Share of the faults that hit a run while it starts, if they may, and the time since
the start at which they hit at the latest."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One run and the faults that hit it, in order."""

    number: int
    num_processes: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        names = ", ".join(fault.name for fault in self.faults)
        return f"run {self.number:3}  {self.num_processes} processes  {names}"


@dataclasses.dataclass
class Verdict:
    """Whether the promise of one fault was kept: not if a later promise of the same run
    was broken at its end."""

    fault: Fault
    is_kept: bool
    sec: float | None = None
    """Time from the fault to the run's answer."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with guarded(as_json=args.json) as ending:
        return work(args)
    return ending.code


def work(args: argparse.Namespace) -> int:
    """Play the plan, and print the table; return the exit code."""
    out = args.out and pathlib.Path(args.out)
    if args.faults < 1:
        raise ValueError(f"--faults={args.faults} must be positive")
    if out and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out={out} is not an empty folder: name another")
    counts = [args.processes] if args.processes else NUM_PROCESSES
    chosen, left_out = choose(args.only, may_mount=can_mount(), most=max(counts))
    if left_out:
        print(f"left out, for want of mounts or of processes: {', '.join(left_out)}")
    plan = make_plan(chosen, args.faults, args.seed, counts)
    plan = [x for x in plan if args.run is None or x.number == args.run]
    if not plan:
        raise ValueError(f"--run={args.run}: the plan has no such run")
    start_sec = time.monotonic()
    root = pathlib.Path(out or tempfile.mkdtemp(prefix="chaos-")).resolve()
    root.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(root)
    workshop.furnish()
    with handle_signals(interrupt):
        verdicts, broken = play_all(plan, workshop, args.seed)
    record = {
        "faults": table_of(verdicts),
        "broken": broken,
        "num_kept": sum(verdict.is_kept for verdict in verdicts),
        "num_faults": sum(len(scenario.faults) for scenario in plan),
        "left_out": left_out,
        "wall_sec": round(time.monotonic() - start_sec, 1),
    }
    print("\n".join(report(record)))
    if not broken and not out:
        shutil.rmtree(root)
    emit(record, args.json)
    return BROKEN if broken else DONE


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--faults", type=int, default=10, help="number of faults, of all runs together")
    add("--seed", type=int, default=0, help="seed of the plan")
    add(
        "--only",
        default="",
        help="kinds of faults to draw from, with commas between (default: all: "
        f"{', '.join(NAMES)})",
    )
    add(
        "--processes",
        type=int,
        choices=NUM_PROCESSES,
        help="number of processes of each run (default: any of these)",
    )
    add("--run", type=int, help="play only this run of the plan (default: all)")
    add(
        "--out",
        help="folder that does not exist or is empty, which keeps the logs of all runs "
        "(default: a temporary folder, which is kept if a promise is broken)",
    )
    return parser.parse_args(argv)


def choose(only: str, *, may_mount: bool, most: int) -> tuple[list[Fault], list[str]]:
    """Return the kinds of faults that are named, and the names of those that cannot be
    made here, in runs of at most `most` processes. Raises ValueError for a name that no
    kind has, and if none is left."""
    names = [x.strip() for x in only.split(",")] if only else list(NAMES)
    for name in names:
        if name not in NAMES:
            raise ValueError(f"--only: no fault is called {name!r}: {', '.join(NAMES)}")
    named = [fault for fault in FAULTS if fault.name in names]
    chosen = [
        fault
        for fault in named
        if (may_mount or not fault.needs_mounts) and fault.min_processes <= most
    ]
    if not chosen:
        raise ValueError(
            f"--only={only} cannot be made here: it needs mounts, which only root can "
            f"make, or more processes than {most}"
        )
    return chosen, [fault.name for fault in named if fault not in chosen]


def make_plan(
    faults: Sequence[Fault], count: int, seed: int, num_processes: Sequence[int]
) -> list[Scenario]:
    """Return runs with `count` faults together. Every kind comes once before any comes
    again. `num_processes` are the numbers of processes to draw from."""
    rng = random.Random(seed)
    drawn: list[Fault] = []
    while len(drawn) < count:
        drawn += rng.sample(faults, len(faults))
    scenarios, left = [], drawn[:count]
    while left:
        size = rng.randint(MIN_FAULTS, MAX_FAULTS)
        hit, left = tuple(left[:size]), left[size:]
        minimum = max(fault.min_processes for fault in hit)
        number = rng.choice([x for x in num_processes if x >= minimum])
        scenarios.append(Scenario(len(scenarios), number, hit))
    return scenarios


def play_all(
    plan: Sequence[Scenario], workshop: Workshop, seed: int
) -> tuple[list[Verdict], list[str]]:
    """Play the scenarios one after the other. Return the verdicts on all faults that
    were reached, and a line for each promise that was broken."""
    results, verdicts, broken = {}, [], []
    for number in sorted({scenario.num_processes for scenario in plan}):
        print(f"undisturbed, {number} processes", flush=True)
        try:
            results[number] = workshop.undisturbed(number)
        except Broken as why:
            return [], [f"without any fault, {number} processes: {why}"]
    first, *others = results.values()
    if any(other.samples != first.samples for other in others):
        return [], ["without any fault, samples differ by number of processes"]
    records = first.metrics.values()
    kinds = {record.get("decision", {}).get("kind") for record in records}
    if not {"swap", "relayout"} <= kinds:
        return [], [f"the balancer has made no swap or no relayout, only {kinds}"]
    with counted("chaos", "faults", sum(len(x.faults) for x in plan)) as counter:
        for scenario in plan:
            print(scenario, flush=True)
            counter.text = f"run {scenario.number}, {len(broken)} broken"
            rng = random.Random(f"{seed}/{scenario.number}")
            expected = results[scenario.num_processes]
            reached, lines = play(scenario, workshop, expected, rng)
            lines = [f"{line} (run {scenario.number}, --seed {seed})" for line in lines]
            for line in lines:
                print(f"  BROKEN {line}", flush=True)
            verdicts += reached
            broken += lines
            counter.advance(len(scenario.faults))
    for verdict in verdicts:
        limit_sec = verdict.fault.within_sec
        if (
            limit_sec is not None
            and verdict.sec is not None
            and verdict.sec > limit_sec
        ):
            verdict.is_kept = False
            broken.append(
                f"{verdict.fault.name}: {verdict.sec:.1f} s instead of {limit_sec:g}"
            )
    return verdicts, broken


def play(
    scenario: Scenario, workshop: Workshop, expected: Result, rng: random.Random
) -> tuple[list[Verdict], list[str]]:
    """Disturb a run by the faults of a scenario one after the other, let it go on to
    its end, and compare it with the undisturbed one. Its folder is removed if all
    promises were kept.

    Returns a verdict on each fault that was reached, and a line for each broken
    promise. How long an answer may take is not looked at here.
    """
    name = f"run-{scenario.number}"
    run = workshop.new_run(name, scenario.num_processes, PACE_SEC)
    verdicts, broken = [], []
    where = "before any fault"
    with contextlib.ExitStack() as stack:
        if any(fault.needs_mounts for fault in scenario.faults):
            stack.enter_context(small_disk(run.place.disk))
        stack.callback(run.close)
        before = listing(run.place)
        try:
            for fault in scenario.faults:
                where = fault.name
                verdicts.append(Verdict(fault, False))
                wait_for_moment(run, fault, rng)
                run.mark()
                verdicts[-1].sec = fault.act(run, rng)
                verdicts[-1].is_kept = True
            where = "at its end"
            run.expect_end(0)
            expect_same(read_result(run.place.run_dir), expected)
            expect_nothing_left(run.place)
            expect_untouched(before, listing(run.place))
        except Broken as why:
            broken = [f"{where}: {why}, in {run.place.root}"]
            run.write_stacks()
            run.close()
            if where == "at its end":
                verdicts = [dataclasses.replace(x, is_kept=False) for x in verdicts]
            if run.place.disk.is_mount():
                shutil.copytree(run.place.disk, run.place.root / "kept", symlinks=True)
    if not broken:
        shutil.rmtree(run.place.root)
    return verdicts, broken


def wait_for_moment(run: Run, fault: Fault, rng: random.Random) -> None:
    """Bring a run into the state that a fault needs: resting on two checkpoints, or
    some random steps on, or while it starts."""
    num_steps = rng.randint(1, MAX_STEPS_BETWEEN)
    if fault.may_be_early and rng.random() < EARLY_SHARE:
        if not run.is_live:
            run.start()
        time.sleep(EARLY_SEC * rng.random())
        return
    if not run.is_live:
        run.go_on()
    run.wait_for_steps(num_steps)
    if fault.state == "resting":
        # With no checkpoint the next start would begin anew, and damage hit nothing.
        run.wait_until(
            lambda: len(run.saved_steps()) > 1 or run.has_ended(), "two checkpoints"
        )
        run.stop()


def table_of(verdicts: Sequence[Verdict]) -> list[dict]:
    """Return a row for each kind of fault that was played, in the order of FAULTS."""
    rows = []
    for fault in FAULTS:
        own = [x for x in verdicts if x.fault.name == fault.name]
        if own:
            secs = [x.sec for x in own if x.sec is not None]
            rows.append(
                {
                    "fault": fault.name,
                    "times": len(own),
                    "kept": sum(x.is_kept for x in own),
                    "max_sec": round(max(secs), 1) if secs else None,
                    "promise": fault.promise,
                }
            )
    return rows


def report(record: dict) -> list[str]:
    """Return the table, and the broken promises, as lines for a reader."""
    lines = ["", f"{'fault':24} times  kept  max s  promise"]
    for row in record["faults"]:
        sec = "" if row["max_sec"] is None else f"{row['max_sec']:.1f}"
        lines.append(
            f"{row['fault']:24} {row['times']:5}  {row['kept']:4}  {sec:>5}  "
            f"{row['promise']}"
        )
    lines += ["", *(f"BROKEN {line}" for line in record["broken"])]
    total = f"{record['num_kept']} of {record['num_faults']} kept"
    return [*lines, f"{total} in {record['wall_sec'] / 60:.1f} minutes"]


if __name__ == "__main__":
    sys.exit(main())
