"""A cluster of data centres (DCs) on this machine, whose hosts are processes.

    with make_cluster(Cluster(dcs=2, per_dc=2, rate_mbit=100.0)) as cluster:
        result = cluster.run(["tools/my_measurement.py", "--size=4"])
    json.loads(result.lines[-1])

Process i is in DC i // per_dc. It reads its role from the environment variables
MOEJAX_COORDINATOR, MOEJAX_NUM_PROCESSES and MOEJAX_PROCESS_ID, and may count the bytes
of its DC in /sys/class/net/uplink/statistics. docs/testbed.md has a picture.
"""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tools.launch import workers
from tools.launch.workers import is_noise, pass_on
from tools.testbed import network
from tools.testbed import quota as testbed_quota
from tools.testbed.lock import (
    POLL_SEC,
    handle_signals,
    hold_lock,
    interrupt,
    remove_leftovers,
    say,
)
from tools.testbed.network import Unavailable
from tools.testbed.quota import Groups
from train.launch.cluster import LOOPBACK

TIMED_OUT = 124
"""Exit code of a run that reached its time limit, the same as that of timeout(1)."""
WAITS = workers.Waits(grace_sec=20.0)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Specification of a cluster."""

    dcs: int = 2
    """Number of DCs."""
    per_dc: int = 1
    """Number of processes in each DC. Traffic between them is not shaped."""
    rate_mbit: float | None = 100.0
    """Rate of each DC's uplink in Mb/s, in either direction. None: not shaped."""
    quota: float | None = None
    """Maximum number of cores that each process gets. None: all."""

    def __post_init__(self) -> None:
        max_dcs = network.MAX_DCS
        _require(1 <= self.dcs <= max_dcs, f"dcs={self.dcs} must be 1 to {max_dcs}")
        _require(self.per_dc >= 1, f"per_dc={self.per_dc} must be 1 or more")
        _require(
            self.count >= 2,
            f"dcs={self.dcs} of per_dc={self.per_dc} is one process: a cluster has at "
            "least 2, so give more",
        )
        rate, quota = self.rate_mbit, self.quota
        _require(
            rate is None or 0.1 <= rate <= 100_000,
            f"rate_mbit={rate} must be 0.1 to 100000 Mb/s: give another value",
        )
        _require(
            quota is None or 0.02 <= quota <= 1024,
            f"quota={quota} must be 0.02 to 1024 cores: give another value",
        )

    @property
    def count(self) -> int:
        """Number of processes of the cluster."""
        return self.dcs * self.per_dc


@dataclasses.dataclass(frozen=True)
class Result:
    """One run of a program on a cluster."""

    exit_code: int
    lines: tuple[str, ...]
    """Lines that process 0 printed on stdout."""
    uplink_bytes: tuple[int, ...]
    """Bytes sent over the uplink of each DC, headers included. Empty without
    namespaces."""
    is_shaped: bool
    wall_sec: float


