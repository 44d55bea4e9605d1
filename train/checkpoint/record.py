"""The directory of a run's checkpoints, read without jax: records, and which are kept.

    <directory>/<step>/record      JSON, with a sha256 of all the rest
    <directory>/<step>.corrupt     damaged: renamed by a restore, never deleted
    <directory>/<step>.later       newer than the one that the user goes back to

checkpoints.py reads and writes the arrays beside the records.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from moejax.config import Checkpoint
from train.launch.processes import from_first_process

SUMMARY = "summary.json"


class DamagedCheckpointError(Exception):
    """A checkpoint differs from what was saved; the message says how."""


def make_record(
    step: int,
    arrays: dict[str, dict],
    meta: dict[str, Any],
    eval_loss: float | None = None,
    num_skipped: int = 0,
) -> dict[str, Any]:
    """Return the record of a checkpoint that is about to be written.

    `arrays` is the result of describe_arrays. `num_skipped` is the number of updates in
    a row, up to this step, that were not finite and so were skipped.
    """
    record = {"step": step, "eval_loss": eval_loss, "num_skipped": num_skipped}
    record |= {"meta": meta, "arrays": arrays}
    return {**record, "sha256": record_sha256(record)}


def record_sha256(record: dict) -> str:
    """Return the sha256 of a record without its field "sha256".

    The record is first converted to JSON and back.
    """
    rest = {key: value for key, value in record.items() if key != "sha256"}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def list_steps(directory: pathlib.Path) -> list[int]:
    """Return the steps of all checkpoints in a directory, newest first, good or not."""
    names = {entry.name for entry in directory.iterdir()}
    steps = {int(name) for name in names if name.isdecimal()}
    return sorted((s for s in steps if str(s) in names), reverse=True)


def has_checkpoint(run_dir: pathlib.Path) -> bool:
    """Return whether a run directory has a checkpoint, good or not."""
    directory = run_dir / "checkpoints"
    return directory.is_dir() and bool(list_steps(directory))


def read_record(directory: pathlib.Path, step: int) -> dict:
    """Return the record of a step, or raise DamagedCheckpointError."""
    try:
        text = (directory / str(step) / "record" / "metadata").read_bytes()
        record = json.loads(text)
        if record["sha256"] != record_sha256(record):
            raise DamagedCheckpointError("its record does not have the record's sha256")
        if record["step"] != step:
            raise DamagedCheckpointError(
                f"it is the checkpoint of step {record['step']}"
            )
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedCheckpointError(f"its record: {shorten(error)}") from error
    return record


def read_record_on_all(directory: pathlib.Path, step: int) -> tuple[dict | None, str]:
    """Return the record that process 0 reads, or None and what is wrong with it."""

    def read() -> tuple[dict | None, str]:
        try:
            return read_record(directory, step), ""
        except DamagedCheckpointError as damage:
            return None, str(damage)

    return from_first_process(read)


def good_records(directory: pathlib.Path) -> list[dict]:
    """Return the undamaged records of a directory, newest first. Arrays are not
    read."""
    records = []
    for step in list_steps(directory) if directory.is_dir() else []:
        try:
            records.append(read_record(directory, step))
        except DamagedCheckpointError:
            continue
    return records


def newest_meta(directory: pathlib.Path) -> dict | None:
    """Return the meta of the newest checkpoint with an undamaged record, or None."""
    records = good_records(directory)
    return records[0]["meta"] if records else None


def steps_to_remove(
    steps: Iterable[int], records: Iterable[dict], cfg: Checkpoint
) -> list[int]:
    """Return the steps of a directory to remove when a checkpoint has been written.

    Kept are the newest (Checkpoint.keep_last) and what is newer than the oldest of
    them, the best (keep_best), and, while updates are skipped, the one to go back to.
    A checkpoint without a good record takes no place among those that are kept, and is
    removed when it is older than them.
    """
    records = sorted(records, key=lambda record: record["step"])
    scored = [record for record in records if record["eval_loss"] is not None]
    best = sorted(scored, key=lambda record: record["eval_loss"])[: cfg.keep_best]
    kept, newest = {record["step"] for record in best}, records[-1]
    if newest["num_skipped"]:
        kept.add(step_before(records, newest["step"] - newest["num_skipped"]))
    oldest = records[-cfg.keep_last :][0]["step"]
    return [step for step in steps if step < oldest and step not in kept]


def step_before(records: Iterable[dict], updated_step: int) -> int | None:
    """Return the newest checkpoint to go back to when all updates after `updated_step`
    were skipped, or None without one.

    At its step no update was being skipped. A checkpoint with the parameters of
    `updated_step` itself is the second choice: their gradient is not finite, but may be
    in another configuration.
    """
    healthy = [record["step"] for record in records if not record["num_skipped"]]
    healthy = [step for step in healthy if step <= updated_step]
    before = [step for step in healthy if step < updated_step]
    return max(before or healthy, default=None)


def go_back(
    run_dir: pathlib.Path, step: int, check: Callable[[dict], object]
) -> list[str]:
    """Make `step` the newest checkpoint of a run directory; return a line for each
    rename.

    Later checkpoints are renamed to `<step>.later[-n]`, and the summary of a finished
    run to `summary.json.later[-n]`. Metrics are cut back when the run goes on. Raises
    ValueError, before anything is renamed, if there is no such checkpoint, if its
    record is damaged, or from `check(meta)`.
    """
    folder = run_dir / "checkpoints"
    steps = list_steps(folder) if folder.is_dir() else []
    if step not in steps:
        names = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(
            f"--from_step={step}: {folder} has no checkpoint of this step; it has "
            f"{names}: name one of them"
        )
    try:
        record = read_record(folder, step)
    except DamagedCheckpointError as error:
        raise ValueError(
            f"--from_step={step}: checkpoint {folder / str(step)} is damaged: {error}: "
            "name another step"
        ) from error
    check(record["meta"])
    later = [folder / str(other) for other in sorted(steps) if other > step]
    if os.path.lexists(run_dir / SUMMARY):
        later.insert(0, run_dir / SUMMARY)
    return [f"{path} renamed to {set_aside(path, 'later')}" for path in later]


def set_aside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    """Rename `path` to `<path>.<suffix>`, or to the first of `<path>.<suffix>-2`, ..
    that is not taken, and return the new path."""
    new, count = path.with_name(f"{path.name}.{suffix}"), 1
    while os.path.lexists(new):
        count += 1
        new = path.with_name(f"{path.name}.{suffix}-{count}")
    return path.rename(new)


def num_written_bytes(folder: pathlib.Path) -> int:
    """Return the bytes of all files below `folder`, without following links.

    Files and folders that come and go meanwhile are no error.
    """
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def shorten(error: BaseException) -> str:
    """Return an error's type and its message in one line, cut to about 200 characters.

    The beginning of a message tells what was done, and its end why that failed, so the
    paths in the middle are cut out. The source lines that tensorstore appends in
    brackets are removed too.
    """
    text = " ".join(str(error).split(" [")[0].split())
    if len(text) > 200:
        text = f"{text[:80]} ... {text[-110:]}"
    return f"{type(error).__name__}: {text}"
