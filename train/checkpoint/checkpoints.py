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
import math
import pathlib
from collections.abc import Callable

import orbax.checkpoint as ocp

from moejax import config
from train.checkpoint.checksum import describe, require_same_arrays
from train.checkpoint.files import (
    Damaged,
    arrays_for_all,
    read_record,
    record_for_all,
    record_sha256,
    steps_in,
)
from train.checkpoint.orbax_quirks import one_line, quiet_orbax, remove_unfinished
from train.launch.processes import are_several, of_first
from train.logs.run_dir import say_loudly


class CheckpointError(RuntimeError):
    """So many saves in a row failed that the run should stop."""


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
        of_first(lambda: self._directory.mkdir(parents=True, exist_ok=True))
        quiet_orbax()
        self._open()

    def save(
        self, step: int, state, meta: dict, eval_loss: float | None = None
    ) -> None:
        """Starts to write `state`, which the caller may donate as soon as this returns.

        Waits for the save before it. A failure of either is said loudly, and raised as
        CheckpointError only after cfg.max_failed_saves in a row; with several processes
        at once, for the others may wait inside orbax for the one that failed. A second
        save of the step that was saved or restored last does nothing; of an older one:
        ValueError.
        """
        self.wait()
        if step == self._current:
            return
        of_first(lambda: self._make_room_for(step))
        record = _new_record(step, state, meta, eval_loss)
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
        """Returns when no save is in flight: True if the last one is on the disk."""
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
        """The newest checkpoint that is whole, or None; damaged ones are set aside.

        `abstract_state` holds ShapeDtypeStructs with the shardings to restore to, of
        any mesh. `check(meta)` may raise ValueError; so do we when the arrays have
        other names, dtypes or shapes: the checkpoint of another model is not damaged.
        `without(meta)` names fields of the state to leave out, there or not: None.
        """
        self.wait()
        steps = of_first(lambda: steps_in(self._directory))
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
        """Removes what unfinished saves left, and starts from what is on the disk."""
        scored = of_first(self._clean)
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
        """Removes unfinished saves; steps with a whole record, and their losses."""
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
        """Says it, removes the remains, and raises when there were too many."""
        reason = one_line(fault)
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

        new = of_first(rename)
        self._say(f"CORRUPT CHECKPOINT {step} set aside as {new}: {damage}")
        self._reopen()


@dataclasses.dataclass(frozen=True)
class _Retention:
    """Orbax asks this what to keep once a newer checkpoint is complete.

    Ours, because orbax's own counts damaged steps as good ones, and reads metrics in a
    way that a damaged file makes every later start fail.
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
    """A checkpoint's record and a state, both without these fields."""
    if not fields:
        return record, state
    arrays = record["arrays"].items()
    arrays = {name: one for name, one in arrays if name.split("/")[0] not in fields}
    return record | {"arrays": arrays}, state.replace(**dict.fromkeys(fields))


def _new_record(step: int, state, meta: dict, eval_loss: float | None) -> dict:
    if eval_loss is not None and not math.isfinite(eval_loss):
        eval_loss = None
    record = {"step": step, "eval_loss": eval_loss, "meta": meta}
    record["arrays"] = describe(state)
    return {**record, "sha256": record_sha256(record)}
