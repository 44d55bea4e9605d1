"""Read JSON that others wrote: each key once, numbers that are numbers, and one line
for whatever is wrong."""

import json
import os
import pathlib
import stat

MAX_JSON_BYTES = 100_000_000
MAX_QUOTED = 120


def read_json(path: pathlib.Path, what: str) -> dict:
    """Return the JSON object in a file, which is `what`, such as "the index".

    Raises ValueError, one line, for a file that is no JSON object, has more than
    MAX_JSON_BYTES, or names a key twice, and OSError where it cannot be read.
    """
    descriptor = open_file(path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(
            f"{path}: {what} has more than {MAX_JSON_BYTES:,} bytes: download it again"
        )
    return parse_json(data, f"{path}: {what}")


def parse_json(data: bytes, what: str) -> dict:
    """Return the JSON object that `data` is. Raises ValueError, one line, that begins
    with `what`."""
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_as_dict,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply: download it again") from None
    except (
        ValueError
    ) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        reason = str(error) or type(error).__name__
        raise ValueError(f"{what} is no JSON ({reason}): download it again") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ValueError(f"{what} is a {kind} and must be an object: download it again")
    return value


def open_file(path: pathlib.Path) -> int:
    """Return the descriptor of a regular file, open for reading. Raises OSError, and
    ValueError where the path is a folder or a device."""
    # Without O_NONBLOCK, a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no regular file: give the folder of a checkpoint")
    return descriptor


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
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"it has the key {quoted(twice)} twice")
    return value


def _refuse_constant(text: str) -> object:
    raise ValueError(f"it has the number {text}")
