"""Run several processes as one: they start together, agree, and end together.

Every process runs the same program. Process 0 does what only one process may do, such
as to claim the run directory and to write metrics, and `from_first_process` tells the
others the result. A process that ends with bad input or a failure tells the others,
which end with it (failures.py). One that crashes ends at once, without waiting for the
others. The launcher ends those; without one their heartbeats and watchdogs do
(docs/processes.md).
"""

import dataclasses
import faulthandler
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from moejax.config import Config
from train.launch import cluster, coordinator, failures
from train.messages import one_line

STDERR = 2
"""File descriptor to which C and C++ code writes, and on which stacks are printed."""
HEARTBEAT_SEC = SHUTDOWN_SEC = 30
"""Silence after which a process counts as dead, and longest time that processes wait
for one another at the end. JAX's own limits are 100 and 300 s."""
DAY_SEC = 24 * 3600
"""Allowed silence where Processes.watchdog_sec = 0 lets a run stand still."""


def join(cfg: Config) -> None:
    """Make this process one of the run's processes, before any device is touched.

    JAX aborts the process (exit code 134) if the others do not come within
    Processes.init_sec. Raises ValueError where the launcher's variables do not say
    which process this is, or certificates cannot be used.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    process = cluster.detect(os.environ)
    if process is None:
        return
    import jax

    limits, where = cfg.processes, "where their launcher says"
    if process:
        where = f"at {process['coordinator_address']}"
    print(
        f"meeting the other processes {where}, for Processes.init_sec="
        f"{limits.init_sec} at most",
        flush=True,
    )
    start_sec = time.monotonic()
    try:
        gpus = cluster.visible_gpus(os.environ)
        jax.distributed.initialize(
            **process,
            initialization_timeout=limits.init_sec,
            heartbeat_timeout_seconds=HEARTBEAT_SEC if limits.watchdog_sec else DAY_SEC,
            shutdown_timeout_seconds=SHUTDOWN_SEC,
        )
    except (ValueError, RuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "mTLS" not in str(error):
            raise  # a taken port, or the like: another start may help
        why = one_line(error).rstrip(".")
        raise ValueError(
            f"this process cannot join its run: {why}: correct that, or set "
            f"{cluster.COORDINATOR}, {cluster.NUM_PROCESSES} and "
            f"{cluster.PROCESS_ID}; {cluster.NUM_PROCESSES}=1 is a run of one process"
        ) from error
    jax.config.update("jax_cuda_visible_devices", gpus)  # jax would take one at most
    failures.watch()
    index, count = coordinator.own_index(), coordinator.count()
    waited_sec = time.monotonic() - start_sec
    print(f"process {index} has met all {count}, in {waited_sec:.1f} s", flush=True)


def is_first() -> bool:
    """Return whether this is process 0, which logs and writes for all."""
    return coordinator.own_index() == 0


def are_several() -> bool:
    """Return whether the run has more than one process."""
    return coordinator.count() > 1


_num_results = itertools.count()


def from_first_process(make: Callable[[], Any]) -> Any:
    """Call `make` on process 0, and return its result on all processes.

    The result is a value that JSON can express. A ValueError or OSError of `make` is
    raised on all processes.
    """
    if not are_several():
        return make()

    def reply() -> str:
        try:
            return json.dumps({"value": make()})
        except (ValueError, OSError) as fault:
            kind = "OSError" if isinstance(fault, OSError) else "ValueError"
            return json.dumps({"fault": str(fault), "kind": kind})

    result = json.loads(published(f"result/{next(_num_results)}", reply))
    if "value" in result:
        return result["value"]
    raise {"OSError": OSError, "ValueError": ValueError}[result["kind"]](
        result["fault"]
    )


def any_process(claim: bool) -> bool:
    """Return whether `claim` is true on any process."""
    if not are_several():
        return claim
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.int32(claim)).any())


def published(name: str, make: Callable[[], str]) -> str:
    """Call `make` on process 0, and return its text on all processes.

    `name` is used once in a run, and several threads may publish.
    """
    if not are_several():
        return make()
    if is_first():
        coordinator.put(name, make())
    return coordinator.wait_for(name)


def withdraw(name: str) -> None:
    """Delete a published text from the coordinator. Every process has read it."""
    if are_several() and is_first():
        coordinator.delete(name)


def wait_for_all(name: str) -> None:
    """Return when every process has called this function, with a name of its own.

    No device takes part: gloo waits for a process for 30 s at most, and NCCL not much
    longer.
    """
    if are_several():
        coordinator.meet(name, coordinator.WEEK_MSEC / 1000)


class Stop:
    """Request of a user or a scheduler that the run stop, the same on all processes.

    A single process handles its own signals. Several processes ask JAX, whose handler
    of SIGTERM makes them agree on a step that none of them has reached yet.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._num_asked = 0
        if are_several():
            signal.signal(
                signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM)
            )
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def is_set(self) -> bool:
        """Return whether the run is to stop. All processes ask once after each step."""
        self._num_asked += 1
        if self.signal is None and are_several():
            from jax.experimental import multihost_utils

            # JAX counts from 0 in each process, so this counts questions, not steps:
            # a process with a signal before its first question stops at question 1.
            if multihost_utils.reached_preemption_sync_point(self._num_asked):
                self.signal = int(signal.SIGTERM)
        return self.signal is not None

    def _set(self, number, _frame) -> None:
        """Note a signal; a second Ctrl-C interrupts at once."""
        if self.signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


