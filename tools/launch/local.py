"""Run one program as several workers on this machine, and restart them together.

    python tools/launch/local.py -n 4 -- train/main.py --gin_file=configs/tiny_cpu.gin

A program that ends in .py is run by this Python. Every attempt has a port of its own
on the loopback interface. Each process reads its role from the environment variables
MOEJAX_COORDINATOR, MOEJAX_NUM_PROCESSES and MOEJAX_PROCESS_ID, and the number of the
attempt (0, 1, 2, ..) from MOEJAX_ATTEMPT.

    how the workers ended                  what the launcher does
    0   all are done                       exit with 0
    2   bad input, or 3: cannot go on      exit with that code, never restart
    75  saved, after a signal to stop      exit with 75
    75  saved, without such a signal       restart at once; counted only when the
                                           attempt was shorter than --short_sec
    other code, or killed by a signal      restart after 1, 2, 4, .. 60 s; counted

After --max_restarts counted restarts the launcher exits with the code of the last
attempt's first failure: 128 + n after signal n, 137 for a process that the launcher had
to kill.
"""

import argparse
import pathlib
import signal
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder's modules are tools.x, never top-level names

from tools.launch import workers  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import BAD_INPUT, DONE, FAILED, PREEMPTED, emit, refuse  # noqa: E402

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_BACKOFF_SEC = 60.0


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    args = parse(argv[:at])
    try:
        _check(args)
        command = workers.make_command(argv[at + 1 :])
        exit_code, attempts = supervise(command, args)
    except (ValueError, OSError) as error:
        return refuse(error, BAD_INPUT, args.json)
    restarts = max(0, len(attempts) - 1)
    record = {"exit_code": exit_code, "restarts": restarts, "attempts": attempts}
    emit(record, args.json)
    return exit_code


def parse(words: list[str]) -> argparse.Namespace:
    usage = "tools/launch/local.py -n N [options] -- PROGRAM [argument ..]"
    parser = new_parser(__doc__, usage=usage)
    add = parser.add_argument
    waits = workers.Waits()
    add(
        "-n",
        "--num_processes",
        type=int,
        required=True,
        help="number of workers to start",
    )
    add(
        "--max_restarts",
        type=int,
        default=3,
        help="maximum number of counted restarts",
    )
    add(
        "--backoff_sec",
        type=float,
        default=1.0,
        help="seconds to wait before the first counted restart; doubles with each",
    )
    add(
        "--short_sec",
        type=float,
        default=10.0,
        help="an attempt that saved and ended (75) sooner than this, in seconds, counts"
        " as a restart",
    )
    add(
        "--grace_sec",
        type=float,
        default=waits.grace_sec,
        help="seconds in which all workers must end after SIGTERM, or after the first"
        " has ended well",
    )
    add(
        "--stopped_sec",
        type=float,
        default=waits.stopped_sec,
        help="a process that was stopped (SIGSTOP) for this many seconds counts as"
        " dead",
    )
    add(
        "--stacks_sec",
        type=float,
        default=waits.stacks_sec,
        help="seconds for workers to print their stacks before they are killed",
    )
    return parser.parse_args(words)


def supervise(
    command: list[str], args: argparse.Namespace
) -> tuple[int, list[dict[str, object]]]:
    """Run the command until no restart is due, and return the exit code and a record of
    each attempt. Sets the handlers of SIGNALS."""
    requests = workers.StopRequests()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup keeps its effect
            signal.signal(number, requests.note)
    waits = workers.Waits(args.grace_sec, args.stopped_sec, args.stacks_sec)
    attempts, num_counted, port = [], 0, 0
    while True:
        port, start_sec = workers.free_port(but_not=port), time.monotonic()
        group = workers.Workers(
            command, args.num_processes, port, attempt=len(attempts)
        )
        verdict = workers.run(group, waits, requests)
        wall_sec = time.monotonic() - start_sec
        code = verdict.exit_code
        attempts.append(
            {
                "exit_code": code,
                "cause": verdict.cause,
                "codes": verdict.codes,
                "port": port,
                "wall_sec": round(wall_sec, 3),
            }
        )
        may_restart = code not in (DONE, BAD_INPUT, FAILED)
        is_free = code == PREEMPTED and wall_sec >= args.short_sec
        num_counted += may_restart and not is_free
        ending = f"attempt {len(attempts)} ended with {code}: {verdict.cause}"
        if not may_restart or requests.to_stop or not verdict.are_gone:
            workers.say(ending)
            return code, attempts
        if num_counted > args.max_restarts:
            workers.say(f"{ending}; --max_restarts={args.max_restarts} are used up")
            return code, attempts
        wait_sec = _backoff_sec(code, num_counted, args.backoff_sec)
        workers.say(
            f"{ending}; starting again in {wait_sec:g} s "
            f"({num_counted} of --max_restarts={args.max_restarts} counted)"
        )
        end_sec = time.monotonic() + wait_sec
        while time.monotonic() < end_sec and not requests.to_stop:
            time.sleep(workers.POLL_SEC)
        if requests.to_stop:
            workers.say("asked to stop: not starting again")
            return code, attempts


def _backoff_sec(code: int, num_counted: int, first_sec: float) -> float:
    if code == PREEMPTED:
        return 0.0
    return min(first_sec * 2 ** (num_counted - 1), MAX_BACKOFF_SEC)


def _check(args: argparse.Namespace) -> None:
    require_min = {"num_processes": 1, "max_restarts": 0}
    for name in ("backoff", "short", "grace", "stopped", "stacks"):
        require_min[f"{name}_sec"] = 0
    for name, minimum in require_min.items():
        value = getattr(args, name)
        if not minimum <= value < float("inf"):
            raise ValueError(
                f"--{name}={value} must be {minimum} or more: give another value"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
