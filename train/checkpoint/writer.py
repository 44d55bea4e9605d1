"""Write one checkpoint at a time with orbax, and learn at once when that fails.

    main thread     start(step, ..) -- trains on -------------------- wait()
    orbax           copies arrays to the host | writes files, meets the other processes
    a thread here                  waits for orbax, then `finish`; or `fail` at once

Orbax's CheckpointManager tells of a failed write only at its next call. With several
processes it first waits in a barrier for the other processes, which wait in another
barrier for the process that failed. This module uses the layer below, whose threads end
with the error.
"""

import contextlib
import pathlib
import threading
from collections.abc import Callable

import orbax.checkpoint as ocp

WEEK_SEC = 7 * 24 * 3600
"""Orbax's limit on a save. It is long, because the watchdog ends a save that has
stopped, and no other."""


class Writer:
    """A writer of checkpoints into one directory, one at a time."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._orbax = _new_orbax()

    def start(
        self,
        step: int,
        state,
        record: dict,
        finish: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Start to write the checkpoint of a step; raise what fails at once.

        No other save is in flight. `finish()` is called in another thread when the
        checkpoint is complete, on each process, and `fail(error)` when it, or `finish`,
        has failed on this one.
        """
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
        )
        self._orbax.save(self._directory / str(step), args=items)
        self._error = None
        self._thread = threading.Thread(
            target=self._watch, args=(finish, fail), name="a save in flight"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until no save is in flight, and raise the error of the last one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def reopen(self) -> None:
        """Forget a save that has failed. Its first error is raised by `wait` or
        `start`; a second one, of metadata, has nothing to add."""
        with contextlib.suppress(Exception):
            self.wait()
        with contextlib.suppress(Exception):
            self._orbax.close()
        self._orbax = _new_orbax()

    def close(self) -> None:
        self.wait()
        self._orbax.close()

    def _watch(
        self, finish: Callable[[], None], fail: Callable[[BaseException], None]
    ) -> None:
        try:
            self._orbax.wait_until_finished()
            finish()
        except BaseException as error:
            self._error = error
            fail(error)


def _new_orbax() -> ocp.AsyncCheckpointer:
    """Return orbax's writer of the items `state` and `record`."""
    limits = ocp.options.AsyncOptions(timeout_secs=WEEK_SEC)
    handler = ocp.CompositeCheckpointHandler(
        "state",
        "record",
        composite_options=ocp.CompositeOptions(async_options=limits),
    )
    return ocp.AsyncCheckpointer(handler, async_options=limits)
