"""Read JSON that others wrote: each key once, numbers that are numbers, and one line
for whatever is wrong."""

import json
import pathlib

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_QUOTED = 120


def read_json(path: pathlib.Path, what: str) -> dict:
    """Return the JSON object in a file, which is `what`, such as "the index".

    Raises ValueError, one line, for a file that is no JSON object or names a key twice,
    and OSError where it cannot be read.
    """
    return parse_json(path.read_bytes(), f"{path}: {what}")


def parse_json(data: bytes, what: str) -> dict:
    """Return the JSON object that `data` is. Raises ValueError, one line, that begins
    with `what`."""
    refuse_lfs_pointer(data, what)
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_as_dict, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{what} is no JSON ({error}): correct or download it"
        ) from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ValueError(f"{what} is a {kind} and must be an object: download it again")
    return value


def refuse_lfs_pointer(data: bytes, what: str) -> None:
    """Raise ValueError, one line that begins with `what`, if the bytes are a Git-LFS
    pointer: a clone without LFS has these small texts in place of large files."""
    if data.startswith(LFS_POINTER):
        raise ValueError(
            f"{what} is a pointer of Git LFS in place of the file: run `git lfs pull` "
            "in the folder that was cloned"
        )


def quoted(text: object) -> str:
    """Return a name or value of a file as one short line, with escapes for what a
    terminal would obey.

    >>> quoted("a\\nb")
    "'a\\\\nb'"
    """
    line = repr(text[:MAX_QUOTED] if isinstance(text, str) else text)
    return line if len(line) <= 2 * MAX_QUOTED else f"{line[:MAX_QUOTED]} ..."


def _as_dict(pairs: list[tuple[str, object]]) -> dict:
    value = dict(pairs)
    for text in (*value, *value.values()):
        if isinstance(text, str):
            text.encode()  # fails for half of a surrogate pair
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has the key {quoted(twice)} twice")
    return value


def _refuse_constant(text: str) -> object:
    raise ValueError(f"it has the number {text}")
