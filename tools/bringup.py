"""Bring up a machine with GPUs: find out what is right, fast and broken there.

    python tools/bringup.py --minutes 25 --out bringup
    python tools/bringup.py --stages machine,numerics --json
    python tools/bringup.py --dry          all stages at toy size, on a CPU
    python tools/bringup.py --pack DIR     what a machine without a network needs

Eleven stages run in processes of their own, each with a time limit, cheapest proof
first. A line is written to OUT/stages.jsonl as each ends, so that a hang, a crash or a
machine that is taken away costs one stage: the next call goes on. A kernel that is
wrong is quarantined: the file of its device says so (OUT/<device>.json, which is copied
to moejax/kernels/tuned), and later stages and runs use its first form, or XLA's
operations.

docs/bringup.md explains the stages and the screen. Exit codes: 0 every stage has ended,
1 one has failed, 2 bad input, 3 the machine failed, 75 the time is up and stages are
left, 130 interrupted.
"""

import argparse
import pathlib
import sys

# This folder must not be searched, or `import bringup` would find this file.
if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.launch.arguments import new_parser
from tools.stages import pack, screen
from tools.stages.session import GIN_FILES, BringUp
from tools.stages.stage import DRY_SECOND, Stage
from tools.stages.table import BY_NAME, STAGES
from tools.testbed.lock import handle_signals, interrupt
from train.launch.program import CRASHED, DONE, PREEMPTED, emit, guarded


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def work(args: argparse.Namespace) -> int:
    """Bring up this machine, or write the pack; return the exit code."""
    if args.pack:
        emit(pack.write(pathlib.Path(args.pack)), args.json)
        return DONE
    stages = check(args)
    run = BringUp.begin(args)
    for line in run.lines:
        print(line, flush=True)
    try:
        with handle_signals(interrupt):
            run.play(stages, 60 * args.minutes)
    finally:
        result = run.finish()
    print(f"\n{screen.draw(result)}", end="", flush=True)
    emit(result, args.json)
    if any(own["state"] == "failed" for own in result["stages"].values()):
        return CRASHED
    return PREEMPTED if result["left"] else DONE


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=25.0, help="time for this call")
    add(
        "--out",
        default="bringup",
        help="folder of the results, at most eight files; a call goes on where its "
        "stages.jsonl ends",
    )
    add(
        "--stages",
        default="all",
        help=f"stages with commas between, of {', '.join(BY_NAME)}",
    )
    add("--again", action="store_true", help="also run stages that have ended")
    add("--dry", action="store_true", help="run at toy size on the CPU")
    add(
        "--gin_file",
        action="append",
        default=[],
        help="configuration whose products are tuned; the first one is trained, with "
        f"as many layers as fit; may be repeated (default: {', '.join(GIN_FILES)})",
    )
    add("--corpus", default="", help="prepared corpus to train on (default: words)")
    add(
        "--work",
        help="folder of caches and runs, which stays on the machine (default: one in "
        "the folder of temporary files)",
    )
    add(
        "--plant",
        action="append",
        default=[],
        help="a fault to plant, to see what happens: wrong:KERNEL, "
        "wrong:KERNEL/second or hang:STAGE; may be repeated",
    )
    add("--pack", metavar="DIR", help="write wheels and a corpus for a machine "
        "without a network, and run nothing")  # fmt: skip
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> list[Stage]:
    """Return the stages that are asked for. Raises ValueError for bad flags."""
    from tools.bench.program import parse_names

    names = parse_names("stages", args.stages, BY_NAME)
    if not args.minutes > 0:
        raise ValueError(f"--minutes={args.minutes:g} must be above 0")
    from moejax.kernels.quarantine import FORMS, KERNELS

    units = [f"{kernel}/{form}" for kernel in KERNELS for form in FORMS]
    known = [f"wrong:{name}" for name in (*KERNELS, *units)]
    known += [f"hang:{name}" for name in BY_NAME]
    for plant in args.plant:
        if plant not in known:
            raise ValueError(
                f"--plant={plant} must be wrong:KERNEL, wrong:KERNEL/second or "
                f"hang:STAGE, with a kernel of {', '.join(KERNELS)}"
            )
        kernel, _, form = plant.removeprefix("wrong:").partition("/")
        if args.dry and form == "second" and kernel not in DRY_SECOND:
            raise ValueError(
                f"--plant={plant} would not be found: a dry run checks the second "
                f"forms of {' and '.join(DRY_SECOND)} alone; plant it in one of them"
            )
    for file in args.gin_file:
        if not pathlib.Path(file).is_file():
            raise ValueError(f"--gin_file={file} is not a file: check the path")
    return [stage for stage in STAGES if stage.name in names]


if __name__ == "__main__":
    sys.exit(main())
