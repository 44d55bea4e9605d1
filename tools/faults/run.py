"""A run that faults disturb: its folders, its processes, and what it has written.

A Run starts tools/launch/local.py with tools/faults/worker.py, waits for steps, and
raises Broken as soon as a promise does not hold or a time limit has passed.
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
import time
from collections.abc import Callable

from tools.faults.worker import ORDERS, PACE, PARAM
from train.launch.cluster import PROCESS_ID

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tools" / "faults" / "chaos.gin"
MARK = "MOEJAX_CHAOS_RUN"
"""Environment variable by which the processes of one scenario are found."""

NUM_STEPS = 72
PACE_SEC = 0.04
STOPPED_SEC = 2.5
MAX_RESTARTS = 8
POLL_SEC = 0.03
STACKS_SEC = 1.0
RESUMED = re.compile(r"^resumed at step (\d+)$", re.MULTILINE)
START_SEC = 150.0
"""Limit on the time from a start to the first step, with nothing compiled yet."""


class Broken(Exception):
    """Raised when a promise is not kept; the message says how."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The folders of one run. Only `disk`, the caches, and `tmp` may change."""

    root: pathlib.Path
    corpus: pathlib.Path
    """Folder of the prepared shards, private to this run."""
    speeds: pathlib.Path
    """The calibration that the balancer reads."""
    programs: pathlib.Path
    """JAX's compilation cache."""

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
    def hashes(self) -> pathlib.Path:
        """The cache of the hashes of data files."""
        return self.root / "data_cache"

    @property
    def orders(self) -> pathlib.Path:
        return self.root / "orders"

    @property
    def texts(self) -> pathlib.Path:
        """The folder of what the processes have printed."""
        return self.root / "texts"

    def untouched(self) -> list[pathlib.Path]:
        """Return the folders in which a run has nothing to write."""
        return [self.corpus, self.root / "home", self.root / "cwd"]

    def make(self) -> None:
        for name in ("disk", "data_cache", "orders", "texts", "home", "cwd", "tmp"):
            (self.root / name).mkdir(parents=True)


