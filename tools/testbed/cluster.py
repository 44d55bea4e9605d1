"""A cluster: processes of one program as hosts of DCs on this machine.

    with make_cluster(Cluster(dcs=2, per_dc=2, rate_mbit=100.0)) as cluster:
        result = cluster.run(["tools/my_measurement.py", "--size=4"])
    json.loads(result.lines[-1])

Process i lies in DC i // per_dc. It finds its place in MOEJAX_COORDINATOR,
MOEJAX_NUM_PROCESSES and MOEJAX_PROCESS_ID, and counts its DC's bytes, if it likes, in
/sys/class/net/uplink/statistics. docs/testbed.md has the picture.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tools.launch import workers
from tools.launch.lines import NOISE, pass_on
from tools.testbed import network
from tools.testbed import quota as testbed_quota
from tools.testbed.lock import (
    POLL_SEC,
    handled,
    interrupt,
    locked,
    remove_leftovers,
    say,
)
from tools.testbed.network import Unavailable
from tools.testbed.quota import Groups
from train.launch.cluster import LOOPBACK

TIMED_OUT = 124
"""Exit code, as of timeout(1)."""
WAITS = workers.Waits(grace_sec=20.0)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What a cluster is to be."""

    dcs: int = 2
    per_dc: int = 1
    """Processes of a DC; they talk unshaped."""
    rate_mbit: float | None = 100.0
    """Of each DC's uplink, in either direction; None: unshaped."""
    quota: float | None = None
    """Cores that each process gets at most; None: all."""

    def __post_init__(self) -> None:
        most = network.MAX_DCS
        _require(1 <= self.dcs <= most, f"dcs={self.dcs} must be 1 to {most}")
        _require(self.per_dc >= 1, f"per_dc={self.per_dc} must be 1 or more")
        _require(
            self.count >= 2,
            f"dcs={self.dcs} of per_dc={self.per_dc} is one process: a cluster has 2 "
            "at least, so give more",
        )
        rate, quota = self.rate_mbit, self.quota
        _require(
            rate is None or 0.1 <= rate <= 100_000,
            f"rate_mbit={rate} must be 0.1 to 100000 Mb/s: give another",
        )
        _require(
            quota is None or 0.02 <= quota <= 1024,
            f"quota={quota} must be 0.02 cores or more: give another",
        )

    @property
    def count(self) -> int:
        """Processes of the cluster."""
        return self.dcs * self.per_dc


@dataclasses.dataclass(frozen=True)
class Result:
    """One run of a program on a cluster."""

    exit_code: int
    lines: tuple[str, ...]
    """What process 0 printed on stdout."""
    uplink_bytes: tuple[int, ...]
    """Sent over the uplink of each DC, headers included; empty without namespaces."""
    is_shaped: bool
    wall_sec: float


