"""The file of tiles that were measured on one kind of device.

    tuned/<device>.json    {"device": "NVIDIA H200",
                            "tiles": {"forward bfloat16 r16384 d4096 f16384 g8":
                                      {"rows": 128, "columns": 256, ..}, ..},
                            "measured": {"forward bfloat16 ..": {"msec": 1.2, ..}, ..}}

`tiles` are the fastest tiles by bucket (tuning.py), which tools/tune_kernels.py writes.
"""

import functools
import json
import os
import pathlib
import re
import tempfile

OWN_FOLDER = pathlib.Path(__file__).parent / "tuned"
"""Folder of the files, unless the environment names another one."""
FOLDER_VARIABLE = "MOEJAX_TUNED"
"""Environment variable with another folder of files, for an installation that cannot be
written to."""


def folder() -> pathlib.Path:
    """Return the folder of the files of all kinds of devices."""
    named = os.environ.get(FOLDER_VARIABLE)
    return pathlib.Path(named) if named else OWN_FOLDER


def path_of(device_kind: str) -> pathlib.Path:
    """Return the file of a kind of device: nvidia_h200.json for 'NVIDIA H200'."""
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower())
    return folder() / f"{name}.json"


def read(path: pathlib.Path) -> dict:
    """Return the content of a file. Raises ValueError unless it is JSON with tiles by
    bucket."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["tiles"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must hold tiles by bucket, and does not ({error!r}): write it "
            "with tools/tune_kernels.py"
        ) from error
    return record


def known(device_kind: str) -> dict:
    """Return the content of the file for a kind of device; an empty one without a file.

    A file is read once by each process, unless it changes."""
    path = path_of(device_kind)
    try:
        changed_ns = path.stat().st_mtime_ns
    except FileNotFoundError:
        return empty(device_kind)
    return _read_once(path, changed_ns)


@functools.lru_cache(maxsize=8)
def _read_once(path: pathlib.Path, changed_ns: int) -> dict:
    """Return the content of a file that was last written at `changed_ns`."""
    return read(path)


def load(path: pathlib.Path, device_kind: str) -> dict:
    """Return the content of a file, to add to it; an empty one without a file.

    Raises ValueError for a damaged file, or one of another device.
    """
    if not path.is_file():
        return empty(device_kind)
    record = read(path)
    if record.get("device") != device_kind:
        raise ValueError(
            f"{path} is for {record.get('device')}, but this is {device_kind}: give "
            "another --out"
        )
    return empty(device_kind) | record


def empty(device_kind: str) -> dict:
    """Return the content of a new file."""
    return {"device": device_kind, "tiles": {}, "measured": {}}


def save(path: pathlib.Path, record: dict) -> None:
    """Write a file completely or not at all, since a tool may be cut off at any
    time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    number, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
