"""The loop's side of the trackers' process: start it and feed it, without ever waiting.

    append   puts a record in a queue; a thread writes it to a pipe
    close    waits for what is in the queue, for CLOSE_SEC at most

Records are dropped and counted where the queue is full, because the process does not
keep up or was stopped, and where the process has ended. metrics.jsonl has the same
figures. Nothing here raises an error or holds a step.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from train.launch.program import say_loudly
from train.logs.track.setup import ROOT, Setup

MODULE = "train.logs.track.main"
NUM_WAITING = 4096
"""Records that may wait. One takes a few KiB; W&B and MLflow begin to take them after
some seconds."""
CLOSE_SEC, NOTICE_SEC = 30.0, 5.0
"""Longest wait at the end of a run, and the wait after which a line tells of it. On a
busy machine the imports of W&B and MLflow alone take ten seconds."""


class TrackersProcess:
    """A process that feeds trackers beside the loop. It ends with this one."""

    def __init__(
        self,
        setup: Setup,
        *,
        num_waiting: int = NUM_WAITING,
        say: Callable[[str], None] = say_loudly,
    ) -> None:
        """Start the process; return before it has begun."""
        self._say, self._names = say, ", ".join(setup.names)
        self._records: queue.Queue = queue.Queue(num_waiting)
        self._num_given = self._num_lost = 0
        self._is_gone = False
        self._process: subprocess.Popen | None = None
        self._thread: threading.Thread | None = None
        try:
            ours = self._start()
        except OSError as fault:
            self._end(f"could not be started: {fault}")
            return
        self._thread = threading.Thread(
            target=self._write, args=(ours, setup), daemon=True
        )
        self._thread.start()

    def _start(self) -> Connection:
        """Start the process, and return the end of the pipe to it."""
        theirs, ours = os.pipe()
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs)],
                pass_fds=(theirs,),
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return Connection(ours, readable=False)

    @property
    def pid(self) -> int | None:
        """Id of the process; None if it could not be started."""
        return None if self._process is None else self._process.pid

    def append(self, record: dict[str, Any]) -> None:
        """Give the trackers a record, which must not change any more; return at
        once."""
        self._num_given += 1
        if self._is_gone:
            self._num_lost += 1
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._num_lost += 1
            if self._num_lost == 1:
                self._say(
                    f"TRACKERS BEHIND from step {record['step']} on: {self._names} do "
                    "not keep up, and records are left out; training goes on, and "
                    "metrics.jsonl has all"
                )

    def close(self, limit_sec: float = CLOSE_SEC) -> None:
        """Let the process take what waits, and end; kill it after `limit_sec`. Say how
        many records were lost, if any."""
        end_sec = time.monotonic() + limit_sec
        if self._thread is not None:
            self._process.send_signal(signal.SIGCONT)  # if someone has stopped it
            line = f"waiting for {self._names}, {limit_sec:g} s at most"
            notice = threading.Timer(NOTICE_SEC, self._say, [line])
            notice.daemon = True
            notice.start()
            self._stop_thread(end_sec)
            try:
                self._process.wait(max(0.0, end_sec - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._end(f"did not end within {limit_sec:g} s, and are killed")
                self._process.kill()
                self._process.wait()
                self._records.put(None)  # the thread, whose pipe is broken, takes it
            notice.cancel()
            self._thread.join()
            self._thread = None
        if self._num_lost:
            self._say(
                f"trackers: at least {self._num_lost} of {self._num_given} records "
                f"did not reach {self._names}"
            )

    def _stop_thread(self, end_sec: float) -> None:
        """Let the thread end once it has written what waits, until `end_sec` at
        most."""
        try:
            self._records.put(None, timeout=max(0.0, end_sec - time.monotonic()))
        except queue.Full:
            return
        self._thread.join(max(0.0, end_sec - time.monotonic()))

    def _write(self, to_trackers: Connection, setup: Setup) -> None:
        """Write records until `close` is called, and count those that nobody reads."""
        with to_trackers:
            message: Any = setup
            while message is not None:
                try:
                    to_trackers.send(message)
                except OSError:
                    self._num_lost += isinstance(message, dict)
                    self._end(f"have ended ({self._how()})")
                    break
                message = self._records.get()
        while message is not None:  # nobody reads any more
            message = self._records.get()
            self._num_lost += message is not None

    def _how(self) -> str:
        """Return how the process has ended: by a signal, or with an exit code."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "their pipe is closed"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _end(self, how: str) -> None:
        """Take note that the process is gone, and say so once."""
        if not self._is_gone:
            self._is_gone = True
            self._say(
                f"TRACKERS ENDED: {self._names} {how}; training goes on, and "
                "metrics.jsonl has all figures"
            )