@dataclasses.dataclass
class LiveCluster:
    """A cluster that is set up. Several programs may run on it, one after another."""

    spec: Cluster
    has_namespaces: bool
    groups: Groups | None
    """Control groups of the processes. None where quotas are not available."""
    quota: float | None = None
    """Maximum number of cores that each process gets now. None: all."""

    @property
    def is_shaped(self) -> bool:
        has_links = self.has_namespaces and self.spec.dcs > 1
        return has_links and self.spec.rate_mbit is not None

    def set_quota(self, cores: float | None) -> None:
        """Limit each process to `cores`, running ones included. None: no limit.

        Without control groups nothing is done, as `make_cluster` has reported.
        """
        if self.groups is not None:
            testbed_quota.set_quota(self.groups, cores)
            self.quota = cores

    def set_rate(self, rate_mbit: float) -> None:
        """Give the uplinks another rate in Mb/s, while programs run. Without shaped
        links nothing is done, as `make_cluster` has reported."""
        if self.is_shaped:
            for dc in range(self.spec.dcs):
                network.set_rate(dc, rate_mbit)

    def run(
        self,
        program: Sequence[str],
        *,
        timeout_sec: float | None = None,
        is_shown: bool = False,
    ) -> Result:
        """Run a program in every process of the cluster, until all have ended.

        A program that ends in .py is run by this Python. When a process fails, all
        others are ended within 3 seconds, and its exit code is the result's. After
        timeout_sec all are ended (code 124). With `is_shown` stdout is passed on;
        stderr always is. Raises ValueError for a program that does not exist. After
        SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt once all processes have
        ended.
        """
        lines: list[str] = []
        requests, start_sec = workers.StopRequests(), time.monotonic()
        group = self._workers(program, _listener(lines, is_shown))
        before = self.sent_bytes()
        timer = threading.Timer(timeout_sec or threading.TIMEOUT_MAX, requests.end)
        timer.start()
        try:
            with handle_signals(requests.note):
                verdict = workers.run(group, WAITS, requests)
        finally:
            timer.cancel()
        if requests.to_stop:
            raise KeyboardInterrupt
        sent = tuple(a - b for a, b in zip(self.sent_bytes(), before))
        code = verdict.exit_code
        if requests.has_enough:
            code = TIMED_OUT
            say(f"not finished after {timeout_sec:g} s: all processes were ended")
        elif code:
            say(f"{verdict.cause}: no process of this run is left")
        wall_sec = time.monotonic() - start_sec
        return Result(code, tuple(lines), sent, self.is_shaped, wall_sec)

    @contextlib.contextmanager
    def held(self, program: Sequence[str]) -> "Iterator[HeldProgram]":
        """Run a program in every process of the cluster during a `with` block, for
        `HeldProgram.hold` to stop and `go_on` to continue; it is ended with the block.

        Several such programs may be on the cluster at once: their processes i share a
        control group. stdout is dropped, and stderr passed on. Raises ValueError for a
        program that does not exist.
        """
        pids: list[int] = []
        listen = _listener([], is_shown=False)

        def note(process: subprocess.Popen, index: int) -> list[threading.Thread]:
            pids.append(process.pid)
            return listen(process, index)

        held = HeldProgram(self._workers(program, note), pids)
        try:
            yield held
        finally:
            held.end()

    def _workers(self, program: Sequence[str], listen: Callable) -> workers.Workers:
        """Return the processes that run a program on this cluster."""
        return workers.Workers(
            workers.make_command(program),
            self.spec.count,
            workers.free_port(),
            host=network.address(0) if self.has_namespaces else LOOPBACK,
            prefixes=tuple(map(self._prefix, range(self.spec.count))),
            listen=listen,
        )

    def sent_bytes(self) -> tuple[int, ...]:
        """Return the bytes sent over the uplink of each DC since the cluster was set
        up; an empty tuple without namespaces."""
        return network.sent_bytes(self.spec.dcs) if self.has_namespaces else ()

    def _prefix(self, index: int) -> tuple[str, ...]:
        words = ()
        if self.groups is not None:
            words += testbed_quota.prefix(self.groups, index, self.quota)
        if self.has_namespaces:
            words += network.prefix(index // self.spec.per_dc)
        return words


class HeldProgram:
    """A program in every process of a cluster, which can be held: all threads and
    children of its processes are stopped, so that it takes no core."""

    def __init__(self, group: workers.Workers, pids: list[int]) -> None:
        """Start the processes, and return when all have started. `group.listen` appends
        their ids to `pids`."""
        self._pids = pids
        self._requests = workers.StopRequests()
        self._verdict: workers.Verdict | None = None
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(group,), daemon=True)
        self._thread.start()
        while len(pids) < group.count and self._thread.is_alive():
            time.sleep(POLL_SEC)

    def hold(self) -> None:
        """Stop all processes, their children included."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let processes that are held continue."""
        self._signal(signal.SIGCONT)

    def require_running(self) -> None:
        """Raise OSError if a process has ended."""
        if not self._thread.is_alive():
            raise OSError(
                "a program of the cluster ended before its time: "
                f"{self._fault or self._verdict.cause}"
            )

    def end(self) -> None:
        """End all processes, and return when they are gone."""
        self._requests.end()
        self._thread.join()

    def _run(self, group: workers.Workers) -> None:
        waits = dataclasses.replace(WAITS, stopped_sec=math.inf)
        try:
            self._verdict = workers.run(group, waits, self._requests)
        except Exception as fault:
            self._fault = fault

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            # A process that has ended is found by require_running.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)


@contextlib.contextmanager
def make_cluster(spec: Cluster, *, wait_sec: float = 0.0) -> Iterator[LiveCluster]:
    """Set up a cluster for a `with` block, and remove it however the block ends.

    First removes what a killed cluster has left. SIGTERM and SIGHUP raise
    KeyboardInterrupt meanwhile. Namespaces and quotas that this user or machine cannot
    have are reported in one line and left out; without namespaces the processes meet on
    the loopback interface. Raises ValueError when another cluster is in use for longer
    than wait_sec.
    """
    with contextlib.ExitStack() as stack:
        has_namespaces, groups, is_root = False, None, os.geteuid() == 0
        stack.enter_context(handle_signals(interrupt))
        if is_root:
            stack.enter_context(hold_lock(wait_sec))
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
        except Unavailable as reason:
            say(f"{reason}: processes run WITHOUT a quota")
        live = LiveCluster(spec, has_namespaces, groups)
        live.set_quota(spec.quota)
        yield live


def _listener(
    lines: list[str], is_shown: bool
) -> Callable[[subprocess.Popen, int], list[threading.Thread]]:
    """Return a function that starts the threads which read a process's output.

    The stdout of process 0 is appended to `lines`. Stdout is printed too with
    `is_shown`, and stderr always.
    """

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
            if is_noise(line):
                continue
            lines.append(line.decode(errors="replace").rstrip("\n"))
            try:
                if is_shown:
                    print(lines[-1], flush=True)
            except BrokenPipeError:
                is_shown = False
                os.kill(os.getpid(), signal.SIGTERM)  # the same as a request to stop


def _require(claim: bool, message: str) -> None:
    if not claim:
        raise ValueError(message)
