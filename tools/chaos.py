"""Disturb real runs by faults at random moments, and check what moejax promises.

    python tools/chaos.py --faults 100 --seed 0
    python tools/chaos.py --faults 12 --only 'kill,checkpoint' --processes 1 --plan

Each run trains a toy model with a balancer on eight simulated devices, in one, two or
four processes, and is hit by three to five faults: processes that die, stop or are
terminated, full and read-only disks, damaged checkpoints, shards, caches and metrics,
mismatched processes, and flipped bits in parameters. Then it goes on to its end, where
its parameters, metrics and sample ids must be those of an undisturbed run, bit for bit,
and nothing may be left behind. docs/reliability.md lists the promises.

The plan follows from --seed alone. A run whose promises are broken keeps its folder.
Faults that need mounts are left out unless this is root. Exit codes: 0 all promises
were kept, 1 one was not, 2 bad input, 130 interrupted.
"""

import argparse
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence

# This folder must not be searched, or `import chaos` would find this file.
if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.faults.disks import can_mount
from tools.faults.fault import Fault
from tools.faults.plan import NUM_PROCESSES, Scenario, make_plan
from tools.faults.promises import Result
from tools.faults.reference import Workshop
from tools.faults.run import Broken
from tools.faults.scenario import Verdict, play
from tools.faults.table import FAULTS, NAMES
from tools.launch.arguments import new_parser
from tools.testbed.lock import handle_signals, interrupt
from train.launch.program import DONE, emit, guarded
from train.logs.counter import counted

BROKEN = 1
UNDISTURBED_SEC = 600.0
"""Limit on an undisturbed run, which compiles every program."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def work(args: argparse.Namespace) -> int:
    """Play the plan, and print the table; return the exit code."""
    check(args)
    counts = [args.processes] if args.processes else NUM_PROCESSES
    chosen, left_out = choose(args.only, may_mount=can_mount(), most=max(counts))
    if left_out:
        print(f"left out, for want of mounts or of processes: {', '.join(left_out)}")
    plan = make_plan(chosen, args.faults, args.seed, counts)
    plan = [x for x in plan if args.run is None or x.number == args.run]
    if not plan:
        raise ValueError(
            f"--run={args.run}: the plan has no such run (--plan prints it)"
        )
    if args.plan:
        print("\n".join(map(str, plan)))
        return DONE
    start_sec = time.monotonic()
    root = pathlib.Path(args.out or tempfile.mkdtemp(prefix="chaos-")).resolve()
    workshop = Workshop(root, pathlib.Path(args.cache or root / "programs").absolute())
    root.mkdir(parents=True, exist_ok=True)
    workshop.furnish()
    with handle_signals(interrupt):
        verdicts, broken = play_all(plan, workshop, args.seed, 60 * args.minutes)
    record = {
        "faults": table_of(verdicts),
        "broken": broken,
        "num_kept": sum(verdict.is_kept is True for verdict in verdicts),
        "num_faults": sum(len(scenario.faults) for scenario in plan),
        "left_out": left_out,
        "wall_sec": round(time.monotonic() - start_sec, 1),
    }
    print("\n".join(report(record)))
    is_good = not broken and record["num_kept"] == record["num_faults"]
    if is_good and not args.out:
        shutil.rmtree(root)
    emit(record, args.json)
    return DONE if is_good else BROKEN


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
    add("--plan", action="store_true", help="print the plan, and play nothing")
    add(
        "--minutes",
        type=float,
        default=45.0,
        help="start no other run after this many minutes; its promises count as broken",
    )
    add(
        "--out",
        help="folder that does not exist or is empty, which keeps all runs (default: a "
        "temporary folder, which keeps those whose promises are broken)",
    )
    add(
        "--cache",
        help="JAX's compilation cache for undamaged runs (default: one of its own)",
    )
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that cannot be."""
    if args.faults < 1 or not args.minutes > 0:
        raise ValueError(
            f"--faults={args.faults} and --minutes={args.minutes:g} must be positive"
        )
    out = args.out and pathlib.Path(args.out)
    if out and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out={out} is not an empty folder: name another")


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
        if (may_mount or not fault.needs) and fault.min_processes <= most
    ]
    if not chosen:
        raise ValueError(
            f"--only={only} cannot be made here: it needs mounts, which only root can "
            f"make, or more processes than {most}"
        )
    return chosen, [fault.name for fault in named if fault not in chosen]


