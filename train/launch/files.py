"""Write small files so that a crash leaves the old or the new one, never half of one.

An error of a write names its file: the OSError that the operating system returns for a
write, unlike that of an open, names none.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def path_named(path: str | os.PathLike) -> Iterator[None]:
    """Put `path` into an OSError that the block raises and that names no file."""
    try:
        yield
    except OSError as fault:
        if fault.filename is None:
            fault.filename = os.fspath(path)
        raise


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write `text` to a file in one atomic operation, and return when it is on the
    disk.

    On a full disk the old file stays as it was, and the OSError, which names the file,
    is raised.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        with path_named(path), partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def replace(partial: pathlib.Path, path: pathlib.Path) -> None:
    """Rename a file whose bytes are on the disk to `path`, and return when the new name
    is there too."""
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Return when the names of a folder's files are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with path_named(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
