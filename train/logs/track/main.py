"""The trackers' process, which train/logs/track/process.py starts beside process 0.

It takes records from a pipe until that is closed, however the run ends, and gives them
to each tracker. An error of one tracker is said once, and the others go on. It ignores
SIGINT and SIGTERM, because the run still has records then. What the trackers' packages
print goes to RUN_DIR/trackers.log.

jax is not imported here.
"""

import contextlib
import fcntl
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Protocol, TextIO

from train.logs.track.marks import Marks
from train.logs.track.setup import OWN_PACKAGES, Setup
from train.messages import one_line, visible

STDOUT, STDERR = 1, 2
LOG, LOCK = "trackers.log", "trackers.lock"


class Tracker(Protocol):
    """A place to which the figures of a run go."""

    def append(self, record: dict[str, Any]) -> None:
        """Take a record of metrics.jsonl; it may wait until `flush`."""

    def flush(self) -> None:
        """Bring what waits to its place. Raises an error where that fails."""

    def close(self) -> None:
        """End with all in its place."""


class Guarded:
    """A tracker whose errors are counted and said, and never raised."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], say: Callable[[str], None]
    ) -> None:
        self._name, self._say, self._num_lost = name, say, 0
        self._tracker: Tracker | None = None
        try:
            self._tracker = make()
        except Exception as fault:
            say(f"TRACKER {name} NOT STARTED: {_words(fault)}; training goes on")

    def append(self, record: dict[str, Any]) -> None:
        """Give the tracker a record."""
        self._guard(lambda tracker: tracker.append(record), record["step"])

    def flush(self, step: int) -> None:
        """Let the tracker flush the records up to a step."""
        self._guard(lambda tracker: tracker.flush(), step)

    def close(self, step: int) -> None:
        """End the tracker, and say how often it failed."""
        self._guard(lambda tracker: tracker.close(), step)
        if self._num_lost:
            self._say(f"tracker {self._name}: {self._num_lost} writes failed in all")

    def _guard(self, act: Callable[[Tracker], None], step: int) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as fault:
            self._num_lost += 1
            if self._num_lost == 1:
                self._say(
                    f"TRACKER {self._name} FAILS from step {step} on: {_words(fault)}; "
                    "training goes on, and metrics.jsonl has all figures"
                )


def main(descriptor: str) -> None:
    """Feed the trackers with what comes from the loop at the other end of a pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    records = Connection(int(descriptor), writable=False)
    with contextlib.suppress(EOFError, OSError):
        setup: Setup = records.recv()
        with _output_in(pathlib.Path(setup.run_dir) / LOG) as stderr:

            def say(line: str) -> None:
                print(visible(line), file=stderr, flush=True)

            with _alone(pathlib.Path(setup.run_dir) / LOCK):
                _serve(setup, records, say)


def _serve(setup: Setup, records: Connection, say: Callable[[str], None]) -> None:
    """Give records to the trackers until the pipe is closed."""
    sys.path.append(str(OWN_PACKAGES))
    marks = Marks(pathlib.Path(setup.run_dir))
    trackers = [
        Guarded(name, lambda name=name: _make(name, setup, marks), say)
        for name in setup.names
    ]
    step = setup.step
    with contextlib.suppress(EOFError, OSError):
        while True:
            record = records.recv()
            step = record["step"]
            for tracker in trackers:
                tracker.append(record)
            if not records.poll():
                for tracker in trackers:
                    tracker.flush(step)
    for tracker in trackers:
        tracker.close(step)


def _make(name: str, setup: Setup, marks: Marks) -> Tracker:
    """Return a tracker, whose package is imported now."""
    if name == "tensorboard":
        from train.logs.track.to_tensorboard import TensorBoard

        folder = pathlib.Path(setup.run_dir) / "tensorboard"
        return TensorBoard(folder, setup.config_text, setup.step)
    if name == "wandb":
        from train.logs.track.to_wandb import WeightsAndBiases

        return WeightsAndBiases(setup, marks)
    from train.logs.track.to_mlflow import Mlflow

    return Mlflow(setup, marks)


@contextlib.contextmanager
def _output_in(path: pathlib.Path) -> Iterator[TextIO]:
    """Append what this process and its children print to a file, while the block runs;
    yield the standard error that it had."""
    stderr = os.fdopen(os.dup(STDERR), "w", errors="backslashreplace")
    try:
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (STDOUT, STDERR):
        os.dup2(log, descriptor)
    os.close(log)
    with stderr:
        yield stderr


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
    """Wait until the process of an attempt that was killed has ended, which may still
    write to the same trackers."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _words(fault: Exception) -> str:
    """Return the error in one line, or its kind where it has no text."""
    return one_line(fault) or type(fault).__name__


if __name__ == "__main__":
    main(sys.argv[1])