def play_all(
    plan: Sequence[Scenario], workshop: Workshop, seed: int, limit_sec: float
) -> tuple[list[Verdict], list[str]]:
    """Play the scenarios one after the other. Return the verdicts on all faults, and a
    line for each promise that was broken."""
    start_sec, results, verdicts, broken = time.monotonic(), {}, [], []
    for number in sorted({scenario.num_processes for scenario in plan}):
        print(f"undisturbed, {number} processes", flush=True)
        try:
            with counted(f"undisturbed, {number} processes", "faults"):
                results[number] = workshop.undisturbed(number, UNDISTURBED_SEC)
        except Broken as why:
            missed = [Verdict(fault) for scenario in plan for fault in scenario.faults]
            return missed, [f"without any fault, {number} processes: {why}"]
    first, *others = results.values()
    if any(other.samples != first.samples for other in others):
        missed = [Verdict(fault) for scenario in plan for fault in scenario.faults]
        return missed, ["without any fault, samples differ by number of processes"]
    with counted("chaos", "faults", sum(len(x.faults) for x in plan)) as counter:
        for scenario in plan:
            minutes = (time.monotonic() - start_sec) / 60
            if 60 * minutes > limit_sec:
                broken.append(
                    f"run {scenario.number} was not begun after {minutes:.0f} min"
                )
                verdicts += [Verdict(fault) for fault in scenario.faults]
                continue
            print(f"{scenario}  ({minutes:.1f} min)", flush=True)
            counter.text = f"run {scenario.number}, {len(broken)} broken"
            lines = _play_one(scenario, workshop, results, seed, verdicts)
            for line in lines:
                print(f"  BROKEN {line}", flush=True)
            broken += lines
            counter.advance(len(scenario.faults))
    return verdicts, broken


def _play_one(
    scenario: Scenario,
    workshop: Workshop,
    results: dict[int, Result],
    seed: int,
    verdicts: list[Verdict],
) -> list[str]:
    """Play one scenario, append its verdicts, and return its broken promises. Its
    folder is removed if there are none."""
    names = {fault.name for fault in scenario.faults}
    has_own = "compilation cache" in names
    place = workshop.new_place(f"run-{scenario.number}", has_own_programs=has_own)
    expected = results[scenario.num_processes]
    found, why = play(scenario, place, expected, seed)
    lines = [f"{x.fault.name}: {x.why}" for x in found if x.is_kept is False]
    if why:
        lines.append(f"at its end: {why}")
        for verdict in found:
            verdict.is_kept = False
    verdicts += found
    if not lines:
        shutil.rmtree(place.root)
    where = f"run {scenario.number} of --seed {seed}, in {place.root}"
    return [f"{line} ({where})" for line in lines]


def table_of(verdicts: Sequence[Verdict]) -> list[dict]:
    """Return a row for each kind of fault that was played, in the order of FAULTS."""
    rows = []
    for fault in FAULTS:
        own = [x for x in verdicts if x.fault.name == fault.name]
        if own:
            rows.append(
                {
                    "fault": fault.name,
                    "times": len(own),
                    "kept": sum(x.is_kept is True for x in own),
                    "not_reached": sum(x.is_kept is None for x in own),
                    "max_sec": round(max(x.sec for x in own), 1),
                    "promise": fault.promise,
                }
            )
    return rows


def report(record: dict) -> list[str]:
    """Return the table, and the broken promises, as lines for a reader."""
    lines = ["", f"{'fault':24} times  kept  max s  promise"]
    for row in record["faults"]:
        lines.append(
            f"{row['fault']:24} {row['times']:5}  {row['kept']:4}  "
            f"{row['max_sec']:5.1f}  {row['promise']}"
        )
    lines += ["", *(f"BROKEN {line}" for line in record["broken"])]
    total = f"{record['num_kept']} of {record['num_faults']} kept"
    return [*lines, f"{total} in {record['wall_sec'] / 60:.1f} minutes"]


if __name__ == "__main__":
    sys.exit(main())