class Run:
    """One run directory, and the launcher that works on it, if one does."""

    def __init__(
        self, place: Place, num_processes: int, limit_sec: float, pace_sec: float
    ) -> None:
        """`limit_sec` limits everything that is done with this run together. Each step
        waits for `pace_sec`."""
        self.place, self.num_processes = place, num_processes
        self._pace_sec = pace_sec
        self._end_sec = time.monotonic() + limit_sec
        self._num_starts = 0
        self._mark = 0
        self._min_step = 0
        self.spoiled: set[int] = set()
        """Steps of the checkpoints that were damaged since the last start."""
        self._launcher: subprocess.Popen | None = None

    def close(self) -> None:
        """Kill the launcher and its processes, also those that it has left behind."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
        for pid in marked_pids(self.place.root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

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

    @property
    def is_live(self) -> bool:
        return self._launcher is not None

    def is_launcher_alive(self) -> bool:
        """Return whether the launcher that was started last still runs."""
        return self._launcher is not None and self._launcher.poll() is None

    def start(self, param: str = "") -> None:
        """Start the launcher. `param` is an order of the form 'index:binding' (worker).

        What the processes print goes to a new file below `texts`.
        """
        assert not self.is_live
        self._num_starts += 1
        self._mark = 0
        self._note_saved()
        with self._text.open("wb") as text:
            self._launcher = subprocess.Popen(
                self._command(),
                env=self._environment(param),
                cwd=self.place.root / "cwd",
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=subprocess.STDOUT,
            )

    def text(self, *, is_new: bool = False) -> str:
        """Return what the processes have printed since the last start; if `is_new`,
        only what came after the last call of `mark`."""
        if not self._num_starts:
            return ""
        text = self._text.read_text(errors="replace")
        return text[self._mark :] if is_new else text

    def mark(self) -> None:
        """Note how much has been printed by now, and what has been saved."""
        self._note_saved()
        self._mark = len(self.text())

    def expect_resumed(self) -> None:
        """Raise Broken if the last attempt has begun before the step of the newest good
        checkpoint that was there at the last start or `mark`."""
        steps = RESUMED.findall(self.text(is_new=True))
        step = int(steps[-1]) if steps else 0
        if step < self._min_step:
            raise Broken(f"went on from step {step}, but {self._min_step} was saved")

    def expect_resumed_from(self, step: int) -> None:
        """Let `expect_resumed` accept no earlier step than this one."""
        self._min_step = max(self._min_step, step)

    def _note_saved(self) -> None:
        good = [step for step in self.saved_steps() if step not in self.spoiled]
        self._min_step = max(good, default=0)

    def error(self) -> str:
        """Return the last error line of the last start, or its last line."""
        lines = self.text().splitlines()
        errors = [x for x in lines if "error: " in x[:12]]
        return (errors or [x for x in lines if not x.startswith("{")] or [""])[-1]

    def wait_until(
        self, is_so: Callable[[], object], what: str, limit_sec: float
    ) -> float:
        """Wait until is_so() is true, and return the seconds that it took.

        Raises Broken after limit_sec, and when the time of the whole run is up.
        """
        start_sec = time.monotonic()
        while not is_so():
            now_sec = time.monotonic()
            if now_sec > min(start_sec + limit_sec, self._end_sec):
                raise Broken(f"after {now_sec - start_sec:.0f} s still not: {what}")
            time.sleep(POLL_SEC)
        return time.monotonic() - start_sec

    def wait_for_end(self, limit_sec: float) -> int:
        """Wait until the launcher has ended, and return its exit code."""
        self.wait_until(
            lambda: self._launcher.poll() is not None, "the launcher ends", limit_sec
        )
        code, self._launcher = self._launcher.returncode, None
        return code

    def expect_end(self, code: int, limit_sec: float) -> None:
        """Wait until the launcher has ended with this exit code, or raise Broken."""
        found = self.wait_for_end(limit_sec)
        if found != code:
            raise Broken(f"exit code {found} instead of {code}: {self.error()[:300]}")
        if (
            code >= 0
            and "Traceback (most recent" in self.text().rpartition("starting again")[2]
        ):
            raise Broken(
                f"exit code {code}, but with a traceback: {self.error()[:300]}"
            )

    def wait_for_begin(self) -> bool:
        """Wait until the attempt that began after the last `mark` has compiled its
        step, and return True; False if the launcher ends before."""

        def has_begun() -> bool:
            return "\ncompiled for " in self.text(is_new=True)

        def is_decided() -> bool:
            return has_begun() or not self.is_launcher_alive()

        self.wait_until(is_decided, "the first step", START_SEC)
        return has_begun()

    def wait_for_steps(self, count: int) -> None:
        """Wait until `count` more steps are logged. Raises Broken when the launcher
        ends before."""
        goal = self.last_step() + count

        def is_there() -> bool:
            if self.is_launcher_alive():
                return self.last_step() >= goal
            code = self.wait_for_end(1.0)
            raise Broken(f"ended with {code} before step {goal}: {self.error()[:300]}")

        self.wait_until(is_there, f"step {goal}", START_SEC)

    def last_step(self) -> int:
        """Return the last step in metrics.jsonl, 0 if there is none."""
        steps = [x["step"] for x in read_lines(self.place.run_dir / "metrics.jsonl")]
        return max(steps, default=0)

    def saved_steps(self) -> list[int]:
        """Return the steps of the checkpoints, the oldest first."""
        names = [path.name for path in self.place.checkpoints.glob("*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def pids(self) -> list[int]:
        """Return the ids of the launcher's processes in the order of their indices,
        once all are there."""
        found: list[int] = []

        def are_all() -> bool:
            if not self.is_launcher_alive():
                raise Broken(f"ended before the fault: {self.error()[:300]}")
            found[:] = self._children()
            return len(found) == self.num_processes

        self.wait_until(are_all, f"{self.num_processes} processes", START_SEC)
        return found

    def signal_launcher(self, number: int) -> None:
        self._launcher.send_signal(number)

    def expect_gone(self, pids: list[int], limit_sec: float) -> float:
        """Wait until these processes are gone, and return the seconds that it took."""
        what = f"all of the processes {pids} are gone"
        return self.wait_until(lambda: not any(map(is_running, pids)), what, limit_sec)

    def stop(self, limit_sec: float) -> None:
        """Ask the launcher to stop, and expect 75 with everything saved."""
        self.signal_launcher(signal.SIGTERM)
        self.expect_end(75, limit_sec)

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
        launcher += ["-n", str(self.num_processes), f"--max_restarts={MAX_RESTARTS}"]
        launcher += ["--backoff_sec=0.1", f"--stopped_sec={STOPPED_SEC}", "--"]
        worker = [str(ROOT / "tools" / "faults" / "worker.py"), "--json"]
        worker += [f"--gin_file={CONFIG}", f"--run_dir={place.run_dir}"]
        params = (
            f"Data.corpus = '{place.corpus}'",
            f"Balance.calibration = '{place.speeds}'",
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
            "MOEJAX_CACHE_DIR": str(self.place.hashes),
            "JAX_COMPILATION_CACHE_DIR": str(self.place.programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            MARK: str(root),
            ORDERS: str(self.place.orders),
            PACE: str(self._pace_sec),
            PARAM: param,
        }


def read_lines(path: pathlib.Path) -> list[dict]:
    """Return the objects of a file of JSON lines. Lines that are torn, or no objects
    with a step, are left out."""
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


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
    """Return the ids of all living processes that a scenario has started."""
    pids = [int(x.name) for x in pathlib.Path("/proc").glob("[0-9]*")]
    return [p for p in pids if read_environ(p).get(MARK) == str(root) and is_running(p)]
