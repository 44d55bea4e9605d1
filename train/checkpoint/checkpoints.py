"""Save and restore checkpoints: asynchronous, atomic, and verified on restore.

    <directory>/<step>/state          the arrays, in orbax's format
    <directory>/<step>/record         JSON, with a checksum for each array (record.py)
    <directory>/<step>.corrupt[-n]    a damaged checkpoint that a restore has renamed

    main thread     save(step, ..) -- trains on ------------------------------ wait()
    orbax           copies arrays to the host | writes files, meets other processes
    a thread here                             | waits for orbax, syncs, removes older
                                                checkpoints; or notes a failure at once

orbax restores flipped bits without an error, takes an empty directory for a checkpoint,
and tells of a failed save at its next call alone: hence the checksums, the record and
the thread. Several processes save and restore together, on one file system. Process 0
decides, renames and removes; each process reads and writes the shards of its devices.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from moejax import config
from train.checkpoint.checksum import checksums, describe_arrays, require_same_arrays
from train.checkpoint.record import (
    good_records,
    list_steps,
    make_record,
    num_written_bytes,
    read_record,
    read_record_on_all,
    set_aside,
    shorten,
    step_before,
    steps_to_remove,
)
from train.files import sync_tree
from train.launch import failures
from train.launch.processes import (
    any_process,
    are_several,
    from_first_process,
    is_first,
    wait_for_all,
)
from train.launch.program import FAILED, RunFailed, say_loudly

MAX_FAILED_SAVES = 3
"""Number of failed saves in a row after which the run stops."""
SLOW_SAVE_SEC = 30
"""A save that takes longer is told of, with the time that a stopped run needs."""
WEEK_SEC = 7 * 24 * 3600
"""Orbax's limit on a save. It is long, because the watchdog ends a save that has
stopped, and no other."""
UNFINISHED = ".orbax-checkpoint-tmp"
"""Orbax writes a step under its name with this suffix, and renames it when complete."""


class CheckpointError(RunFailed):
    """Too many saves in a row failed, so the run should stop."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was restored."""

    step: int
    state: object
    meta: dict


@dataclasses.dataclass
class _Save:
    """A save in flight."""

    step: int
    num_bytes: int
    begun_sec: float
    thread: threading.Thread | None = None
    duration_sec: float = 0.0
    error: BaseException | None = None
    reason: str = ""
    """The error in one line, with the bytes needed and free when it happened."""
    remarks: tuple[str, ...] = ()
    """Lines about old checkpoints that could not be removed."""


