"""Checkpoints that are whole or not there: asynchronous, atomic, verified on restore.

    <directory>/<step>/state          the arrays, in orbax's format
    <directory>/<step>/record         JSON: meta, eval_loss, and for each array its
                                      dtype, shape and checksum; a sha256 of it all
    <directory>/<step>.corrupt[-n]    set aside by restore, never deleted by us

Orbax restores a flipped bit without a word, takes an empty directory for a checkpoint,
and raises the error of a failed save in place of the next one; all three end here.

Several processes save and restore together, on one file system: process 0 decides and
renames, each reads and writes the shards of its devices.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from moejax import config
from train.checkpoint.checksum import checksums, describe, require_same_arrays
from train.checkpoint.orbax_quirks import quiet_orbax, remove_unfinished, shorten
from train.checkpoint.record import (
    Damaged,
    new_record,
    read_record,
    record_for_all,
    steps_in,
)
from train.launch.processes import any_process, are_several, from_first_process
from train.launch.program import say_loudly


class CheckpointError(RuntimeError):
    """Too many saves in a row failed: the run should stop."""


@dataclasses.dataclass(frozen=True)
class Restored:
    step: int
    state: object
    meta: dict


class Checkpointer:
    """Saves and restores one pytree of jax.Arrays; one run writes a directory."""

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
        self._pending: int | None = None
        self._current: int | None = None
        self._num_failed = 0
        from_first_process(lambda: self._directory.mkdir(parents=True, exist_ok=True))
        quiet_orbax()
        self._open()

    def save(
        self, step: int, state, meta: dict, eval_loss: float | None = None
    ) -> None:
        """Start to write `state`, which the caller may donate as soon as this returns.

        Waits for the save before it. A failure of either is said loudly, and raised as
        CheckpointError only after cfg.max_failed_saves in a row; with several processes
        at once, for the others may wait inside orbax for the one that failed. A second
        save of the step that was saved or restored last does nothing; of an older one:
        ValueError.
        """
        self.wait()
        if step == self._current:
            return
        from_first_process(lambda: self._make_room_for(step))
        record = new_record(step, describe(state), meta, eval_loss)
        self._eval_loss[step] = record["eval_loss"]
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
        )
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as fault:
            self._report_failure(step, fault)
        else:
            self._pending = step

    def wait(self) -> bool:
        """Return when no save is in flight: True if the last one is on the disk."""
        step, self._pending = self._pending, None
        if step is not None:
            try:
                self._manager.wait_until_finished()
                if not (self._directory / str(step)).exists():
                    raise FileNotFoundError("the writer ended without a checkpoint")
            except Exception as fault:
                self._report_failure(step, fault)
            else:
                self._num_failed = 0
                self._current = step
        return self._num_failed == 0

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()

    def _make_room_for(self, step: int) -> None:
        if (self._directory / str(step)).exists():
            raise ValueError(
                f"{self._directory} has a checkpoint of step {step} that this run did "
                "not write: restore it first, or use another run directory"
            )
        remove_unfinished(self._directory)

    def restore(
        self,
        abstract_state,
        *,
        check: Callable[[dict], None] | None = None,
        without: Callable[[dict], tuple[str, ...]] | None = None,
    ) -> Restored | None:
        """Return the newest checkpoint that is whole, or None; set damaged ones aside.

        `abstract_state` holds ShapeDtypeStructs with the shardings to restore to, of
        any mesh. `check(meta)` may raise ValueError; so do we when the arrays have
        other names, dtypes or shapes: the checkpoint of another model is not damaged.
        `without(meta)` names fields of the state to leave out, there or not: None.
        """
        self.wait()
        steps = from_first_process(lambda: steps_in(self._directory))
        for step in steps:
            record, damage = record_for_all(self._directory, step)
            state = None
            if record is not None:
                if check is not None:
                    check(record["meta"])
                left_out = () if without is None else without(record["meta"])
                record, wanted = _left_out(record, abstract_state, left_out)
                require_same_arrays(record["arrays"], wanted)
                state, damage = arrays_for_all(self._directory, record, wanted)
            if state is not None:
                self._current = step
                return Restored(step, state, record["meta"])
            self._set_aside(step, damage)
        if steps:
            self._say(f"NO GOOD CHECKPOINT of {len(steps)} in {self._directory}")
        return None

    def _open(self) -> None:
        """Remove what unfinished saves left, and start from what is on the disk."""
        scored = from_first_process(self._clean)
        self._eval_loss: dict[int, float | None] = dict(scored)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Retention(self._cfg, self._eval_loss),
            save_root_metadata=False,
            lightweight_initialize=True,
        )
        self._manager = ocp.CheckpointManager(
            self._directory, options=options, item_names=("state", "record")
        )

    def _clean(self) -> list[tuple[int, float | None]]:
        """Remove unfinished saves; return the whole records' steps and losses."""
        remove_unfinished(self._directory)
        found = []
        for step in steps_in(self._directory):
            with contextlib.suppress(Damaged):  # restore is who tells of damage
                found.append((step, read_record(self._directory, step)["eval_loss"]))
        return found

    def _reopen(self) -> None:
        # A save can fail twice, in its arrays and in its metadata: wait_until_finished
        # raises one error, which was told, and close the other.
        with contextlib.suppress(Exception):
            self._manager.close()
        self._open()

    def _report_failure(self, step: int, fault: Exception) -> None:
        """Say that a save failed, remove its remains, and raise after too many."""
        reason = shorten(fault)
        if are_several():
            good = max((s for s in self._eval_loss if s != step), default="none")
            raise CheckpointError(
                f"SAVE FAILED: checkpoint {step} in {self._directory}: {reason}; the "
                f"last good one is {good}: make room, and start the run again"
            ) from fault
        # A manager that has seen an error forgets which steps it still had to delete.
        self._reopen()
        if step in self._eval_loss:
            self._num_failed, self._current = 0, step
            self._say(f"checkpoint {step} is saved, older ones not deleted: {reason}")
            return
        self._num_failed += 1
        limit = self._cfg.max_failed_saves
        last = f"the last good one is {max(self._eval_loss, default='none')}"
        what = f"SAVE FAILED, {self._num_failed} of {limit} in a row: checkpoint {step}"
        if self._num_failed >= limit:
            raise CheckpointError(
                f"{what} in {self._directory}: {reason}; {last}: make room, or raise "
                "Checkpoint.max_failed_saves"
            ) from fault
        self._say(f"{what}: {reason}; {last}; training goes on")

    def _set_aside(self, step: int, damage: str) -> None:
        def rename() -> str:
            new = self._directory / f"{step}.corrupt"
            count = 1
            while new.exists():
                count += 1
                new = self._directory / f"{step}.corrupt-{count}"
            (self._directory / str(step)).rename(new)
            return str(new)

        new = from_first_process(rename)
        self._say(f"CORRUPT CHECKPOINT {step} set aside as {new}: {damage}")
        self._reopen()


