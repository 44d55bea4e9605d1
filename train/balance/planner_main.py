"""The planner's process, which train/balance/planner_process.py starts beside process 0
of a run.

One thread receives events and answers requests for a snapshot at once. Another one
plans. The process ends when the loop's end of the pipe is closed, in whatever way. It
ignores SIGINT and SIGTERM, because the loop still needs it for its last save.

jax is not imported here: the process starts in a fraction of a second.
"""

import collections
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

import numpy as np

from moejax.balance import planning
from moejax.balance.planning import Event, Observed, Planner, Reply, Snapshot


class Server:
    """The planner with the events that it has yet to take, and the replies that the
    loop has yet to collect."""

    def __init__(
        self, task: planning.Task, snapshot: Snapshot, replies: Connection
    ) -> None:
        self._task, self._planner = task, snapshot.planner
        self._events = collections.deque(snapshot.events)
        self._uncollected = list(snapshot.replies)
        self._lock = threading.Lock()
        self._has_events = threading.Condition(self._lock)
        self._to_loop, self._sends = replies, threading.Lock()
        for reply in snapshot.replies:
            self._send_reply(reply)

    def put(self, event: Event) -> None:
        """Add an event, for the thread that plans."""
        with self._lock:
            self._events.append(event)
            self._has_events.notify()

    def collected(self, step: int) -> None:
        """Forget the replies up to this step, which the loop has."""
        with self._lock:
            self._uncollected = [x for x in self._uncollected if x.step > step]

    def snapshot(self) -> Snapshot:
        """Return the planner as it was before the event that it is taking now, with
        that event and those after it."""
        with self._lock:
            return Snapshot(
                self._planner, tuple(self._events), tuple(self._uncollected)
            )

    def work(self) -> NoReturn:
        """Take the events in their order, for ever. An error is sent to the loop."""
        while True:
            with self._lock:
                while not self._events:
                    self._has_events.wait()
                event, planner = self._events[0], self._planner
            try:
                planner, reply = planning.take(self._task, planner, event)
            except ValueError as fault:
                self._fail("ValueError", str(fault))
            except Exception:
                self._fail("RuntimeError", traceback.format_exc())
            self._keep(planner, reply)

    def _keep(self, planner: Planner, reply: Reply | None) -> None:
        """Let the planner after the first event take the place of both."""
        with self._lock:
            self._planner = planner
            self._events.popleft()
            self._uncollected += [] if reply is None else [reply]
        if reply is not None:
            self._send_reply(reply)

    def _send_reply(self, reply: Reply) -> None:
        self.send(("reply", reply))

    def _fail(self, kind: str, text: str) -> NoReturn:
        """Tell the loop of an error, and wait for the end of this process."""
        self.send(("fault", kind, text))
        while True:
            signal.pause()

    def send(self, message: tuple) -> None:
        """Send a message to the loop. The process ends if the loop is gone."""
        try:
            with self._sends:
                self._to_loop.send(message)
        except OSError:
            os._exit(0)


def main(descriptors: list[str]) -> NoReturn:
    """Plan for the loop at the other end of these pipes: from it, and to it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from_loop, to_loop = map(int, descriptors)
    messages = Connection(from_loop, writable=False)
    replies = Connection(to_loop, readable=False)
    try:
        task, snapshot = messages.recv()
        server = Server(task, snapshot, replies)
        threading.Thread(target=server.work, daemon=True).start()
        while True:
            _receive(server, messages)
    except (EOFError, OSError):
        os._exit(0)  # without a wait for the plan in the making


def _receive(server: Server, messages: Connection) -> None:
    """Receive a message of the loop, and do what it asks for."""
    match messages.recv():
        case ("observed", step, shape, *others):
            tokens_lwe = np.frombuffer(messages.recv_bytes(), np.int32)
            server.put(Observed(step, tokens_lwe.reshape(shape), *others))
        case ("event", event):
            server.put(event)
        case ("collected", step):
            server.collected(step)
        case ("snapshot",):
            server.send(("snapshot", server.snapshot()))


if __name__ == "__main__":
    main(sys.argv[1:])
