"""Records of checkpoints: step, loss, meta, and a checksum for each array.

    <directory>/<step>/record         JSON, with a sha256 of all the rest

Records are read without jax, and nothing on the disk is changed. checkpoints.py reads
and writes the arrays beside them.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from train.checkpoint.orbax_quirks import shorten
from train.checkpoint.retention import Saved
from train.launch.processes import from_first_process


class DamagedCheckpointError(Exception):
    """A checkpoint differs from what was saved; the message says how."""


def make_record(
    saved: Saved, arrays: dict[str, dict], meta: dict[str, Any]
) -> dict[str, Any]:
    """Return the record of a checkpoint that is about to be written.

    `arrays` is the result of describe_arrays.
    """
    record = dataclasses.asdict(saved) | {"meta": meta, "arrays": arrays}
    return {**record, "sha256": record_sha256(record)}


def saved_part(record: dict[str, Any]) -> Saved:
    """Return the part of a record that decides how long its checkpoint is kept."""
    names = [field.name for field in dataclasses.fields(Saved)]
    return Saved(**{name: record[name] for name in names if name in record})


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
        if wrong := _wrong_fields(record):
            raise DamagedCheckpointError(
                f"its record has other values than a save writes: {', '.join(wrong)}"
            )
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedCheckpointError(f"its record: {shorten(error)}") from error
    return record


def _wrong_fields(record: dict) -> list[str]:
    """Return the fields of a record that do not have the types that make_record
    writes."""
    loss, arrays = record.get("eval_loss", "missing"), record.get("arrays")
    meta, skipped = record.get("meta"), record.get("num_skipped", 0)
    rate = record.get("bytes_per_sec")
    is_right = {
        "step": type(record.get("step")) is int,
        "eval_loss": loss is None or type(loss) in (int, float),
        "num_skipped": type(skipped) is int,
        "bytes_per_sec": rate is None or type(rate) in (int, float),
        "meta": isinstance(meta, dict),
        "arrays": isinstance(arrays, dict) and all(map(_is_array, arrays.values())),
    }
    return [name for name, is_so in is_right.items() if not is_so]


def _is_array(described) -> bool:
    """Return whether a value describes an array as describe_arrays does."""
    return (
        isinstance(described, dict)
        and isinstance(described.get("dtype"), str)
        and isinstance(described.get("shape"), list)
        and all(type(size) is int for size in described["shape"])
        and type(described.get("checksum")) is int
    )


def newest_meta(directory: pathlib.Path) -> dict | None:
    """Return the meta of the newest checkpoint with an undamaged record, or None.

    Arrays are not read.
    """
    for step in list_steps(directory) if directory.is_dir() else []:
        try:
            return read_record(directory, step)["meta"]
        except DamagedCheckpointError:
            continue
    return None


def read_record_on_all(directory: pathlib.Path, step: int) -> tuple[dict | None, str]:
    """Return the record that process 0 reads, or None and what is wrong with it."""

    def read() -> tuple[dict | None, str]:
        try:
            return read_record(directory, step), ""
        except DamagedCheckpointError as damage:
            return None, str(damage)

    return from_first_process(read)


def record_sha256(record: dict) -> str:
    """Return the sha256 of a record without its field "sha256".

    The record is first converted to JSON and back.
    """
    rest = {key: value for key, value in record.items() if key != "sha256"}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
