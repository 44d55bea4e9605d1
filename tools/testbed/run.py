"""Simulate data centres (DCs) on this machine by processes with slow links and cores.

    python tools/testbed/run.py run --dcs 2 --per_dc 4 --rate_mbit 100 --quota 0.25 \\
        -- train/main.py --gin_file=configs/tiny_cpu.gin --run_dir=/tmp/tiny --fresh
    python tools/testbed/run.py pair configs/race_cpu.gin configs/race/micromoe.gin \\
        --rate_mbit 5000 --quota 0.25
    python tools/testbed/run.py clean

Each DC is a network namespace. Its uplink is a veth pair that is shaped in both
directions, and each process is in a control group of its own (docs/testbed.md). The
testbed needs root; without root it says so and runs on the loopback interface, whose
traffic is not shaped. What a killed testbed has left is removed by the next one, or by
`clean`.

`run` starts one process per device: the config must have Train.num_simulated_devices =
dcs x per_dc, or a multiple. `pair` starts one for each device of its configurations.
Exit codes: that of the program; 2 bad input, 3 the machine failed, 124 the time of
--timeout_sec is up, 130 interrupted.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder's modules are tools.x, never top-level names

from tools.launch.arguments import HelpFormatter, add_command  # noqa: E402
from tools.launch.workers import make_command  # noqa: E402
from tools.testbed import pair, trace  # noqa: E402
from tools.testbed.cluster import Cluster, Result, make_cluster  # noqa: E402
from tools.testbed.lock import hold_lock, remove_leftovers, say  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402
from train.logs.record_lines import read_records  # noqa: E402

RATE_HELP = "rate of each DC's uplink in Mb/s, each way; 0 leaves links unshaped"


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    args = parse(argv[:at])
    args.program = argv[at + 1 :]
    with guarded(as_json=args.json) as ending:
        return args.work(args)
    return ending.code


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="run | pair | clean")

    _add_run(
        add_command(commands, "run", "run a program on a cluster: run .. -- PROGRAM ..")
    )
    _add_pair(
        add_command(
            commands, "pair", "compare configurations in turns: pair A [B C ..]"
        )
    )
    clean = add_command(commands, "clean", "remove what killed testbeds have left")
    clean.set_defaults(work=_clean)
    return parser.parse_args(words)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(work=_run)
    add = parser.add_argument
    add("--dcs", type=int, default=2, help="number of DCs, 1 to 64")
    add("--per_dc", type=int, default=1, help="number of processes in each DC")
    add(
        "--timeout_sec",
        type=float,
        help="seconds after which all processes are ended (default: never)",
    )
    add(
        "--wait_sec",
        type=float,
        default=0.0,
        help="seconds to wait for another testbed to end",
    )
    parser.add_argument("--rate_mbit", type=float, default=100.0, help=RATE_HELP)
    _add_limits(parser)
    _add_trace(parser)


def _add_pair(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(work=_pair)
    add = parser.add_argument
    add("a", type=pathlib.Path, metavar="A.gin", help="configuration A")
    add(
        "others",
        type=pathlib.Path,
        metavar="B.gin",
        nargs="*",
        help="configurations that are compared with A (default: A runs alone)",
    )
    add(
        "--gin_param",
        action="append",
        default=[],
        metavar="BINDING",
        help="one binding for all; may be given several times (default: none)",
    )
    add("--blocks", type=int, default=5, help="blocks of each configuration")
    add("--block_steps", type=int, default=20, help="steps of a block")
    add("--dcs", type=int, default=2, help="number of DCs, 1 to 64")
    add(
        "--rate_mbit",
        type=float,
        nargs="+",
        default=[100.0],
        help=f"{RATE_HELP}; with several rates, blocks are done at each of them",
    )
    _add_limits(parser)
    _add_trace(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quota",
        type=float,
        help="maximum number of cores per process, such as 0.25 (default: no limit)",
    )


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=pathlib.Path,
        help=".npz file with a recorded routing that the gin config is to follow"
        " (default: the config's own load)",
    )
    parser.add_argument(
        "--layer",
        type=int,
        default=trace.LAYER,
        help="layer of --trace, by its number in the model",
    )


def _run(args: argparse.Namespace) -> int:
    rate_mbit = None if args.rate_mbit == 0 else args.rate_mbit
    cluster = Cluster(args.dcs, args.per_dc, rate_mbit, args.quota)
    with contextlib.ExitStack() as stack:
        program = list(args.program)
        make_command(program)  # raises early if the program does not exist
        if args.trace is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="testbed-"))
            load = trace.bindings(args.trace, args.layer, pathlib.Path(folder))
            program += [f"--gin_param={binding}" for binding in load]
        run_dir = find_run_dir(program)
        before = step_records(run_dir) if run_dir else []
        live = stack.enter_context(make_cluster(cluster, wait_sec=args.wait_sec))
        result = live.run(program, timeout_sec=args.timeout_sec, is_shown=True)
    steps = [x for x in (step_records(run_dir) if run_dir else []) if x not in before]
    record = make_record(result, steps)
    for line in report(record):
        say(line)
    emit(record, args.json)
    return result.exit_code


def make_record(result: Result, steps: list[dict]) -> dict:
    """Return the record of a run: its exit code, the bytes that left each DC, and the
    median of its step times."""
    return {
        "exit_code": result.exit_code,
        "is_shaped": result.is_shaped,
        "wall_sec": round(result.wall_sec, 3),
        "uplink_bytes": result.uplink_bytes,
        "num_steps": len(steps),
        "step_sec": round(median_sec(steps), 4) if steps else None,
    }


def report(record: dict) -> list[str]:
    """Return the lines that summarize a record for a reader."""
    lines = [
        f"dc{dc}: {sent / 1e6:.2f} MB left over its uplink"
        for dc, sent in enumerate(record["uplink_bytes"])
    ]
    if record["num_steps"]:
        median = f"{1e3 * record['step_sec']:.1f} ms, the median"
        lines.append(f"{record['num_steps']} steps of {median}")
    return lines


def _pair(args: argparse.Namespace) -> int:
    record = pair.pair(args)
    print("\n".join(pair.report(record)))
    emit(record, args.json)
    return DONE


def _clean(args: argparse.Namespace) -> int:
    with hold_lock():
        removed = remove_leftovers()
    print(f"removed {', '.join(removed)}" if removed else "nothing was left")
    emit({"removed": removed}, args.json)
    return DONE


def step_records(run_dir: pathlib.Path) -> list[dict]:
    """Return the records of the steps so far in metrics.jsonl. Damaged lines and
    an unfinished last one are left out."""
    records = read_records(run_dir / "metrics.jsonl")
    return [record for record in records if type(record.get("step_msec")) is float]


def median_sec(records: Sequence[dict]) -> float:
    """Return the median of the step times, in seconds."""
    return statistics.median(record["step_msec"] for record in records) / 1e3


def find_run_dir(program: Sequence[str]) -> pathlib.Path | None:
    """Return the run directory of a train/main.py with these arguments: --run_dir, else
    runs/<name of the first gin file>. None if the arguments have neither."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--run_dir", type=pathlib.Path)
    parser.add_argument("--gin_file", action="append", default=[])
    args, _ = parser.parse_known_args(list(program))
    stems = [pathlib.Path(path).stem for path in args.gin_file]
    return args.run_dir or (pathlib.Path("runs", stems[0]) if stems else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
