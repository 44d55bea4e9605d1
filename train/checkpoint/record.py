"""The record in a checkpoint: step, loss, meta, and a checksum for each array.

    <directory>/<step>/record         JSON, with a sha256 of all the rest

Records are read without jax, and nothing on the disk is changed. The arrays beside them
are for checkpoints.py.
"""

import hashlib
import json
import math
import pathlib
from typing import Any

from train.checkpoint.orbax_quirks import shorten
from train.launch.processes import from_first_process


class Damaged(Exception):
    """A checkpoint is not what was saved; the text says how."""


def new_record(
    step: int, arrays: dict[str, dict], meta: dict[str, Any], eval_loss: float | None
) -> dict[str, Any]:
    """Return the record of a checkpoint to be written; `arrays` is from `describe`. A
    loss that is not finite is None."""
    if eval_loss is not None and not math.isfinite(eval_loss):
        eval_loss = None
    record = {"step": step, "eval_loss": eval_loss, "meta": meta, "arrays": arrays}
    return {**record, "sha256": record_sha256(record)}


def steps_in(directory: pathlib.Path) -> list[int]:
    """Return the steps of the checkpoints there, newest first, good or not."""
    names = {entry.name for entry in directory.iterdir()}
    steps = {int(name) for name in names if name.isdecimal()}
    return sorted((s for s in steps if str(s) in names), reverse=True)


def read_record(directory: pathlib.Path, step: int) -> dict:
    """Return the record of checkpoint `step`; raise Damaged where it is not whole."""
    try:
        text = (directory / str(step) / "record" / "metadata").read_bytes()
        record = json.loads(text)
        if record["sha256"] != record_sha256(record):
            raise Damaged("its record differs from the record's sha256")
        if record["step"] != step:
            raise Damaged(f"it is the checkpoint of step {record['step']}")
    except (OSError, ValueError, TypeError, KeyError) as fault:
        raise Damaged(f"its record: {shorten(fault)}") from fault
    return record


def newest_meta(directory: pathlib.Path) -> dict | None:
    """Return the meta of the newest checkpoint whose record is whole, or None. Arrays
    are not read."""
    for step in steps_in(directory) if directory.is_dir() else []:
        try:
            return read_record(directory, step)["meta"]
        except Damaged:
            continue
    return None


def record_for_all(directory: pathlib.Path, step: int) -> tuple[dict | None, str]:
    """Return the record as process 0 reads it, or None and what is wrong with it."""

    def tried() -> tuple[dict | None, str]:
        try:
            return read_record(directory, step), ""
        except Damaged as damage:
            return None, str(damage)

    return from_first_process(tried)


def record_sha256(record: dict) -> str:
    """Return the sha256 of a record without its own field "sha256", as the record reads
    after a round trip through JSON."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
