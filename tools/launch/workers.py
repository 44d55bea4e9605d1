"""Workers: processes of one program on this machine that live and end together.

`run` starts the workers, passes their output on, and returns when all have ended. They
end by themselves, or because one of them failed, was stopped by a signal, or kept
running long after another had finished. When one dies, all others have ended at most 3
seconds later: 0.05 to notice the death, stacks_sec (1) to print the stacks of the
others, 1 to end them, 0.5 to read their last lines.
"""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from train.launch.cluster import (
    ATTEMPT,
    COORDINATOR,
    LOCAL_NUM_PROCESSES,
    LOCAL_PROCESS_ID,
    LOOPBACK,
    NUM_PROCESSES,
    PROCESS_ID,
)
from train.launch.program import BAD_INPUT, DONE, FAILED, PREEMPTED

KILLED, INTERRUPTED = 128 + signal.SIGKILL, 128 + signal.SIGINT
POLL_SEC, END_SEC, DRAIN_SEC = 0.05, 1.0, 0.5
NOISE = (b"[Gloo] Rank ", b"Expected number of connected peer ranks")
"""Parts of lines that are dropped. Gloo prints one with both on stdout for every group
of devices, in every process. Several threads print at once, so a line may hold the end
of another one alone."""
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_TERMINAL = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Waits:
    """Time limits of the launcher, in seconds."""

    grace_sec: float = 60.0
    """Time that the other workers have to end, once one has ended well or all were
    asked to stop."""
    stopped_sec: float = 10.0
    """Time after which a process that was stopped (SIGSTOP) counts as dead."""
    stacks_sec: float = 1.0
    """Time that processes have to print their stacks before they are ended."""


@dataclasses.dataclass
class StopRequests:
    """Requests to the launcher to end its workers. Signal handlers write them, `run`
    reads them."""

    to_stop: bool = False
    to_kill: bool = False
    has_enough: bool = False
    """The workers have done what they were started for, and are ended at once."""

    def end(self) -> None:
        """Let all workers be ended at once."""
        self.has_enough = True

    def note(self, number: int, _frame: object) -> None:
        """Handle a signal: ask all workers to stop, or kill them on a second Ctrl-C.

        Only SIGINT counts as a second request, since schedulers may send SIGTERM more
        than once.
        """
        self.to_kill |= self.to_stop and number == signal.SIGINT
        self.to_stop = True


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How the workers ended."""

    exit_code: int
    cause: str
    codes: tuple[int | None, ...] = ()
    """Exit code of each process: 128 + n if signal n ended it, None if the launcher
    ended it."""
    are_gone: bool = True
    """False if a process is still there END_SEC after SIGKILL."""


@dataclasses.dataclass(frozen=True)
class _Child:
    index: int
    process: subprocess.Popen

    @property
    def name(self) -> str:
        return f"process {self.index} (pid {self.process.pid})"


def pass_on(process: subprocess.Popen, index: int) -> list[threading.Thread]:
    """Start and return threads that copy what a process prints to our own stdout and
    stderr, until its pipes are closed. Lines are never mixed, and those of process 3
    begin with '[3] '; those of process 0 stay as they are.

    A pipe is read to its end even when our own output takes nothing, since the process
    would block otherwise: lines are lost then.
    """
    prefix = f"[{index}] ".encode() if index else b""

    def copy(pipe: IO[bytes], to: int) -> None:
        has_reader = True
        with pipe:
            for line in pipe:
                if not has_reader or is_noise(line):
                    continue
                try:
                    _write(to, prefix + line.removesuffix(b"\n") + b"\n")
                except BrokenPipeError:
                    has_reader = False
                    # The reader is gone: the same as a request to stop.
                    os.kill(os.getpid(), signal.SIGTERM)
                except OSError:  # a full disk, or a lost terminal
                    continue

    threads = [
        threading.Thread(target=copy, args=(pipe, to), daemon=True)
        for pipe, to in ((process.stdout, 1), (process.stderr, 2))
        if pipe is not None
    ]
    for thread in threads:
        thread.start()
    return threads


def is_noise(line: bytes) -> bool:
    """Return whether a line is a message of Gloo that tells people nothing."""
    return any(part in line for part in NOISE)


def say(event: str) -> None:
    """Print an event of the launcher itself on stderr. A line that stderr does not take
    is lost, since what the launcher does with its processes matters more."""
    with contextlib.suppress(OSError):
        _write(2, f"launch_local: {event}\n".encode())


@dataclasses.dataclass(frozen=True)
class Workers:
    """Command of the workers, and how each of them is started."""

    command: list[str]
    count: int
    port: int
    attempt: int = 0
    """Number of earlier attempts of this run."""
    host: str = LOOPBACK
    """Address of process 0, where the coordinator listens."""
    prefixes: tuple[tuple[str, ...], ...] = ()
    """Words before the command of each process, by index. Empty: none for any."""
    listen: Callable[[subprocess.Popen, int], list[threading.Thread]] = pass_on
    """Function that starts and returns the threads that read a process's output."""


