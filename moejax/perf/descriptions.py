"""Descriptions of machines in TOML files: those that ship in a folder, by name, and a
user's own, by path."""

import pathlib
import tomllib
from typing import Any, NamedTuple

SUFFIX = ".toml"


class Description(NamedTuple):
    """A TOML file that was read."""

    path: pathlib.Path
    text: str
    fields: dict[str, Any]


def names(folder: pathlib.Path) -> list[str]:
    """Return the names of the files of a folder."""
    return sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))


def read(folder: pathlib.Path, name: str, kind: str, example: str) -> Description:
    """Return the file of a folder that has this name, or a file of the user's.

    `kind` says what is described, and `example` names a file with its fields. Raises
    ValueError, in one line, for an unknown name and for a file that cannot be read.
    """
    path = folder / f"{name}{SUFFIX}"
    if name not in names(folder):
        path = pathlib.Path(name)
        if not path.is_file():
            raise ValueError(
                f"no {kind} {name!r}: give {', '.join(names(folder))}, or the path of "
                f"a file with the fields of {folder.name}/{example}{SUFFIX}"
            )
    try:
        text = path.read_text(encoding="utf-8")
        return Description(path, text, tomllib.loads(text))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
