"""Checkpoints that are whole or not there: asynchronous, atomic, verified on restore.

    <directory>/<step>/state          the arrays, in orbax's format
    <directory>/<step>/record         JSON: meta, eval_loss, and for each array its
                                      dtype, shape and checksum; a sha256 of it all
    <directory>/<step>.corrupt[-n]    set aside by restore, never deleted by us

Orbax restores a flipped bit without a word, takes an empty directory for a checkpoint,
and raises the error of a failed save in place of the next one; all three end here.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from moejax import config
from train.checksum import checksums, describe, require_same_arrays
from train.orbax_quirks import one_line, quiet_orbax, remove_unfinished
from train.run_dir import say_loudly


class CheckpointError(RuntimeError):
    """So many saves in a row failed that the run should stop."""


@dataclasses.dataclass(frozen=True)
class Restored:
    step: int
    state: object
    meta: dict


class _Damaged(Exception):
    """A checkpoint is not what was saved; the text says how."""


class Checkpointer:
    """Saves and restores one pytree of jax.Arrays; one process writes a directory."""

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
        self._directory.mkdir(parents=True, exist_ok=True)
        quiet_orbax()
        self._open()

    def save(
        self, step: int, state, meta: dict, eval_loss: float | None = None
    ) -> None:
        """Starts to write `state`, which the caller may donate as soon as this returns.

        Waits for the save before it. A failure of either is said loudly, and raised as
        CheckpointError only after cfg.max_failed_saves in a row. A second save of the
        step that was saved or restored last does nothing; of an older one: ValueError.
        """
        self.wait()
        if step == self._current:
            return
        if (self._directory / str(step)).exists():
            raise ValueError(
                f"{self._directory} has a checkpoint of step {step} that this run did "
                "not write: restore it first, or use another run directory"
            )
        remove_unfinished(self._directory)
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

    def restore(
        self, abstract_state, *, check: Callable[[dict], None] | None = None
    ) -> Restored | None:
        """The newest checkpoint that is whole, or None; damaged ones are set aside.

        `abstract_state` holds ShapeDtypeStructs with the shardings to restore to, of
        any mesh. `check(meta)` may raise ValueError; so do we when the arrays have
        other names, dtypes or shapes: the checkpoint of another model is not damaged.
        """
        self.wait()
        steps = self._steps()
        for step in steps:
            try:
                record = self._read_record(step)
                if check is not None:
                    check(record["meta"])
                require_same_arrays(record["arrays"], abstract_state)
                state = self._read_state(step, record, abstract_state)
            except _Damaged as damage:
                self._set_aside(step, damage)
            else:
                self._current = step
                return Restored(step, state, record["meta"])
        if steps:
            self._say(f"NO GOOD CHECKPOINT of {len(steps)} in {self._directory}")
        return None

    def newest_meta(self) -> dict | None:
        """Meta of the newest checkpoint whose record is whole; arrays are not read."""
        for step in self._steps():
            with contextlib.suppress(_Damaged):
                return self._read_record(step)["meta"]
        return None

    def _open(self) -> None:
        """Removes what unfinished saves left, and starts from what is on the disk."""
        remove_unfinished(self._directory)
        self._eval_loss: dict[int, float | None] = {}
        for step in self._steps():
            with contextlib.suppress(_Damaged):  # restore is who tells of damage
                self._eval_loss[step] = self._read_record(step)["eval_loss"]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Retention(self._cfg, self._eval_loss),
            save_root_metadata=False,
            lightweight_initialize=True,
        )
        self._manager = ocp.CheckpointManager(
            self._directory, options=options, item_names=("state", "record")
        )

    def _reopen(self) -> None:
        # A save can fail twice, in its arrays and in its metadata: wait_until_finished
        # raises one error, which was told, and close the other.
        with contextlib.suppress(Exception):
            self._manager.close()
        self._open()

    def _steps(self) -> list[int]:
        """Steps on the disk, newest first, good or not."""
        names = {entry.name for entry in self._directory.iterdir()}
        steps = {int(name) for name in names if name.isdecimal()}
        return sorted((s for s in steps if str(s) in names), reverse=True)

    def _report_failure(self, step: int, fault: Exception) -> None:
        """Says it, removes the remains, and raises when there were too many."""
        reason = one_line(fault)
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

    def _read_record(self, step: int) -> dict:
        try:
            text = (self._directory / str(step) / "record" / "metadata").read_bytes()
            record = json.loads(text)
            if record["sha256"] != _sha256(record):
                raise _Damaged("its record differs from the record's sha256")
            if record["step"] != step:
                raise _Damaged(f"it is the checkpoint of step {record['step']}")
        except (OSError, ValueError, TypeError, KeyError) as fault:
            raise _Damaged(f"its record: {one_line(fault)}") from fault
        return record

    def _read_state(self, step: int, record: dict, abstract_state):
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        try:
            state = self._manager.restore(step, args=items)["state"]
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # too large for these devices: no reason to set it aside
        except Exception as fault:
            raise _Damaged(one_line(fault)) from fault
        saved = {name: array["checksum"] for name, array in record["arrays"].items()}
        wrong = [name for name, s in checksums(state).items() if s != saved[name]]
        if wrong:
            raise _Damaged(
                f"{len(wrong)} of {len(saved)} arrays differ from their checksums, "
                f"{wrong[0]} first"
            )
        return state

    def _set_aside(self, step: int, damage: _Damaged) -> None:
        new = self._directory / f"{step}.corrupt"
        count = 1
        while new.exists():
            count += 1
            new = self._directory / f"{step}.corrupt-{count}"
        (self._directory / str(step)).rename(new)
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


def _new_record(step: int, state, meta: dict, eval_loss: float | None) -> dict:
    if eval_loss is not None and not math.isfinite(eval_loss):
        eval_loss = None
    record = {"step": step, "eval_loss": eval_loss, "meta": meta}
    record["arrays"] = describe(state)
    return {**record, "sha256": _sha256(record)}


def _sha256(record: dict) -> str:
    """Of all but itself, as it reads after a round trip through JSON."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