@dataclasses.dataclass(frozen=True)
class _Retention:
    """Tell orbax which checkpoints to keep once a newer one is complete.

    This class is ours, because orbax's own counts damaged steps as good ones, and reads
    metrics in a way that a damaged file makes every later start fail.
    """

    cfg: config.Checkpoint
    eval_loss: dict[int, float | None]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = sorted(self.eval_loss)
        oldest = steps[-self.cfg.keep_last :][0]
        scored = [s for s in steps if self.eval_loss[s] is not None]
        best = sorted(scored, key=lambda s: self.eval_loss[s])[: self.cfg.keep_best]
        return [info.step >= oldest or info.step in best for info in checkpoints]


def _left_out(record: dict, state, fields: tuple[str, ...]) -> tuple[dict, object]:
    """Return a checkpoint's record and a state, both without these fields."""
    if not fields:
        return record, state
    arrays = record["arrays"].items()
    arrays = {name: one for name, one in arrays if name.split("/")[0] not in fields}
    return record | {"arrays": arrays}, state.replace(**dict.fromkeys(fields))


def arrays_for_all(directory: pathlib.Path, record: dict, abstract):
    """Return the arrays that `abstract` names, all of the record's or a part, on its
    devices; or None and what is wrong with them, the same on all processes.

    `record` describes those arrays and no others.
    """
    arrays, damage = None, ""
    try:
        arrays = _read_own_part(directory / str(record["step"]) / "state", abstract)
    except Damaged as fault:
        damage = str(fault)
    if any_process(arrays is None):
        return None, damage or "another process could not read its part"
    damage = _differences(record, arrays)
    return (None, damage) if damage else (arrays, "")


def _read_own_part(folder: pathlib.Path, abstract):
    """Return the shards of this process's devices; raise Damaged.

    Processes do not meet here, as they do at the end of orbax's own restore: one whose
    part is damaged would leave the others waiting.
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
        raise  # too large for these devices: no reason to call it damaged
    except Exception as fault:
        raise Damaged(shorten(fault)) from fault


def _differences(record: dict, state) -> str:
    """Return how `state` differs from what `record` says was saved, or ''."""
    saved = {name: array["checksum"] for name, array in record["arrays"].items()}
    wrong = [name for name, s in checksums(state).items() if s != saved[name]]
    if not wrong:
        return ""
    return (
        f"{len(wrong)} of {len(saved)} arrays differ from their checksums, {wrong[0]} "
        "first"
    )