class Checkpointer:
    """Writer and reader of checkpoints of one pytree, in the directory of one run."""

    def __init__(
        self,
        directory: str | pathlib.Path,
        cfg: config.Checkpoint,
        *,
        say: Callable[[str], None] = say_loudly,
    ) -> None:
        self._directory = pathlib.Path(directory).absolute()
        self._cfg, self._say = cfg, say
        self._in_flight: _Save | None = None
        self._current: int | None = None
        """The step that was saved or restored last."""
        self._told_sec = 0.0
        self._num_failed = 0
        self.last_failure = ""
        """Why the last save that failed did so, in one line."""

        def prepare() -> None:
            self._directory.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._directory)

        from_first_process(prepare)
        quiet_orbax()
        self._orbax = _new_orbax()

    def save(
        self,
        step: int,
        state,
        meta: dict,
        eval_loss: float | None = None,
        num_skipped: int = 0,
    ) -> None:
        """Start to write `state`, which the caller may donate as soon as this returns.

        First waits for the previous save. If either save fails, or has no room, a loud
        line says so; CheckpointError is raised only after MAX_FAILED_SAVES failures
        in a row. With several processes, all of them end (FAILED) as soon as a save
        that has begun fails on one of them, because the others may wait inside orbax
        for it. Saving again the step that was saved or restored last does nothing.
        `num_skipped` is the number of updates in a row that were skipped. Raises
        ValueError if the directory has another checkpoint of this step.
        """
        self.wait()
        if step == self._current:
            return
        needed_bytes = num_bytes(state)
        try:
            lack = from_first_process(lambda: self._make_room_for(step, needed_bytes))
        except OSError as error:
            lack = shorten(error)
        if lack:
            self._count_failure(step, lack)
            return
        if eval_loss is not None and not math.isfinite(eval_loss):
            eval_loss = None
        record = make_record(step, describe_arrays(state), meta, eval_loss, num_skipped)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state), record=ocp.args.JsonSave(record)
        )
        self._in_flight = save = _Save(step, needed_bytes, time.monotonic())
        try:
            self._orbax.save(self._directory / str(step), args=items)
        except Exception as error:
            self._note_failure(save, error)
            self.wait()
            return
        save.thread = threading.Thread(
            target=self._finish, args=(save,), name="a save in flight"
        )
        save.thread.start()

    def wait(self) -> bool:
        """Wait until no save is in flight; return whether the last one succeeded."""
        save, self._in_flight = self._in_flight, None
        if save is None:
            return self._num_failed == 0
        if save.thread is not None:
            save.thread.join()
        if save.error is not None:
            with contextlib.suppress(Exception):  # it raises the noted error again
                self._orbax.close()
            self._orbax = _new_orbax()
            with contextlib.suppress(OSError):  # the next save tries it again
                remove_unfinished(self._directory)
            self._count_failure(save.step, save.reason, save.error)
            return False
        wait_for_all(f"saved {save.step}")
        self._num_failed, self._current = 0, save.step
        for line in save.remarks:
            self._say(line)
        if save.duration_sec > max(SLOW_SAVE_SEC, 2 * self._told_sec):
            self._told_sec = save.duration_sec
            stop = math.ceil(2 * save.duration_sec + 60)
            self._say(
                f"the save of step {save.step} took {save.duration_sec:.0f} s for "
                f"{save.num_bytes / 1e9:.3g} GB: a stopped run may wait for two saves, "
                f"so give it {stop} s (SLURM: --signal=TERM@{stop}; "
                f"tools/launch/local.py: --grace_sec={stop})"
            )
        return True

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind, *_) -> None:
        """Close, unless one of several processes fails: orbax would wait for the
        others, who know of no failure."""
        if not (are_several() and kind):
            self.close()

    def close(self) -> None:
        """Wait until no save is in flight, and end orbax's threads."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    def settle(self) -> None:
        """Wait until no save is in flight, for a run that ends for another reason: if
        the save has failed, that is said and not raised."""
        try:
            self.wait()
        except CheckpointError as error:
            self._say(str(error))

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, or None if there is none. A save in
        flight does not count."""
        steps = from_first_process(lambda: list_steps(self._directory))
        return steps[0] if steps else None

    def num_written_bytes(self) -> int:
        """Return the bytes of all checkpoints, the unfinished one included. The number
        changes as long as a save goes on."""
        return num_written_bytes(self._directory)

    def step_before(self, updated_step: int) -> int | None:
        """Return the checkpoint to go back to when all updates after `updated_step`
        were skipped, or None without one. A save in flight does not count."""
        return from_first_process(
            lambda: step_before(good_records(self._directory), updated_step)
        )

    def restore(
        self,
        abstract_state,
        *,
        check: Callable[[dict], None] | None = None,
    ) -> Restored | None:
        """Restore the newest undamaged checkpoint, or return None if there is none.

        Damaged checkpoints that are newer are renamed. `abstract_state` holds
        ShapeDtypeStructs with the shardings to restore to, on any mesh. `check(meta)`
        may raise ValueError. ValueError is also raised when the arrays have other
        names, dtypes or shapes, because the checkpoint of another model is not damaged.
        """
        self.wait()
        steps = from_first_process(lambda: list_steps(self._directory))
        for step in steps:
            record, damage = read_record_on_all(self._directory, step)
            state = None
            if record is not None:
                if check is not None:
                    check(record["meta"])
                require_same_arrays(record["arrays"], abstract_state)
                state, damage = read_arrays_on_all(
                    self._directory, record, abstract_state
                )
            if state is not None:
                self._current = step
                return Restored(step, state, record["meta"])
            path = self._directory / str(step)
            new = from_first_process(lambda path=path: str(set_aside(path, "corrupt")))
            self._say(f"CORRUPT CHECKPOINT {step} renamed to {new}: {damage}")
        if steps:
            self._say(
                f"NO GOOD CHECKPOINT: all {len(steps)} in {self._directory} are damaged"
            )
        return None

    def _make_room_for(self, step: int, needed_bytes: int) -> str:
        """Remove unfinished saves; return why there is no room for another, or ''."""
        if os.path.lexists(self._directory / str(step)):
            raise ValueError(
                f"{self._directory} has a checkpoint of step {step} that this run did "
                "not write: restore it first, or use another run directory"
            )
        remove_unfinished(self._directory)
        free_bytes = num_free_bytes(self._directory)
        if free_bytes is None or free_bytes >= needed_bytes:
            return ""
        return f"no room: {self._describe_room(needed_bytes)}"

    def _describe_room(self, needed_bytes: int) -> str:
        """Return how many bytes a checkpoint needs, and how many are free."""
        try:
            free_bytes = num_free_bytes(self._directory)
        except OSError:
            free_bytes = None
        free = "an unknown number" if free_bytes is None else f"{free_bytes:,}"
        return (
            f"it needs {needed_bytes:,} bytes, and {free} are free in {self._directory}"
        )

    def _finish(self, save: _Save) -> None:
        """Bring a complete checkpoint to the disk, then remove older ones; or note at
        once that it has failed. Called in a thread, on each process.

        tensorstore has synced its files; orbax has synced neither the record nor the
        folders.
        """
        try:
            self._orbax.wait_until_finished()
            if is_first():
                sync_tree(self._directory / str(save.step))
                read_record(self._directory, save.step)
                save.remarks = self._remove_outdated()
        except BaseException as error:
            self._note_failure(save, error)
        save.duration_sec = time.monotonic() - save.begun_sec

    def _remove_outdated(self) -> tuple[str, ...]:
        """Remove the checkpoints that need not be kept; return a line for each that
        cannot be removed. A link stays: its target belongs to somebody else."""
        lines = []
        records = good_records(self._directory)
        outdated = steps_to_remove(list_steps(self._directory), records, self._cfg)
        for path in (self._directory / str(step) for step in sorted(outdated)):
            if path.is_symlink() or not path.is_dir():
                continue
            try:
                shutil.rmtree(path)
            except OSError as error:
                lines.append(
                    f"old checkpoint {path} cannot be removed and stays: {error}"
                )
        return tuple(lines)

    def _note_failure(self, save: _Save, error: BaseException) -> None:
        """Note a failed save, and the room on the disk before its files are removed, in
        any thread. With several processes, end all of them at once."""
        save.error = error
        save.reason = f"{shorten(error)}; {self._describe_room(save.num_bytes)}"
        if are_several():
            line = (
                f"SAVE FAILED: checkpoint {save.step} in {self._directory}: "
                f"{save.reason}; {self._last_good(save.step)}: free disk space, and "
                "start the run again"
            )
            failures.end_all(FAILED, line)

    def _count_failure(
        self, step: int, reason: str, error: BaseException | None = None
    ) -> None:
        """Report a failed save; raise CheckpointError after too many in a row."""
        self._num_failed, self.last_failure = self._num_failed + 1, reason
        number = f"{self._num_failed} of {MAX_FAILED_SAVES} in a row"
        what, last = f"SAVE FAILED, {number}: checkpoint {step}", self._last_good(step)
        if self._num_failed >= MAX_FAILED_SAVES:
            raise CheckpointError(
                f"{what} in {self._directory}: {reason}; {last}: free disk space"
            ) from error
        self._say(f"{what}: {reason}; {last}; training continues")

    def _last_good(self, failed_step: int) -> str:
        """Say which checkpoint a run would go on from after a failed save."""
        try:
            steps = [record["step"] for record in good_records(self._directory)]
        except OSError:
            return "the last good one is unknown"
        last = max((step for step in steps if step != failed_step), default="none")
        return f"the last good one is {last}"


