"""The loop's side of the planner's process: start it, tell it of events, collect its
replies.

    observe     the counts of a step are copied to shared memory (ring.py), and a short
                message goes through a pipe
    collect     the reply for a step, which a thread has received meanwhile
    snapshot    the planner's state for a checkpoint, without a wait for a plan
"""

import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from moejax.balance.planning import Adopted, Refused, Task
from train.balance.ring import Ring

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE = "train.balance.planner_main"
CLOSE_SEC = 5.0
"""Longest wait for the end of a process whose pipe is closed; it takes milliseconds."""
POLL_SEC = 0.0005
"""Time from one look at a full ring to the next."""


class PlannerProcess:
    """A process that plans beside the loop. It ends with this one, however that ends.

    Every method raises OSError once the process has ended by itself, and the ValueError
    of a policy whose plan cannot run.
    """

    def __init__(self, task: Task, shape: tuple[int, ...], snapshot: str) -> None:
        """Start the process; return before it has begun. `shape` is that of the counts
        of a step, and `snapshot` the JSON of the state from which it goes on."""
        self._ring, self._num_observed = Ring(shape), 0
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        passed = theirs_in, theirs_out, self._ring.descriptor
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        )
        for descriptor in passed:
            os.close(descriptor)
        self._to_planner = Connection(ours_out, readable=False)
        self._replies: dict[int, str] = {}
        self._snapshot: str | None = None
        self._fault: Exception | None = None
        self._has_news = threading.Condition()
        first = task, shape, snapshot
        self._starts = threading.Thread(target=self._begin, args=(first,), daemon=True)
        self._starts.start()
        from_planner = Connection(ours_in, writable=False)
        threading.Thread(
            target=self._receive, args=(from_planner,), daemon=True
        ).start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def observe(
        self, step: int, tokens_lwe: np.ndarray, fullest_pair_l: np.ndarray
    ) -> None:
        """Tell the planner of the counts of a step."""
        number, self._num_observed = self._num_observed, self._num_observed + 1
        while self._ring.is_full(number):
            self._require()
            time.sleep(POLL_SEC)
        self._ring.write(number, tokens_lwe)
        self._send(("observed", number, step, np.asarray(fullest_pair_l)))

    def tell(self, event: Adopted | Refused) -> None:
        """Tell the planner what was done with the decision that was due."""
        self._send(("event", event))

    def collect(self, step: int) -> tuple[str, float]:
        """Return the JSON of the reply for an asked step, and the seconds in which it
        was waited for."""
        start_sec = time.monotonic()
        self._wait(lambda: step in self._replies)
        waited_sec = time.monotonic() - start_sec
        self._send(("collected", step))
        return self._replies.pop(step), waited_sec

    def snapshot(self) -> str:
        """Return the JSON of the planner's Snapshot after all that it was told of."""
        self._snapshot = None
        self._send(("snapshot",))
        self._wait(lambda: self._snapshot is not None)
        return self._snapshot

    def close(self) -> None:
        """End the process, whatever it does."""
        self._starts.join()
        self._to_planner.close()
        try:
            self._process.wait(CLOSE_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _begin(self, first: tuple) -> None:
        """Send the first message, which a pipe does not hold before the process reads
        it. An error shows at the next message."""
        try:
            self._to_planner.send(first)
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
                case ("reply", step, text):
                    self._replies[step] = text
                case ("snapshot", text):
                    self._snapshot = text
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

    def _send(self, message: tuple) -> None:
        """Send a message to the planner, after the first one."""
        self._starts.join()
        self._require()
        try:
            self._to_planner.send(message)
        except OSError as fault:
            self._fail(fault)
            self._require()

    def _require(self) -> None:
        """Raise the error of a planner that has failed or is gone."""
        if isinstance(self._fault, (OSError, EOFError)):
            try:
                code = self._process.wait(CLOSE_SEC)
            except subprocess.TimeoutExpired:
                code = None
            how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
            raise OSError(
                f"the planner's process {self.pid} has ended ({how}), and no decision "
                "can be made: run again to go on from the last checkpoint"
            )
        if self._fault is not None:
            raise self._fault