@dataclasses.dataclass(frozen=True)
class LiveCluster:
    """A cluster that stands; several programs may run on it, one after another."""

    spec: Cluster
    has_namespaces: bool
    groups: Groups | None
    """None: no quotas here."""

    @property
    def is_shaped(self) -> bool:
        has_links = self.has_namespaces and self.spec.dcs > 1
        return has_links and self.spec.rate_mbit is not None

    def set_quota(self, cores: float | None) -> None:
        """For each process, from now on, also of those that run; None: no limit.
        Without control groups it does nothing, as was said when the cluster was
        made."""
        if self.groups is not None:
            testbed_quota.set_quota(self.groups, cores)

    def run(
        self,
        program: Sequence[str],
        *,
        timeout_sec: float | None = None,
        watch: Callable[[], bool] | None = None,
        is_shown: bool = False,
    ) -> Result:
        """Runs a program (one that ends in .py by this Python) to its end.

        One process that fails ends all others within 3 seconds, and its code is the
        result's; after timeout_sec all are ended (code 124). `watch` is called 20 times
        a second, in a thread of its own: when it says True, enough is done and all are
        ended at once (code 0). `is_shown` passes on what is printed on stdout; stderr
        always is. Raises ValueError for a program that is not there, KeyboardInterrupt
        after SIGINT, SIGTERM or SIGHUP, when all processes have ended.
        """
        lines: list[str] = []
        asked, clock = workers.Asked(), _Clock(timeout_sec)
        group = workers.Workers(
            make_command(program),
            self.spec.count,
            workers.free_port(),
            host=network.address(0) if self.has_namespaces else LOOPBACK,
            prefixes=tuple(map(self._prefix, range(self.spec.count))),
            listen=_listener(lines, is_shown),
        )
        before = self.sent_bytes()
        with handled(asked.note), _watched(asked, clock, watch):
            verdict = workers.run(group, WAITS, asked)
        if asked.to_stop:
            raise KeyboardInterrupt
        sent = tuple(a - b for a, b in zip(self.sent_bytes(), before))
        code = verdict.exit_code
        if clock.is_out:
            code = TIMED_OUT
            say(f"no end within {timeout_sec:g} s: all processes were ended")
        elif code:
            say(f"{verdict.cause}: no process of this run is left")
        wall_sec = time.monotonic() - clock.start_sec
        return Result(code, tuple(lines), sent, self.is_shaped, wall_sec)

    def sent_bytes(self) -> tuple[int, ...]:
        """Over the uplink of each DC since the cluster stands."""
        return network.sent_bytes(self.spec.dcs) if self.has_namespaces else ()

    def _prefix(self, index: int) -> tuple[str, ...]:
        words = ()
        if self.groups is not None:
            words += testbed_quota.prefix(self.groups, index)
        if self.has_namespaces:
            words += network.prefix(index // self.spec.per_dc)
        return words


@contextlib.contextmanager
def make_cluster(spec: Cluster, *, wait_sec: float = 0.0) -> Iterator[LiveCluster]:
    """Sets a cluster up, and removes it however the block ends; SIGTERM and SIGHUP
    raise KeyboardInterrupt meanwhile. First removes what a killed one has left.

    What this user or machine cannot have is said in one line and done without:
    namespaces (processes then meet on the loopback interface), quotas. Raises
    ValueError when another cluster stands for longer than wait_sec.
    """
    with contextlib.ExitStack() as stack:
        has_namespaces, groups, is_root = False, None, os.geteuid() == 0
        stack.enter_context(handled(interrupt))
        if is_root:
            stack.enter_context(locked(wait_sec))
            remove_leftovers()
            stack.callback(remove_leftovers)
        try:
            network.set_up(spec.dcs, spec.rate_mbit if spec.dcs > 1 else None)
            has_namespaces = True
        except Unavailable as reason:
            say(f"{reason}: links are NOT shaped, processes meet on {LOOPBACK}")
            if is_root:
                remove_leftovers()
        try:
            groups = testbed_quota.set_up(spec.count)
            testbed_quota.set_quota(groups, spec.quota)
        except Unavailable as reason:
            say(f"{reason}: processes run WITHOUT a quota")
        yield LiveCluster(spec, has_namespaces, groups)


@dataclasses.dataclass
class _Clock:
    timeout_sec: float | None
    start_sec: float = dataclasses.field(default_factory=time.monotonic)
    is_out: bool = False


@contextlib.contextmanager
def _watched(
    asked: workers.Asked, clock: _Clock, watch: Callable[[], bool] | None
) -> Iterator[None]:
    """A thread that ends the workers when they have done enough, or time is out."""
    is_over, faults = threading.Event(), []

    def look() -> None:
        limit_sec = clock.timeout_sec
        try:
            while not (is_over.wait(POLL_SEC) or clock.is_out):
                passed_sec = time.monotonic() - clock.start_sec
                clock.is_out = limit_sec is not None and passed_sec > limit_sec
                if watch is not None and watch():
                    break
        except Exception as fault:
            faults.append(fault)
        asked.has_enough = True

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if faults:
        raise faults[0]


def _listener(
    lines: list[str], is_shown: bool
) -> Callable[[subprocess.Popen, int], list[threading.Thread]]:
    """Keeps what process 0 prints on stdout; all of stderr is passed on."""

    def listen(process: subprocess.Popen, index: int) -> list[threading.Thread]:
        if index and is_shown:
            return pass_on(process, index)
        pipe, process.stdout = process.stdout, None
        kept = [] if index else lines
        thread = threading.Thread(
            target=_keep, args=(pipe, kept, is_shown), daemon=True
        )
        thread.start()
        return [thread, *pass_on(process, index)]

    return listen


def _keep(pipe, lines: list[str], is_shown: bool) -> None:
    with pipe:
        for line in pipe:
            if line.startswith(NOISE):
                continue
            lines.append(line.decode(errors="replace").rstrip("\n"))
            try:
                if is_shown:
                    print(lines[-1], flush=True)
            except BrokenPipeError:
                is_shown = False
                os.kill(os.getpid(), signal.SIGTERM)  # as if asked to stop


def make_command(program: Sequence[str]) -> list[str]:
    """What is started: a program that ends in .py is run by this Python. Raises
    ValueError for one that is not there."""
    _require(bool(program), "no program is named: say which, such as train/main.py")
    first = program[0]
    if first.endswith(".py"):
        is_file = pathlib.Path(first).is_file()
        _require(is_file, f"{first} is no file: name a Python program that is there")
        return [sys.executable, *program]
    is_there = shutil.which(first) is not None
    _require(is_there, f"{first} is no program of this machine: name one, or a .py")
    return list(program)


def _require(claim: bool, message: str) -> None:
    if not claim:
        raise ValueError(message)