@dataclasses.dataclass
class _Work:
    """Work that a watchdog times."""

    what: str
    count: Callable[[], int] | None
    """Number that changes as long as the work goes on; None: only its end counts."""
    last_count: int | None = None
    since_sec: float = dataclasses.field(default_factory=time.monotonic)
    """Value of time.monotonic() when the work began, or its number was last seen to
    change."""
    is_said: bool = False


class Watchdog:
    """A timer that ends this process, and prints the stack of every thread, when a
    step, an evaluation or a save takes longer than `limit_sec`. 0 never ends it.

    Work that can count its progress, such as the bytes of a save, may go on for as long
    as its number changes within the limit. The timer is faulthandler's, a C thread, so
    it works while all of Python is stuck in a collective that another process never
    joins, or in a file system that does not answer. At half the limit a line says what
    takes so long. `say` is called from a thread of the watchdog for that.
    """

    def __init__(
        self, limit_sec: int, say: Callable[[str], None], log: str | None = None
    ) -> None:
        """`log` names the file that stacks go to, if they do not go to the terminal."""
        self._limit_sec, self._say = limit_sec, say
        self._where = f" to {log}" if log else ""
        self._work: _Work | None = None
        self._timer = threading.Lock()
        """Held while the timer and `_work` change, so that they belong together."""
        self._closed = threading.Event()
        if limit_sec:
            threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_) -> None:
        self.rest()
        self._closed.set()

    def at(self, what: str, count: Callable[[], int] | None = None) -> None:
        """Start the timer for `what`, which is to end within the limit, or to change
        the number that `count()` returns. That is called in another thread."""
        with self._timer:
            self._work = _Work(what, count)
            self._start_timer()

    def rest(self) -> None:
        """Stop the timer until the next call of `at`."""
        with self._timer:
            self._work = None
            faulthandler.cancel_dump_traceback_later()

    def _start_timer(self) -> None:
        if self._limit_sec:
            faulthandler.dump_traceback_later(self._limit_sec, exit=True, file=STDERR)

    def _watch(self) -> None:
        """Look at the work eight times within the limit, until the watchdog is
        closed."""
        while not self._closed.wait(self._limit_sec / 8):
            work = self._work
            if work is None:
                continue
            count = work.count() if work.count else None
            with self._timer:
                if self._work is work and count != work.last_count:
                    self._work = _Work(work.what, work.count, last_count=count)
                    self._start_timer()
                    continue
            taken_sec = time.monotonic() - work.since_sec
            if taken_sec > self._limit_sec / 2 and not work.is_said:
                work.is_said = True
                self._say(
                    f"WATCHDOG {work.what} takes {taken_sec:.0f} s already; at "
                    f"{self._limit_sec} s (Processes.watchdog_sec) this process ends "
                    f"and writes the stacks of its threads{self._where}"
                )
