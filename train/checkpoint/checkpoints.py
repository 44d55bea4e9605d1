"""Save and restore checkpoints: asynchronous, atomic, and verified on restore.

    <directory>/<step>/state          the arrays, in orbax's format
    <directory>/<step>/record         JSON: meta, eval_loss, and for each array its
                                      dtype, shape and checksum; a sha256 of it all
    <directory>/<step>.corrupt[-n]    a damaged checkpoint that restore has renamed;
                                      we never delete it

This module handles three weaknesses of orbax: it restores flipped bits without an
error, it takes an empty directory for a checkpoint, and with several processes it waits
for one whose save has failed.

Several processes save and restore together, on one file system. Process 0 decides,
renames and removes; each process reads and writes the shards of its devices.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from moejax import config
from train.checkpoint import disk, retention, save_time
from train.checkpoint.aside import set_aside
from train.checkpoint.checksum import checksums, describe_arrays, require_same_arrays
from train.checkpoint.orbax_quirks import quiet_orbax, remove_unfinished, shorten
from train.checkpoint.record import (
    DamagedCheckpointError,
    list_steps,
    make_record,
    read_record,
    read_record_on_all,
    saved_part,
)
from train.checkpoint.retention import Saved
from train.checkpoint.writer import Writer
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


class CheckpointError(RunFailed):
    """Too many saves in a row failed, so the run should stop."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was restored."""

    step: int
    state: object
    meta: dict


