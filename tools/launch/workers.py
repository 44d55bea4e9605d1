"""Workers: processes of one program on this machine that live and end together.

`run` starts them, passes their lines on, and returns when all have ended: by
themselves, or because one of them failed, was stopped, or was left behind. From the
death of one to the end of all others it takes at most 3 seconds: 0.05 to see it,
stacks_sec (1) for the stacks of the others, 1 for their end, 0.5 for their last lines.
"""

import ctypes
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from tools.launch.lines import pass_on, say
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
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True)
class Waits:
    """How long the launcher waits for what."""

    grace_sec: float = 60.0
    """For the others, once one has ended well or all were asked to stop."""
    stopped_sec: float = 10.0
    """A process stopped (SIGSTOP) for longer counts as dead."""
    stacks_sec: float = 1.0
    """For the stacks of processes that are to be ended."""


@dataclasses.dataclass
class Asked:
    """What signals have asked of the launcher; its handlers write, `run` reads."""

    to_stop: bool = False
    to_kill: bool = False
    has_enough: bool = False
    """The workers have done what they were started for, and are ended at once."""

    def note(self, number: int, _frame: object) -> None:
        """A second Ctrl-C kills; schedulers may send SIGTERM more than once."""
        self.to_kill |= self.to_stop and number == signal.SIGINT
        self.to_stop = True


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How the workers ended."""

    exit_code: int
    cause: str
    codes: tuple[int | None, ...] = ()
    """128 + n for a process ended by signal n; None for one that the launcher ended."""
    are_gone: bool = True


@dataclasses.dataclass(frozen=True)
class _Child:
    index: int
    process: subprocess.Popen

    @property
    def name(self) -> str:
        return f"process {self.index} (pid {self.process.pid})"


@dataclasses.dataclass(frozen=True)
class Workers:
    """What to start."""

    command: list[str]
    count: int
    port: int
    attempt: int = 0
    """How many attempts of this run came before."""
    host: str = LOOPBACK
    """Address of process 0, where the coordinator listens."""
    prefixes: tuple[tuple[str, ...], ...] = ()
    """Words before the command of each process, by index; none for all without."""
    listen: Callable[[subprocess.Popen, int], list[threading.Thread]] = pass_on
    """Threads that read what a process prints."""


def run(workers: Workers, waits: Waits, asked: Asked) -> Verdict:
    """Return the Verdict on the workers, once no process of theirs is left.

    Processes still there END_SEC after SIGKILL (are_gone is False) cannot be ended.
    Raises OSError when the program cannot be started.
    """
    children: list[_Child] = []
    readers = []
    try:
        for index in range(workers.count):
            children.append(_start(workers, index))
        readers = [x for c in children for x in workers.listen(c.process, c.index)]
        verdict = _watch(children, waits, asked)
        codes = tuple(_code(child) for child in children)
        verdict = dataclasses.replace(verdict, codes=codes)
        if None in codes and verdict.exit_code != DONE:
            say(verdict.cause + "; ending all")
            if verdict.exit_code not in (BAD_INPUT, FAILED):  # its one line says why
                _ask_for_stacks(children, waits.stacks_sec)
    finally:
        are_gone = _end(children)
        end_sec = time.monotonic() + DRAIN_SEC
        for reader in readers:
            reader.join(max(0.0, end_sec - time.monotonic()))
    return dataclasses.replace(verdict, are_gone=are_gone)


def free_port(but_not: int = 0) -> int:
    """A port of the loopback interface on which nobody listens now."""
    while True:
        with socket.socket() as door:
            door.bind((LOOPBACK, 0))
            port = door.getsockname()[1]
        if port != but_not:
            return port


def _start(workers: Workers, index: int) -> _Child:
    """A process in a group of its own, that is killed when this one dies."""
    launcher = os.getpid()

    def die_with_launcher() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # died before prctl
            os._exit(KILLED)

    # preexec_fn is safe here: threads of ours, if any are left, wait in a read.
    # One process alone keeps the terminal, and with it its progress bar.
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
    return dict(environ) | {
        COORDINATOR: f"{workers.host}:{workers.port}",
        NUM_PROCESSES: str(workers.count),
        PROCESS_ID: str(index),
        LOCAL_NUM_PROCESSES: str(workers.count),
        LOCAL_PROCESS_ID: str(index),
        ATTEMPT: str(workers.attempt),
        "PYTHONUNBUFFERED": "1",
    }


def _watch(children: list[_Child], waits: Waits, asked: Asked) -> Verdict:
    """Returns when all have ended, or when those left are to be ended."""
    since_sec: dict[object, float] = {}
    is_passed_on = False

    def lasts(what: object, is_so: bool, limit_sec: float) -> bool:
        """Whether `what` has been so for longer than the limit."""
        if not is_so:
            since_sec.pop(what, None)
            return False
        now_sec = time.monotonic()
        return now_sec - since_sec.setdefault(what, now_sec) > limit_sec

    while True:
        codes = {child.name: _code(child) for child in children}
        if verdict := _exit_code(codes):
            return verdict
        if asked.has_enough:
            return Verdict(DONE, "enough is done")
        if asked.to_kill:
            return Verdict(INTERRUPTED, "interrupted twice")
        if asked.to_stop and not is_passed_on:
            is_passed_on = True
            for child in _living(children):
                os.kill(child.process.pid, signal.SIGTERM)
            say("asked to stop: SIGTERM is passed on to all processes")
        grace = f"--grace_sec={waits.grace_sec:g}"
        if lasts("asked", is_passed_on, waits.grace_sec):
            return Verdict(KILLED, f"not all ended within {grace} of SIGTERM")
        ended = [name for name, code in codes.items() if code is not None]
        if lasts("ended", bool(ended), waits.grace_sec):
            cause = f"{ended[0]} ended well, and others run on after {grace}"
            return Verdict(KILLED, cause)
        for child in _living(children):
            if lasts(child.index, _is_stopped(child), waits.stopped_sec):
                limit = f"--stopped_sec={waits.stopped_sec:g}"
                return Verdict(KILLED, f"{child.name} has been stopped for {limit}")
        time.sleep(POLL_SEC)


def _exit_code(codes: Mapping[str, int | None]) -> Verdict | None:
    """Of several that failed at one look, one that must not restart counts."""
    failed = [x for x in codes.items() if x[1] not in (None, DONE, PREEMPTED)]
    if failed:
        name, code = min(failed, key=lambda x: x[1] not in (BAD_INPUT, FAILED))
        return Verdict(code, f"{name} {_ending(code)}")
    if None in codes.values():
        return None
    if PREEMPTED in codes.values():
        return Verdict(PREEMPTED, "all have saved and stopped")
    return Verdict(DONE, "all are done")


def _ending(code: int | None) -> str:
    if code is None or code <= 128:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with code {code}"


def _code(child: _Child) -> int | None:
    """None while it lives. It is not reaped, so its pid and group stay its own."""
    ways = os.WEXITED | os.WNOHANG | os.WNOWAIT
    found = os.waitid(os.P_PID, child.process.pid, ways)
    if found is None:
        return None
    is_exit = found.si_code == os.CLD_EXITED
    return found.si_status if is_exit else 128 + found.si_status


def _living(children: list[_Child]) -> list[_Child]:
    return [child for child in children if _code(child) is None]


def _is_stopped(child: _Child) -> bool:
    stat = pathlib.Path(f"/proc/{child.process.pid}/stat").read_text()
    return stat.rpartition(") ")[2].startswith("T")


def _ask_for_stacks(children: list[_Child], stacks_sec: float) -> None:
    """Says how each process is; the living print their stacks on SIGUSR1.

    It is queued before SIGCONT, so that a stopped process prints before it goes on.
    """
    for child in children:
        code = _code(child)
        if code is None:
            is_stopped = _is_stopped(child)
            say(f"{child.name}: {'stopped' if is_stopped else 'running'}")
            os.kill(child.process.pid, signal.SIGUSR1)
            os.kill(child.process.pid, signal.SIGCONT)
        else:
            say(f"{child.name}: {_ending(code)}")
    end_sec = time.monotonic() + stacks_sec
    while _living(children) and time.monotonic() < end_sec:
        time.sleep(POLL_SEC)


def _end(children: list[_Child]) -> bool:
    """SIGKILLs every group, grandchildren too, and reaps; False if one outlives it."""
    for child in children:
        os.killpg(child.process.pid, signal.SIGKILL)
    end_sec = time.monotonic() + END_SEC
    while (left := _living(children)) and time.monotonic() < end_sec:
        time.sleep(POLL_SEC)
    for child in children:
        if child in left:
            say(f"{child.name} outlives SIGKILL: it waits for the kernel")
        else:
            child.process.wait()
    return not left
