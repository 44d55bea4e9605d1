"""Run several processes as one: they start together, agree, and end together.

Every process runs the same program. Process 0 does what only one process may do, such
as to claim the run directory and to write metrics, and `from_first_process` tells the
others the result. A process that ends with bad input or a failure tells the others,
which end with it (failures.py). One that crashes ends at once, without waiting for the
others. The launcher ends those; without one their heartbeats and watchdogs do
(docs/processes.md).
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from moejax.config import Config
from train.launch import coordinator, failures
from train.launch.cluster import ProcessInfo
from train.launch.network import bind_address, listen_with_gloo, split
from train.launch.tls import uses_tls

STDERR = 2
"""File descriptor to which C and C++ code writes, and on which stacks are printed."""


def join(cfg: Config, process: ProcessInfo | None) -> None:
    """Make this process one of the run's processes, before any device is touched.

    JAX aborts the process (exit code 134) if the others do not come within
    Processes.init_sec. Raises ValueError for certificates that cannot be used.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if process is None:
        return
    import jax

    limits = cfg.processes
    host, _ = split(process.coordinator)
    is_secure = uses_tls(os.environ, host if process.index == 0 else None)
    bind = bind_address(process.coordinator, os.environ)
    print(
        f"process {process.index} of {process.count} ({process.source}) meets the "
        f"others at {process.coordinator}, and waits "
        f"Processes.init_sec={limits.init_sec} at most",
        flush=True,
    )
    if process.index == 0:
        where = bind.replace("[::]:", "all interfaces, port ")
        how = "with mutual TLS" if is_secure else "without TLS (SECURITY.md)"
        print(f"the coordinator listens on {where}, {how}", flush=True)
    start_sec = time.monotonic()
    jax.distributed.initialize(
        coordinator_address=process.coordinator,
        num_processes=process.count,
        process_id=process.index,
        local_device_ids=process.local_device_ids,
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind,
        initialization_timeout=limits.init_sec,
        heartbeat_timeout_seconds=limits.heartbeat_sec,
        shutdown_timeout_seconds=limits.shutdown_sec,
        verify_secure_credentials=is_secure or None,
    )
    failures.watch(limits.heartbeat_sec)
    waited_sec = time.monotonic() - start_sec
    print(f"all {process.count} processes have met, in {waited_sec:.1f} s", flush=True)
    if address := listen_with_gloo(process, limits.init_sec):
        print(f"gloo, for collectives of CPUs, listens on {address}", flush=True)


def is_first() -> bool:
    """Return whether this is process 0, which logs and writes for all."""
    import jax

    return jax.process_index() == 0


def are_several() -> bool:
    """Return whether the run has more than one process."""
    import jax

    return jax.process_count() > 1


def from_first_process(make: Callable[[], Any]) -> Any:
    """Call `make` on process 0, and return its result on all processes.

    The result is a value that JSON can express. A ValueError or OSError of `make` is
    raised on all processes.
    """
    if not are_several():
        return make()
    reply = {}
    if is_first():
        try:
            reply = {"value": make()}
        except (ValueError, OSError) as fault:
            kind = "OSError" if isinstance(fault, OSError) else "ValueError"
            reply = {"fault": str(fault), "kind": kind}
    reply = json.loads(_broadcast(json.dumps(reply).encode()))
    if "fault" in reply:
        raise {"OSError": OSError, "ValueError": ValueError}[reply["kind"]](
            reply["fault"]
        )
    return reply["value"]


def any_process(claim: bool) -> bool:
    """Return whether `claim` is true on any process."""
    if not are_several():
        return claim
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.int32(claim)).any())


def published(name: str, make: Callable[[], str]) -> str:
    """Call `make` on process 0, and return its text on all processes.

    The text goes through the coordinator and not through devices, so steps go on
    meanwhile. `name` is used once in a run.
    """
    if not are_several():
        return make()
    if not is_first():
        return coordinator.wait_for(name)
    text = make()
    coordinator.put(name, text)
    return text


def withdraw(name: str) -> None:
    """Delete a published text from the coordinator. Every process has read it."""
    if are_several() and is_first():
        coordinator.delete(name)


