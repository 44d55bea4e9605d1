"""Save and restore checkpoints: asynchronous, atomic, and verified on restore.

    <directory>/<step>/state          the arrays, in orbax's format
    <directory>/<step>/record         JSON: meta, eval_loss, and for each array its
                                      dtype, shape and checksum; a sha256 of it all
    <directory>/<step>.corrupt[-n]    a damaged checkpoint that restore has renamed;
                                      we never delete it

This module handles three weaknesses of orbax: it restores flipped bits without an
error, it takes an empty directory for a checkpoint, and it raises the error of a failed
save only at the next save.

Several processes save and restore together, on one file system. Process 0 decides and
renames; each process reads and writes the shards of its devices.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from moejax import config
from train.checkpoint.checksum import checksums, describe_arrays, require_same_arrays
from train.checkpoint.orbax_quirks import quiet_orbax, remove_unfinished, shorten
from train.checkpoint.record import (
    DamagedCheckpointError,
    list_steps,
    make_record,
    read_record,
    read_record_on_all,
)
from train.launch.processes import any_process, are_several, from_first_process
from train.launch.program import say_loudly


class CheckpointError(RuntimeError):
    """Too many saves in a row failed, so the run should stop."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was restored."""

    step: int
    state: object
    meta: dict


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

        First waits for the previous save. If either save fails, a loud line says so;
        CheckpointError is raised only after cfg.max_failed_saves failures in a row.
        With several processes, it is raised at the first failure, because the other
        processes may wait inside orbax for the one that failed. Saving again the step
        that was saved or restored last does nothing. Raises ValueError if the directory
        has another checkpoint of this step.
        """
        self.wait()
        if step == self._current:
            return
        from_first_process(lambda: self._make_room_for(step))
        record = make_record(step, describe_arrays(state), meta, eval_loss)
        self._eval_loss[step] = record["eval_loss"]
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
        )
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            self._report_failure(step, error)
        else:
            self._pending = step

    def wait(self) -> bool:
        """Wait until no save is in flight; return whether the last one succeeded."""
        step, self._pending = self._pending, None
        if step is not None:
            try:
                self._manager.wait_until_finished()
                if not (self._directory / str(step)).exists():
                    raise FileNotFoundError("the writer ended without a checkpoint")
            except Exception as error:
                self._report_failure(step, error)
            else:
                self._num_failed = 0
                self._current = step
        return self._num_failed == 0

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, or None if there is none."""
        steps = from_first_process(lambda: list_steps(self._directory))
        return steps[0] if steps else None

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
        """Restore the newest undamaged checkpoint, or return None if there is none.

        Damaged checkpoints that are newer are renamed. `abstract_state` holds
        ShapeDtypeStructs with the shardings to restore to, on any mesh. `check(meta)`
        may raise ValueError. ValueError is also raised when the arrays have other
        names, dtypes or shapes, because the checkpoint of another model is not damaged.
        `without(meta)` names fields of the state that are not read, whether the
        checkpoint has them or not; they are None in the result.
        """
        self.wait()
        steps = from_first_process(lambda: list_steps(self._directory))
        for step in steps:
            record, damage = read_record_on_all(self._directory, step)
            state = None
            if record is not None:
                if check is not None:
                    check(record["meta"])
                fields = () if without is None else without(record["meta"])
                record, wanted = _drop_fields(record, abstract_state, fields)
                require_same_arrays(record["arrays"], wanted)
                state, damage = read_arrays_on_all(self._directory, record, wanted)
            if state is not None:
                self._current = step
                return Restored(step, state, record["meta"])
            self._set_aside(step, damage)
        if steps:
            self._say(
                f"NO GOOD CHECKPOINT: all {len(steps)} in {self._directory} are damaged"
            )
        return None

    def _open(self) -> None:
        """Remove unfinished saves, and open a manager of the remaining checkpoints."""
        losses = from_first_process(self._clean)
        self._eval_loss: dict[int, float | None] = dict(losses)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Retention(self._cfg, self._eval_loss),
            save_root_metadata=False,
            lightweight_initialize=True,
        )
        self._manager = ocp.CheckpointManager(
            self._directory, options=options, item_names=("state", "record")
        )

    def _clean(self) -> list[tuple[int, float | None]]:
        """Remove unfinished saves; return step and loss of each undamaged record."""
        remove_unfinished(self._directory)
        losses = []
        for step in list_steps(self._directory):
            # Damage is reported by restore().
            with contextlib.suppress(DamagedCheckpointError):
                losses.append((step, read_record(self._directory, step)["eval_loss"]))
        return losses

    def _reopen(self) -> None:
        # A save can fail twice, in its arrays and in its metadata. wait_until_finished
        # raises the first error, which we have reported; close raises the other.
        with contextlib.suppress(Exception):
            self._manager.close()
        self._open()

    def _report_failure(self, step: int, error: Exception) -> None:
        """Report a failed save and remove its files; raise after too many failures."""
        reason = shorten(error)
        if are_several():
            good = max((s for s in self._eval_loss if s != step), default="none")
            raise CheckpointError(
                f"SAVE FAILED: checkpoint {step} in {self._directory}: {reason}; the "
                f"last good one is {good}: free disk space, and start the run again"
            ) from error
        # After an error, a manager forgets which steps it still has to delete.
        self._reopen()
        if step in self._eval_loss:
            self._num_failed, self._current = 0, step
            self._say(
                f"checkpoint {step} is saved, but older ones were not deleted: {reason}"
            )
            return
        self._num_failed += 1
        limit = self._cfg.max_failed_saves
        last = f"the last good one is {max(self._eval_loss, default='none')}"
        what = f"SAVE FAILED, {self._num_failed} of {limit} in a row: checkpoint {step}"
        if self._num_failed >= limit:
            raise CheckpointError(
                f"{what} in {self._directory}: {reason}; {last}: free disk space, or "
                "raise Checkpoint.max_failed_saves"
            ) from error
        self._say(f"{what}: {reason}; {last}; training continues")

    def _set_aside(self, step: int, damage: str) -> None:
        """Rename a damaged checkpoint, so that training can save its step again."""

        def rename() -> str:
            new = self._directory / f"{step}.corrupt"
            count = 1
            while new.exists():
                count += 1
                new = self._directory / f"{step}.corrupt-{count}"
            (self._directory / str(step)).rename(new)
            return str(new)

        new = from_first_process(rename)
        self._say(f"CORRUPT CHECKPOINT {step} renamed to {new}: {damage}")
        self._reopen()


@dataclasses.dataclass(frozen=True)
class _Retention:
    """Policy that tells orbax which checkpoints to keep once a newer one is complete.

    Orbax's own policies do not suffice: they count damaged steps as good ones, and
    after a damaged metrics file every later start fails.
    """

    cfg: config.Checkpoint
    eval_loss: dict[int, float | None]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = sorted(self.eval_loss)
        oldest = steps[-self.cfg.keep_last :][0]
        scored = [s for s in steps if self.eval_loss[s] is not None]
        best = sorted(scored, key=lambda s: self.eval_loss[s])[: self.cfg.keep_best]
        return [info.step >= oldest or info.step in best for info in checkpoints]


def _drop_fields(record: dict, state, fields: tuple[str, ...]) -> tuple[dict, object]:
    """Return a checkpoint's record and a state, both without these fields."""
    if not fields:
        return record, state
    arrays = record["arrays"].items()
    arrays = {name: array for name, array in arrays if name.split("/")[0] not in fields}
    return record | {"arrays": arrays}, state.replace(**dict.fromkeys(fields))


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