def run(workers: Workers, waits: Waits, requests: StopRequests) -> Verdict:
    """Run the workers, and return how they ended once none of their processes is left.

    A process that is still there END_SEC after SIGKILL cannot be ended: are_gone is
    then False. Raises OSError when the program cannot be started.
    """
    children: list[_Child] = []
    readers = []
    try:
        for index in range(workers.count):
            children.append(_start(workers, index))
        readers = [x for c in children for x in workers.listen(c.process, c.index)]
        verdict = _watch(children, waits, requests)
        codes = tuple(_exit_code(child) for child in children)
        verdict = dataclasses.replace(verdict, codes=codes)
        if None in codes and verdict.exit_code != DONE:
            say(verdict.cause + "; ending all")
            # After these two codes, the one line of the failed process says why.
            if verdict.exit_code not in (BAD_INPUT, FAILED):
                _print_stacks(children, waits.stacks_sec)
    finally:
        are_gone = _end(children)
        end_sec = time.monotonic() + DRAIN_SEC
        for reader in readers:
            reader.join(max(0.0, end_sec - time.monotonic()))
    return dataclasses.replace(verdict, are_gone=are_gone)


def make_command(program: Sequence[str]) -> list[str]:
    """Return the command that starts a program: one that ends in .py is run by this
    Python. Raises ValueError for a program that does not exist."""
    if not program:
        raise ValueError(
            "no program is named: give one after --, as in -- train/main.py"
        )
    first = program[0]
    if first.endswith(".py"):
        if not pathlib.Path(first).is_file():
            raise ValueError(f"{first} is not a file: name an existing Python program")
        return [sys.executable, *program]
    if shutil.which(first) is None:
        raise ValueError(
            f"{first} is not a program on this machine: name a program, or a .py file"
        )
    return list(program)


def free_port(but_not: int = 0) -> int:
    """Return a port of the loopback interface on which nobody listens now, other than
    `but_not`."""
    while True:
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            port = listener.getsockname()[1]
        if port != but_not:
            return port


def _write(to: int, text: bytes) -> None:
    with _TERMINAL:
        while text:
            text = text[os.write(to, text) :]


def _start(workers: Workers, index: int) -> _Child:
    """Start one worker in a process group of its own. It is killed when the launcher
    dies."""
    launcher = os.getpid()

    def die_with_launcher() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher died before prctl
            os._exit(KILLED)

    # preexec_fn is safe here: threads of the launcher that may be left wait in a read.
    # A single worker keeps the terminal, and with it its progress bar.
    pipe = None if workers.count == 1 else subprocess.PIPE
    process = subprocess.Popen(
        [*(workers.prefixes[index] if workers.prefixes else ()), *workers.command],
        env=_environment(os.environ, workers, index),
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        process_group=0,
        preexec_fn=die_with_launcher,  # noqa: PLW1509
    )
    return _Child(index, process)


def _environment(
    environ: Mapping[str, str], workers: Workers, index: int
) -> dict[str, str]:
    return {
        **environ,
        COORDINATOR: f"{workers.host}:{workers.port}",
        NUM_PROCESSES: str(workers.count),
        PROCESS_ID: str(index),
        LOCAL_NUM_PROCESSES: str(workers.count),
        LOCAL_PROCESS_ID: str(index),
        ATTEMPT: str(workers.attempt),
        "PYTHONUNBUFFERED": "1",
    }


