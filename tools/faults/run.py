"""A run that faults disturb: its folders, its processes, and what it has written.

A Run starts tools/launch/local.py with tools/faults/worker.py, waits for steps, and
raises Broken as soon as a promise does not hold.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from tools.faults.worker import DONE, ORDER, ORDERS, PACE, PARAM
from train.launch.cluster import PROCESS_ID
from train.logs.record_lines import read_records

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tools" / "faults" / "chaos.gin"
MARK = "MOEJAX_CHAOS_RUN"
"""Environment variable by which the processes of one run are found."""
NUM_STEPS = 72
STOPPED_SEC = 2.5
"""The launcher's --stopped_sec."""
LIMIT_SEC = 600.0
"""Longest wait for anything: what has not happened by then never will. Undisturbed
runs, which compile every program, take the longest."""
POLL_SEC = 0.03
DISK_MIB = 16
"""Size of the small file system: more than the logs and four checkpoints need."""
STACKS_SEC = 1.0
RESUMED = re.compile(r"^resumed at step (\d+)$", re.MULTILINE)


class Broken(Exception):
    """Raised when a promise is not kept; the message says how."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The folders of one run. Only `disk`, `orders`, `texts`, `tmp` and the caches may
    change."""

    root: pathlib.Path

    @property
    def shared(self) -> pathlib.Path:
        """The folder of all runs: two corpora, the calibration that the balancer reads,
        and JAX's compilation cache."""
        return self.root.parent

    @property
    def disk(self) -> pathlib.Path:
        """The folder, or the small file system, that holds the run directory."""
        return self.root / "disk"

    @property
    def run_dir(self) -> pathlib.Path:
        return self.disk / "run"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.run_dir / "checkpoints"

    @property
    def orders(self) -> pathlib.Path:
        return self.root / "orders"

    @property
    def texts(self) -> pathlib.Path:
        """The folder of what the processes have printed."""
        return self.root / "texts"

    def untouched(self) -> list[pathlib.Path]:
        """Return the folders in which a run has nothing to write."""
        shards = [self.shared / name for name in ("shards", "other")]
        return [*shards, self.root / "home", self.root / "cwd"]

    def make(self) -> None:
        for name in ("disk", "data_cache", "orders", "texts", "home", "cwd", "tmp"):
            (self.root / name).mkdir(parents=True)