@dataclasses.dataclass
class _Pending:
    """A save in flight."""

    saved: Saved
    num_bytes: int
    begun_sec: float
    duration_sec: float = math.inf
    """Time from its first byte on the host until the checkpoint is on the disk."""
    room: str = ""
    """Bytes needed and free at the moment of its failure."""
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
        self._cfg = cfg
        self._say = say
        self._remarks: set[str] = set()
        self._pending: _Pending | None = None
        self._current: int | None = None
        self._num_failed = 0
        self.last_failure = ""
        """Why the last save that failed did so, in one line."""
        from_first_process(lambda: self._directory.mkdir(parents=True, exist_ok=True))
        quiet_orbax()
        self._read_saved()
        rates = [self._saved[step].bytes_per_sec for step in sorted(self._saved)]
        self._bytes_per_sec = ([None] + [rate for rate in rates if rate])[-1]
        self._told_rate: float | None = None
        self._writer = Writer(self._directory)

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
        num_bytes = disk.num_bytes(state)
        try:
            lack = from_first_process(lambda: self._make_room_for(step, num_bytes))
        except OSError as error:
            lack = shorten(error)
        if lack:
            self._report_failure(step, lack)
            return
        if eval_loss is not None and not math.isfinite(eval_loss):
            eval_loss = None
        saved = Saved(step, eval_loss, num_skipped, self._bytes_per_sec)
        record = make_record(saved, describe_arrays(state), meta)
        pending = _Pending(saved, num_bytes, begun_sec=time.monotonic())
        try:
            self._writer.start(
                step,
                state,
                record,
                finish=lambda: self._finish(pending),
                fail=lambda error: self._note_failure(pending, error),
            )
        except Exception as error:
            self._note_failure(pending, error)
            self._clean_up(pending, error)
        else:
            self._pending = pending

    def wait(self) -> bool:
        """Wait until no save is in flight; return whether the last one succeeded."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                self._writer.wait()
            except Exception as error:
                self._clean_up(pending, error)
            else:
                wait_for_all(f"saved {pending.saved.step}")
                self._accept(pending)
        return self._num_failed == 0

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._writer.close()

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
        return disk.num_written_bytes(self._directory)

    def step_before(self, updated_step: int) -> int | None:
        """Return the checkpoint to go back to when all updates after `updated_step`
        were skipped, or None without one. A save in flight does not count."""
        return retention.step_before(self._saved.values(), updated_step)

    def say_save_time(self, state) -> None:
        """Say how long a save takes, and what a stopped run needs, if checkpoints are
        large; try the speed of the disk if no save has shown it."""
        num_bytes, source = disk.num_bytes(state), "the last save"
        if num_bytes < save_time.LARGE_BYTES:
            return
        if self._bytes_per_sec is None:
            source = "one file written as a trial"
            self._bytes_per_sec = from_first_process(
                lambda: save_time.probe(self._directory)
            )
        if self._bytes_per_sec is not None:
            self._tell_rate(num_bytes, self._bytes_per_sec, "takes about", source)

    def _tell_rate(self, num_bytes: int, rate: float, verb: str, source: str) -> None:
        self._told_rate = rate
        self._say(save_time.describe(num_bytes, rate, verb, source))

    def _make_room_for(self, step: int, num_bytes: int) -> str:
        """Remove unfinished saves; return why there is no room for another, or ''."""
        if os.path.lexists(self._directory / str(step)):
            raise ValueError(
                f"{self._directory} has a checkpoint of step {step} that this run did "
                "not write: restore it first, or use another run directory"
            )
        remove_unfinished(self._directory)
        return disk.lack_of_room(self._directory, num_bytes)

    def _finish(self, pending: _Pending) -> None:
        """Bring a complete checkpoint to the disk, then remove older ones.

        Called in a thread. tensorstore has synced its files; orbax has synced neither
        the record nor the folders.
        """
        path = self._directory / str(pending.saved.step)
        if is_first():
            if not path.exists():
                raise FileNotFoundError("the writer ended without a checkpoint")
            sync_tree(path)
            steps = list_steps(self._directory)
            saved = [*self._saved.values(), pending.saved]
            saved = [x for x in saved if x.step in steps]  # a user may have moved some
            outdated = retention.steps_to_remove(steps, saved, self._cfg)
            pending.remarks = tuple(retention.remove(self._directory, outdated))
        pending.duration_sec = time.monotonic() - pending.begun_sec

    def _note_failure(self, pending: _Pending, error: BaseException) -> None:
        """Note the room on the disk before files are removed, in any thread. With
        several processes, end all of them at once."""
        pending.room = disk.describe_room(self._directory, pending.num_bytes)
        if not are_several():
            return
        step = pending.saved.step
        good = max((s for s in self._saved if s != step), default="none")
        line = (
            f"SAVE FAILED: checkpoint {step} in {self._directory}: {shorten(error)}; "
            f"{pending.room}; the last good one is {good}: free disk space, and start "
            "the run again"
        )
        failures.end_all(FAILED, line)

    def _accept(self, pending: _Pending) -> None:
        """Take a complete checkpoint as the last good one."""
        step, num_bytes = pending.saved.step, pending.num_bytes
        self._num_failed, self._current = 0, step
        self._saved[step] = pending.saved
        there = set(from_first_process(lambda: list_steps(self._directory)))
        self._saved = {s: saved for s, saved in self._saved.items() if s in there}
        for line in pending.remarks:
            if line not in self._remarks:
                self._say(line)
        self._remarks.update(pending.remarks)
        rate = num_bytes / pending.duration_sec
        if save_time.needs_saying(num_bytes, self._told_rate, rate):
            self._tell_rate(num_bytes, rate, "took", f"the save of step {step}")
        self._bytes_per_sec = rate

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
            self._set_aside(step, damage)
        if steps:
            self._say(
                f"NO GOOD CHECKPOINT: all {len(steps)} in {self._directory} are damaged"
            )
        return None

    def _read_saved(self) -> None:
        """Remove unfinished saves, and read the records of the remaining checkpoints.

        Damaged ones are left out, and reported by restore().
        """

        def read() -> list[dict]:
            remove_unfinished(self._directory)
            parts = []
            for step in list_steps(self._directory):
                with contextlib.suppress(DamagedCheckpointError):
                    part = saved_part(read_record(self._directory, step))
                    parts.append(dataclasses.asdict(part))
            return parts

        parts = [Saved(**part) for part in from_first_process(read)]
        self._saved = {part.step: part for part in parts}

    def _clean_up(self, pending: _Pending, error: Exception) -> None:
        """Remove the files of a save that failed after it had begun, and report it. The
        run has one process."""
        self._writer.reopen()
        self._read_saved()
        step, reason = pending.saved.step, shorten(error)
        if step in self._saved:
            self._num_failed, self._current = 0, step
            self._say(
                f"checkpoint {step} is written, but the disk does not confirm it: "
                f"{reason}; older ones stay"
            )
            return
        self._report_failure(step, f"{reason}; {pending.room}", error)

    def _report_failure(
        self, step: int, reason: str, error: Exception | None = None
    ) -> None:
        """Report a failed save; raise CheckpointError after too many in a row."""
        self._num_failed, self.last_failure = self._num_failed + 1, reason
        last = f"the last good one is {max(self._saved, default='none')}"
        number = f"{self._num_failed} of {MAX_FAILED_SAVES} in a row"
        what = f"SAVE FAILED, {number}: checkpoint {step}"
        if self._num_failed >= MAX_FAILED_SAVES:
            raise CheckpointError(
                f"{what} in {self._directory}: {reason}; {last}: free disk space"
            ) from error
        self._say(f"{what}: {reason}; {last}; training continues")

    def _set_aside(self, step: int, damage: str) -> None:
        """Rename a damaged checkpoint, so that training can save its step again."""
        path = self._directory / str(step)
        new = from_first_process(lambda: str(set_aside(path, "corrupt")))
        self._say(f"CORRUPT CHECKPOINT {step} renamed to {new}: {damage}")
        self._read_saved()


def read_arrays_on_all(directory: pathlib.Path, record: dict, abstract):
    """Read the arrays that `abstract` names to its devices, and verify their checksums.

    `record` describes exactly these arrays, which may be some of the checkpoint's.
    Returns the arrays and '', or None and a description of the damage. All processes
    return the same decision.
    """
    arrays, damage = None, ""
    try:
        arrays = _read_local_shards(directory / str(record["step"]) / "state", abstract)
    except DamagedCheckpointError as error:
        damage = str(error)
    if any_process(arrays is None):
        return None, damage or "another process could not read its shards"
    damage = _find_differences(record, arrays)
    return (None, damage) if damage else (arrays, "")


def _read_local_shards(folder: pathlib.Path, abstract):
    """Read the shards of this process's devices, or raise DamagedCheckpointError.

    Processes do not synchronize here, as they do at the end of orbax's own restore,
    where a process with a damaged shard would leave the others waiting.
    """
    assert folder.is_absolute(), folder
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
            return reader.restore(folder, args=args)
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise  # too large for these devices, which does not mean that it is damaged
    except Exception as error:
        raise DamagedCheckpointError(shorten(error)) from error


def _find_differences(record: dict, state) -> str:
    """Return how the state differs from the record's checksums, or '' if it agrees."""
    saved = {name: array["checksum"] for name, array in record["arrays"].items()}
    wrong = [name for name, s in checksums(state).items() if s != saved[name]]
    if not wrong:
        return ""
    return (
        f"{len(wrong)} of {len(saved)} arrays differ from their checksums, {wrong[0]} "
        "first"
    )