def read_arrays_on_all(directory: pathlib.Path, record: dict, abstract):
    """Read the arrays that `abstract` names to its devices, and verify their checksums.

    `record` describes exactly these arrays, which may be some of the checkpoint's.
    Returns the arrays and '', or None and a description of the damage. All processes
    return the same decision.
    """
    arrays, damage = None, ""
    # Processes do not synchronize while they read, as they do at the end of orbax's own
    # restore, where a process with a damaged shard would leave the others waiting.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={jax.process_index()}
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    args = ocp.args.PyTreeRestore(
        item=abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=True,
    )
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            arrays = reader.restore(
                directory / str(record["step"]) / "state", args=args
            )
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise  # too large for these devices, which does not mean that it is damaged
    except Exception as error:
        damage = shorten(error)
    if any_process(arrays is None):
        return None, damage or "another process could not read its shards"
    saved = {name: array["checksum"] for name, array in record["arrays"].items()}
    wrong = [name for name, s in checksums(arrays).items() if s != saved[name]]
    if wrong:
        return None, (
            f"{len(wrong)} of {len(saved)} arrays differ from their checksums, "
            f"{wrong[0]} first"
        )
    return arrays, ""


def num_bytes(state) -> int:
    """Return the bytes of all arrays of a state, on all processes together."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def num_free_bytes(folder: pathlib.Path) -> int | None:
    """Return the bytes that are free for users in the file system of `folder`, or None
    if it has no limit or does not say. Raises OSError."""
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize if there.f_blocks else None


def remove_unfinished(directory: pathlib.Path) -> None:
    """Remove the files of unfinished saves; call it while no save is in flight.

    After each removal it looks again, for two seconds at most: the other writers of a
    failed save end later, and create their files again.
    """
    for _ in range(40):
        remains = list(directory.glob(f"*{UNFINISHED}*"))
        if not remains:
            return
        for path in remains:
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.05)


def _new_orbax() -> ocp.AsyncCheckpointer:
    """Return orbax's writer of the items `state` and `record`.

    Of an array that several devices hold, one writes all. By default each would write a
    slice, which XLA cuts by a program of its own for each array and device: forty in a
    small run, and they wait while a relayout compiles.
    """
    limits = ocp.options.AsyncOptions(timeout_secs=WEEK_SEC)
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    handler = ocp.CompositeCheckpointHandler(
        "record",
        composite_options=ocp.CompositeOptions(async_options=limits),
        state=ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
    )
    return ocp.AsyncCheckpointer(handler, async_options=limits)


@functools.cache
def quiet_orbax() -> None:
    """Suppress the output of orbax about errors that it also raises.

    For a failed save that is pages of log and a traceback for each error. It also
    prints, through the interpreter's hook, a traceback for each task that ended with
    the event loop of a failed call. Output of other libraries is kept.
    """

    def is_not_of_orbax(record: logging.LogRecord) -> bool:
        return "/orbax/checkpoint/" not in record.pathname

    def names_no_orbax(record: logging.LogRecord) -> bool:
        # asyncio logs each task whose error nobody retrieved. The code that it ran or
        # the file that it wrote belongs to orbax.
        return "orbax" not in logging.Formatter().format(record)

    def hook(unraisable) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code is not None and "/orbax/checkpoint/" in code.co_filename
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            hook_before(unraisable)

    logging.getLogger("absl").addFilter(is_not_of_orbax)
    logging.getLogger("asyncio").addFilter(names_no_orbax)
    hook_before, sys.unraisablehook = sys.unraisablehook, hook