class Run:
    """One run directory, and the launcher that works on it, if one does."""

    def __init__(self, place: Place, num_processes: int, pace_sec: float) -> None:
        """Each step waits for `pace_sec`."""
        self.place, self.num_processes = place, num_processes
        self._pace_sec = pace_sec
        self._num_starts = 0
        self._mark = 0
        self._min_step = 0
        self._launcher: subprocess.Popen | None = None

    def start(self, param: str = "") -> None:
        """Start the launcher. `param` is a binding for one process alone, of the form
        'index:binding'.

        What the processes print goes to a new file below `texts`.
        """
        assert not self.is_live
        self._num_starts += 1
        self.mark()
        with self._text.open("wb") as text:
            self._launcher = subprocess.Popen(
                self._command(),
                env=self._environment(param),
                cwd=self.place.root / "cwd",
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=subprocess.STDOUT,
            )

    def mark(self) -> None:
        """Note what has been printed and saved by now: `text` and `go_on` look at what
        comes after."""
        self._mark = len(self.text()) if self.is_live else 0
        self._min_step = max(self.saved_steps(), default=0)

    def text(self) -> str:
        """Return what the processes have printed since the last start."""
        return self._text.read_text(errors="replace") if self._num_starts else ""

    def new_text(self) -> str:
        """Return what the processes have printed since the last `mark`."""
        return self.text()[self._mark :]

    def error(self) -> str:
        """Return the last error line of the last start, or its last line."""
        lines = self.text().splitlines()
        errors = [x for x in lines if "error: " in x[:12]]
        return (errors or [x for x in lines if not x.startswith("{")] or [""])[-1]

    @property
    def is_live(self) -> bool:
        """Whether a launcher was started whose end nobody has waited for."""
        return self._launcher is not None

    def has_ended(self) -> bool:
        """Return whether the launcher that was started last has ended."""
        return self._launcher is None or self._launcher.poll() is not None

    def go_on(self, min_step: int | None = None) -> None:
        """Start the run if it does not run, and wait until it has compiled its step.

        Raises Broken if it ends before, or if it goes on from a step before `min_step`
        (by default that of the newest checkpoint at the last start or `mark`).
        """
        if not self.is_live:
            self.start()

        def attempt() -> str:
            return self.new_text().rpartition("starting again")[2]

        def has_begun() -> bool:
            return "\ncompiled for " in attempt()

        self.wait_until(lambda: has_begun() or self.has_ended(), "the first step")
        if not has_begun():
            raise Broken(f"ended before a step: {self.error()[:300]}")
        steps = RESUMED.findall(attempt())
        step = int(steps[-1]) if steps else 0
        wanted = self._min_step if min_step is None else min_step
        if step < wanted:
            raise Broken(f"went on from step {step}, but {wanted} was saved")

    def wait_until(self, is_so: Callable[[], object], what: str) -> float:
        """Wait until is_so() is true, and return the seconds that it took. Raises
        Broken after LIMIT_SEC."""
        start_sec = time.monotonic()
        while not is_so():
            if time.monotonic() - start_sec > LIMIT_SEC:
                raise Broken(f"after {LIMIT_SEC:.0f} s still not: {what}")
            time.sleep(POLL_SEC)
        return time.monotonic() - start_sec

    def wait_for_steps(self, count: int) -> None:
        """Wait until `count` more steps are logged. Raises Broken when the launcher
        ends before."""
        goal = self.last_step() + count
        self.wait_until(
            lambda: self.last_step() >= goal or self.has_ended(), f"step {goal}"
        )
        if self.last_step() < goal:
            raise Broken(f"ended before step {goal}: {self.error()[:300]}")

    def expect_end(self, code: int) -> float:
        """Wait until the launcher has ended with this exit code, without a traceback,
        and return the seconds that it took."""
        sec = self.wait_until(self.has_ended, "the launcher ends")
        found, self._launcher = self._launcher.returncode, None
        if found != code:
            raise Broken(f"exit code {found} instead of {code}: {self.error()[:300]}")
        last_attempt = self.text().rpartition("starting again")[2]
        if code >= 0 and "Traceback (most recent" in last_attempt:
            raise Broken(f"exit code {code}, with a traceback: {self.error()[:300]}")
        return sec

    def expect_gone(self, pids: list[int]) -> float:
        """Wait until these processes are gone, and return the seconds that it took."""
        what = f"all of the processes {pids} are gone"
        return self.wait_until(lambda: not any(map(is_running, pids)), what)

    def stop(self) -> float:
        """Ask the launcher to stop, expect 75, and return the seconds until then."""
        self.signal_launcher(signal.SIGTERM)
        return self.expect_end(75)

    def signal_launcher(self, number: int) -> None:
        self._launcher.send_signal(number)

    def give(self, order: dict[str, object]) -> dict[str, object]:
        """Give an order to the process that it names (tools/faults/worker.py), and
        return the process's report that it obeys."""
        folder = self.place.orders
        (folder / "new").write_text(json.dumps(order))
        (folder / "new").rename(folder / ORDER)
        report = folder / DONE
        self.wait_until(lambda: report.exists() or self.has_ended(), "a report")
        if not report.exists():
            raise Broken(f"ended before it obeyed an order: {self.error()[:300]}")
        done = json.loads(report.read_text())
        report.unlink()
        return done

    def last_step(self) -> int:
        """Return the last step in metrics.jsonl, 0 if there is none."""
        path = self.place.run_dir / "metrics.jsonl"
        records = read_records(path, say=lambda _: None)  # a line may be half written
        return max((record["step"] for record in records), default=0)

    def saved_steps(self) -> list[int]:
        """Return the steps of the checkpoints, the oldest first."""
        names = [path.name for path in self.place.checkpoints.glob("*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def pids(self) -> list[int]:
        """Return the ids of the launcher's processes in the order of their indices,
        once all are there."""
        found: list[int] = []

        def are_all() -> bool:
            if self.has_ended():
                raise Broken(f"ended before the fault: {self.error()[:300]}")
            found[:] = self._children()
            return len(found) == self.num_processes

        self.wait_until(are_all, f"{self.num_processes} processes")
        return found

    def write_stacks(self) -> None:
        """Let the processes that are still there write the stacks of their threads, to
        `texts` or to their logs, as train.launch.processes has prepared them to."""
        pids = marked_pids(self.place.root)
        workers = [pid for pid in pids if PROCESS_ID in read_environ(pid)]
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        if workers:
            time.sleep(STACKS_SEC)

    def close(self) -> None:
        """Kill the launcher and its processes, also those that it has left behind."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
        for pid in marked_pids(self.place.root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def _text(self) -> pathlib.Path:
        return self.place.texts / f"start-{self._num_starts}.txt"

    def _children(self) -> list[int]:
        """Return the ids of the processes that the launcher has now, by index."""
        task = f"/proc/{self._launcher.pid}/task/{self._launcher.pid}/children"
        pid_by_index = {}
        for pid in pathlib.Path(task).read_text().split():
            environ = read_environ(int(pid))
            if PROCESS_ID in environ:
                pid_by_index[int(environ[PROCESS_ID])] = int(pid)
        return [pid_by_index[index] for index in sorted(pid_by_index)]

    def _command(self) -> list[str]:
        place, python = self.place, sys.executable
        launcher = [python, str(ROOT / "tools" / "launch" / "local.py"), "--json"]
        launcher += ["-n", str(self.num_processes), "--max_restarts=8"]
        launcher += ["--backoff_sec=0.1", f"--stopped_sec={STOPPED_SEC}", "--"]
        worker = [str(ROOT / "tools" / "faults" / "worker.py"), "--json"]
        worker += [f"--gin_file={CONFIG}", f"--run_dir={place.run_dir}"]
        params = (
            f"Data.corpus = '{place.shared / 'shards'}'",
            f"Balance.calibration = '{place.shared / 'speeds.json'}'",
            f"Train.num_steps = {NUM_STEPS}",
        )
        return launcher + worker + [f"--gin_param={param}" for param in params]

    def _environment(self, param: str) -> dict[str, str]:
        root = self.place.root
        kept = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("MOEJAX_", "JAX_", "XLA_"))
        }
        return kept | {
            "HOME": str(root / "home"),
            "TMPDIR": str(root / "tmp"),
            "MOEJAX_CACHE_DIR": str(root / "data_cache"),
            "JAX_COMPILATION_CACHE_DIR": str(self.place.shared / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            MARK: str(root),
            ORDERS: str(self.place.orders),
            PACE: str(self._pace_sec),
            PARAM: param,
        }


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2][:1] not in "ZX"


def read_environ(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with, {} if it is gone."""
    try:
        words = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    texts = words.decode(errors="replace").split("\0")
    return dict(text.split("=", 1) for text in texts if "=" in text)


def marked_pids(root: pathlib.Path) -> list[int]:
    """Return the ids of all living processes that a run has started."""
    pids = [int(x.name) for x in pathlib.Path("/proc").glob("[0-9]*")]
    return [p for p in pids if read_environ(p).get(MARK) == str(root) and is_running(p)]


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[None]:
    """Mount a file system of DISK_MIB on a folder while the block runs."""
    mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", folder)
    try:
        yield
    finally:
        unmount(folder)


def can_mount() -> bool:
    """Return whether this process can mount a file system."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        try:
            with small_disk(pathlib.Path(name)):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True)


def unmount(folder: pathlib.Path) -> None:
    """Unmount a folder, also if a process that is being killed still uses it."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def mounts_below(root: pathlib.Path) -> list[str]:
    """Return the folders below `root` on which something is mounted."""
    lines = pathlib.Path("/proc/self/mounts").read_text().splitlines()
    return [line.split()[1] for line in lines if line.split()[1].startswith(f"{root}/")]