def _watch(children: list[_Child], waits: Waits, requests: StopRequests) -> Verdict:
    """Wait until all workers have ended, or until those left must be killed."""
    since_sec: dict[object, float] = {}
    is_passed_on = False

    def lasts(what: object, is_true: bool, limit_sec: float) -> bool:
        """Return whether the condition named `what` has held for longer than the
        limit."""
        if not is_true:
            since_sec.pop(what, None)
            return False
        now_sec = time.monotonic()
        return now_sec - since_sec.setdefault(what, now_sec) > limit_sec

    while True:
        codes = {child.name: _exit_code(child) for child in children}
        if verdict := _find_verdict(codes):
            return verdict
        if requests.has_enough:
            return Verdict(DONE, "the workers have done enough")
        if requests.to_kill:
            return Verdict(INTERRUPTED, "interrupted twice")
        if requests.to_stop and not is_passed_on:
            is_passed_on = True
            for child in _living(children):
                os.kill(child.process.pid, signal.SIGTERM)
            say("asked to stop: passing SIGTERM on to all processes")
        grace = f"--grace_sec={waits.grace_sec:g}"
        if lasts("stopping", is_passed_on, waits.grace_sec):
            return Verdict(KILLED, f"not all ended within {grace} of SIGTERM")
        ended = [name for name, code in codes.items() if code is not None]
        if lasts("ended", bool(ended), waits.grace_sec):
            cause = f"{ended[0]} ended well, but others still run after {grace}"
            return Verdict(KILLED, cause)
        for child in _living(children):
            if lasts(child.index, _is_stopped(child), waits.stopped_sec):
                limit = f"--stopped_sec={waits.stopped_sec:g}"
                return Verdict(KILLED, f"{child.name} has been stopped for {limit}")
        time.sleep(POLL_SEC)


def _find_verdict(codes: Mapping[str, int | None]) -> Verdict | None:
    """Return how the workers ended, by the exit code of each, or None while they run.

    When several are found failed at once, one whose code forbids a restart counts.
    """
    failed = [x for x in codes.items() if x[1] not in (None, DONE, PREEMPTED)]
    if failed:
        name, code = min(failed, key=lambda x: x[1] not in (BAD_INPUT, FAILED))
        return Verdict(code, f"{name} {_describe_end(code)}")
    if None in codes.values():
        return None
    if PREEMPTED in codes.values():
        return Verdict(PREEMPTED, "all have saved and stopped")
    return Verdict(DONE, "all are done")


def _describe_end(code: int | None) -> str:
    if code is None or code <= 128:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with code {code}"


def _exit_code(child: _Child) -> int | None:
    """Return the exit code of a process, 128 + n after signal n, None while it runs.

    The process is not reaped, so that nothing else can get its pid and process group.
    """
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    status = os.waitid(os.P_PID, child.process.pid, options)
    if status is None:
        return None
    is_exit = status.si_code == os.CLD_EXITED
    return status.si_status if is_exit else 128 + status.si_status


def _living(children: list[_Child]) -> list[_Child]:
    return [child for child in children if _exit_code(child) is None]


def _is_stopped(child: _Child) -> bool:
    stat = pathlib.Path(f"/proc/{child.process.pid}/stat").read_text()
    return stat.rpartition(") ")[2].startswith("T")


def _print_stacks(children: list[_Child], stacks_sec: float) -> None:
    """Report the state of each process, and make those that run print their stacks.

    They print on SIGUSR1. That signal is sent before SIGCONT, so that a stopped process
    prints its stack before it continues.
    """
    for child in children:
        code = _exit_code(child)
        if code is None:
            is_stopped = _is_stopped(child)
            state = "stopped" if is_stopped else "running"
            log = f"logs/process-{child.index}.log"
            say(f"{child.name}: {state}; a run's process writes its stacks to {log}")
            os.kill(child.process.pid, signal.SIGUSR1)
            os.kill(child.process.pid, signal.SIGCONT)
        else:
            say(f"{child.name}: {_describe_end(code)}")
    end_sec = time.monotonic() + stacks_sec
    while _living(children) and time.monotonic() < end_sec:
        time.sleep(POLL_SEC)


def _end(children: list[_Child]) -> bool:
    """Kill every worker's process group, grandchildren included, and reap the workers.

    Returns False if a process outlives SIGKILL by END_SEC.
    """
    for child in children:
        os.killpg(child.process.pid, signal.SIGKILL)
    end_sec = time.monotonic() + END_SEC
    while (left := _living(children)) and time.monotonic() < end_sec:
        time.sleep(POLL_SEC)
    for child in children:
        if child in left:
            say(f"{child.name} outlives SIGKILL: it is waiting in the kernel")
        else:
            child.process.wait()
    return not left
