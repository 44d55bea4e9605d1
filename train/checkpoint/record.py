"""Reading a checkpoint that is on the disk, changing nothing there.

Several processes read together, each the shards of its own devices, and agree on what
is whole. jax is imported when arrays are read.
"""

import hashlib
import json
import pathlib

from train.checkpoint.orbax_quirks import one_line
from train.launch.processes import any_of, of_first


class Damaged(Exception):
    """A checkpoint is not what was saved; the text says how."""


def steps_in(directory: pathlib.Path) -> list[int]:
    """Steps of the checkpoints there, newest first, good or not."""
    names = {entry.name for entry in directory.iterdir()}
    steps = {int(name) for name in names if name.isdecimal()}
    return sorted((s for s in steps if str(s) in names), reverse=True)


def read_record(directory: pathlib.Path, step: int) -> dict:
    """What checkpoint `step` says of itself; raises Damaged."""
    try:
        text = (directory / str(step) / "record" / "metadata").read_bytes()
        record = json.loads(text)
        if record["sha256"] != record_sha256(record):
            raise Damaged("its record differs from the record's sha256")
        if record["step"] != step:
            raise Damaged(f"it is the checkpoint of step {record['step']}")
    except (OSError, ValueError, TypeError, KeyError) as fault:
        raise Damaged(f"its record: {one_line(fault)}") from fault
    return record


def newest_meta(directory: pathlib.Path) -> dict | None:
    """Meta of the newest checkpoint whose record is whole; arrays are not read."""
    for step in steps_in(directory) if directory.is_dir() else []:
        try:
            return read_record(directory, step)["meta"]
        except Damaged:
            continue
    return None


def record_for_all(directory: pathlib.Path, step: int) -> tuple[dict | None, str]:
    """The record as process 0 reads it, or None and what is wrong with it."""

    def tried() -> tuple[dict | None, str]:
        try:
            return read_record(directory, step), ""
        except Damaged as damage:
            return None, str(damage)

    return of_first(tried)


def arrays_for_all(directory: pathlib.Path, record: dict, abstract):
    """The arrays that `abstract` names, all of the record's or a part, on its devices;
    or None and what is wrong with them, the same on all processes.

    `record` describes those arrays and no others.
    """
    arrays, damage = None, ""
    try:
        arrays = _read_own_part(directory / str(record["step"]) / "state", abstract)
    except Damaged as fault:
        damage = str(fault)
    if any_of(arrays is None):
        return None, damage or "another process could not read its part"
    damage = _differences(record, arrays)
    return (None, damage) if damage else (arrays, "")


def _read_own_part(folder: pathlib.Path, abstract):
    """Without a meeting of processes, as orbax has at the end of a restore: one whose
    part is damaged would leave the others in it. Raises Damaged."""
    import jax
    import orbax.checkpoint as ocp

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
        raise Damaged(one_line(fault)) from fault


def _differences(record: dict, state) -> str:
    """What in `state` is not what `record` says was saved; empty when all is right."""
    from train.checkpoint.checksum import checksums

    saved = {name: array["checksum"] for name, array in record["arrays"].items()}
    wrong = [name for name, s in checksums(state).items() if s != saved[name]]
    if not wrong:
        return ""
    return (
        f"{len(wrong)} of {len(saved)} arrays differ from their checksums, {wrong[0]} "
        "first"
    )


def record_sha256(record: dict) -> str:
    """Of all but itself, as it reads after a round trip through JSON."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