def wait_for_all(name: str) -> None:
    """Return when every process has called this function."""
    if are_several():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def _broadcast(text: bytes) -> bytes:
    """Return the text of process 0 on all processes."""
    from jax.experimental import multihost_utils

    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(-(-size // 4096) * 4096, np.uint8)  # few shapes to compile
    if is_first():
        padded[:size] = np.frombuffer(text, np.uint8)
    return multihost_utils.broadcast_one_to_all(padded).tobytes()[:size]


class Stop:
    """Request of a user or a scheduler that the run stop, the same on all processes.

    A single process handles its own signals. Several processes ask JAX, whose handler
    of SIGTERM makes them agree on a step that none of them has reached yet.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._num_asked = 0
        self._are_several = are_several()
        if self._are_several:
            signal.signal(
                signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM)
            )
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    @contextlib.contextmanager
    def answered(self, say: Callable[[str], None]) -> Iterator[None]:
        """Call `say` with a line as soon as the first signal comes in the block.

        Python runs its handler of a signal between two of its own instructions, so not
        before XLA returns from a compilation. The number of the signal is in a pipe at
        once, and a thread reads it. Several processes say nothing before they stop.
        """
        if self._are_several:
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=_answer, args=(reader, say), daemon=True)
        thread.start()
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(writer)
            thread.join()
            os.close(reader)

    def is_set(self) -> bool:
        """Return whether the run is to stop. All processes ask once after each step."""
        self._num_asked += 1
        if self._are_several and self.signal is None:
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


def _answer(reader: int, say: Callable[[str], None]) -> None:
    """Call `say` for the first signal that stops a run whose number is in the pipe."""
    while number := os.read(reader, 1):
        if number[0] in (signal.SIGTERM, signal.SIGINT):
            say(
                f"signal {number[0]}: the run stops after the next step, with "
                "everything saved; a compilation ends first"
            )
            return


@dataclasses.dataclass
class _Watched:
    """Work that a watchdog times."""

    what: str
    count: Callable[[], int] | None
    """Number that changes as long as the work goes on; None: only its end counts."""
    last_count: int | None = None
    since_sec: float = dataclasses.field(default_factory=time.monotonic)
    """When it began, or when the number was last seen to change."""
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
        self._watched: _Watched | None = None
        self._timer = threading.Lock()
        """Held while the timer and `_watched` change, so that they belong together."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if limit_sec:
            self._thread.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_) -> None:
        self.rest()
        self._closed.set()

    def at(self, what: str, count: Callable[[], int] | None = None) -> None:
        """Start the timer for `what`, which is to end within the limit, or to change
        the number that `count()` returns. That is called in another thread."""
        with self._timer:
            self._watched = _Watched(what, count)
            self._start_timer()

    def rest(self) -> None:
        """Stop the timer until the next call of `at`."""
        with self._timer:
            self._watched = None
            faulthandler.cancel_dump_traceback_later()

    def _start_timer(self) -> None:
        if self._limit_sec:
            faulthandler.dump_traceback_later(self._limit_sec, exit=True, file=STDERR)

    def _watch(self) -> None:
        """Look at the work, now and then, until the watchdog is closed."""
        interval_sec, counted_sec = self._limit_sec / 8, time.monotonic()
        while not self._closed.wait(min(1.0, interval_sec)):
            watched = self._watched
            if watched is None:
                continue
            if watched.count and time.monotonic() - counted_sec >= interval_sec:
                self._follow(watched)
                counted_sec = time.monotonic()
            self._warn(watched)

    def _follow(self, watched: _Watched) -> None:
        """Start the timer again if the number of the work has changed."""
        count = watched.count()
        with self._timer:
            if self._watched is not watched or count == watched.last_count:
                return
            watched.last_count, watched.since_sec = count, time.monotonic()
            watched.is_said = False
            self._start_timer()

    def _warn(self, watched: _Watched) -> None:
        """Print one warning for work that takes longer than half the limit."""
        taken_sec = time.monotonic() - watched.since_sec
        if watched.is_said or taken_sec <= self._limit_sec / 2:
            return
        watched.is_said = True
        goes_on = "has not moved" if watched.count else "goes on"
        self._say(
            f"WATCHDOG {watched.what} {goes_on} for {taken_sec:.0f} s; at "
            f"{self._limit_sec} s (Processes.watchdog_sec) this process ends "
            f"and writes the stacks of its threads{self._where}"
        )
