"""The loop's side of the planner's process: start it, tell it of events, collect its
replies.

    observe     a thread writes the counts of a step to a pipe, without Python's lock
    collect     the reply for a step, which another thread has received meanwhile
    snapshot    the planner's state for a checkpoint, without a wait for a plan
"""

import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from moejax.balance.planning import (
    Adopted,
    Compiled,
    Refused,
    Reply,
    Snapshot,
    Task,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE = "train.balance.planner_main"
NUM_WAITING = 16
"""Messages that may wait to be written. The planner reads at once, however long it
plans, so that there are few; the loop waits where there are more."""
CLOSE_SEC = 5.0
"""Longest wait for the end of a process whose pipe is closed; it takes milliseconds."""


class PlannerProcess:
    """A process that plans beside the loop. It ends with this one, however that ends.

    Every method raises OSError once the process has ended by itself, and the ValueError
    of a policy whose plan cannot run.
    """

    def __init__(self, task: Task, snapshot: Snapshot) -> None:
        """Start the process, which goes on from `snapshot`; return before it has
        begun."""
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(theirs_in), str(theirs_out)],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._replies: dict[int, Reply] = {}
        self._snapshot: Snapshot | None = None
        self._fault: Exception | None = None
        self._has_news = threading.Condition()
        self._messages: queue.Queue = queue.Queue(NUM_WAITING)
        self._messages.put(((task, snapshot), None))
        for work, connection in (
            (self._write, Connection(ours_out, readable=False)),
            (self._receive, Connection(ours_in, writable=False)),
        ):
            threading.Thread(target=work, args=(connection,), daemon=True).start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def observe(
        self,
        step: int,
        tokens_lwe: np.ndarray,
        fullest_pair_l: np.ndarray,
        step_sec: float | None = None,
        together_lee: np.ndarray | None = None,
    ) -> None:
        """Tell the planner of the int32 counts of a step, which must not change any
        more, and of its time."""
        tokens_lwe = np.ascontiguousarray(tokens_lwe, np.int32)
        others = np.asarray(fullest_pair_l), step_sec, together_lee
        self._send(("observed", step, tokens_lwe.shape, *others), tokens_lwe)

    def tell(self, event: Adopted | Refused | Compiled) -> None:
        """Tell the planner what was done with the decision that was due, or how long
        the first compilation took."""
        self._send(("event", event))

    def collect(self, step: int) -> tuple[Reply, float]:
        """Return the reply for an asked step, and the seconds in which it was waited
        for."""
        start_sec = time.monotonic()
        self._wait(lambda: step in self._replies)
        waited_sec = time.monotonic() - start_sec
        self._send(("collected", step))
        return self._replies.pop(step), waited_sec

    def snapshot(self) -> Snapshot:
        """Return the planner's Snapshot after all that it was told of."""
        self._snapshot = None
        self._send(("snapshot",))
        self._wait(lambda: self._snapshot is not None)
        return self._snapshot

    def close(self) -> None:
        """End the process, whatever it does."""
        try:
            self._messages.put(None, timeout=CLOSE_SEC)
            self._process.wait(CLOSE_SEC)
        except (queue.Full, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _write(self, to_planner: Connection) -> None:
        """Write messages until `close` is called or the process has ended."""
        with to_planner:
            while (item := self._messages.get()) is not None:
                message, array = item
                if isinstance(self._fault, OSError | EOFError):
                    continue  # nobody reads, and the loop must not wait
                try:
                    to_planner.send(message)
                    if array is not None:
                        to_planner.send_bytes(array.data.cast("B"))
                except OSError as fault:
                    self._fail(fault)

    def _receive(self, from_planner: Connection) -> None:
        """Receive messages until the process ends."""
        with from_planner:
            try:
                while True:
                    self._take(from_planner.recv())
            except (EOFError, OSError) as end:
                self._fail(end)

    def _take(self, message: tuple) -> None:
        """Keep a message for the loop."""
        with self._has_news:
            match message:
                case ("reply", reply):
                    self._replies[reply.step] = reply
                case ("snapshot", snapshot):
                    self._snapshot = snapshot
                case ("fault", kind, text):
                    kinds = {"ValueError": ValueError, "RuntimeError": RuntimeError}
                    self._fault = self._fault or kinds[kind](text)
            self._has_news.notify_all()

    def _fail(self, fault: Exception) -> None:
        """Keep an error for the loop, unless there is one already."""
        with self._has_news:
            self._fault = self._fault or fault
            self._has_news.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Return when a message has made `is_so()` true."""
        with self._has_news:
            self._has_news.wait_for(lambda: is_so() or self._fault)
            if not is_so():
                self._require()

    def _send(self, message: tuple, array: np.ndarray | None = None) -> None:
        """Let the thread write a message, and the bytes of an array after it."""
        self._require()
        self._messages.put((message, array))

    def _require(self) -> None:
        """Raise the error of a planner that has failed or is gone."""
        if isinstance(self._fault, OSError | EOFError):
            raise OSError(
                f"the planner's process {self.pid} has ended ({self._how()}), and no "
                "decision can be made: run again to go on from the last checkpoint"
            )
        if self._fault is not None:
            raise self._fault

    def _how(self) -> str:
        """Return how the process has ended: by a signal, or with an exit code."""
        try:
            code = self._process.wait(CLOSE_SEC)
        except subprocess.TimeoutExpired:
            return "its pipe is closed"
        return f"signal {-code}" if code < 0 else f"exit code {code}"
