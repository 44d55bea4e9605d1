"""Reading a checkpoint that is on the disk, changing nothing there.

Each process reads for itself, its own shards, and meets no other one: whoever reads in
several decides with them what to do about damage (train/checkpoint.py).
"""

import hashlib
import json
import pathlib

from train.orbax_quirks import one_line


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


def read_arrays(directory: pathlib.Path, step: int, abstract):
    """The arrays that `abstract` names, all or a part of them, on its devices.

    Raises Damaged.
    """
    import jax
    import orbax.checkpoint as ocp

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
            return reader.restore(directory / str(step) / "state", args=args)
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise  # too large for these devices: no reason to call it damaged
    except Exception as fault:
        raise Damaged(one_line(fault)) from fault


def differences(record: dict, state) -> str:
    """What in `state` is not what `record` says was saved; empty when all is right."""
    from train.checksum import checksums

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
