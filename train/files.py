"""Write small files so that a crash leaves the old or the new one, never half of one.

An error of a write names its file: the OSError that the operating system returns for a
write, unlike that of an open, names none.
"""

import contextlib
import errno
import os
import pathlib
import secrets
from collections.abc import Iterator

NO_SYNC_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)
"""Numbers with which file systems say that they cannot sync a folder."""


@contextlib.contextmanager
def path_named(path: str | os.PathLike) -> Iterator[None]:
    """Put `path` into an OSError that the block raises and that names no file."""
    try:
        yield
    except OSError as fault:
        if fault.filename is None:
            fault.filename = os.fspath(path)
        raise


def write_whole(
    path: pathlib.Path, content: str | bytes, *, is_shared: bool = False
) -> None:
    """Write a file in one atomic operation, and return when it is on the disk.

    The bytes are written to <name>.tmp, which is then renamed. If `is_shared`, several
    processes may write the file at the same time, and the temporary name also has the
    process id and a random number: processes of two machines, or of two containers, may
    have the same id.

    On a full disk the old file stays as it was, and the OSError, which names the file,
    is raised.
    """
    data = content.encode() if isinstance(content, str) else content
    own = f".{os.getpid()}-{secrets.token_hex(4)}" if is_shared else ""
    partial = path.with_name(f"{path.name}{own}.tmp")
    try:
        with path_named(path), partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace(partial: pathlib.Path, path: pathlib.Path) -> None:
    """Rename a file whose bytes are on the disk to `path`, and return when the new name
    is there too."""
    partial.replace(path)
    sync_folder(path.parent)


def sync_tree(folder: pathlib.Path) -> None:
    """Return when the files and folders below `folder`, itself, and its name in its
    parent are on the disk. Raises OSError."""
    for parent, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            _sync(os.path.join(parent, name))
        _sync(parent)
    sync_folder(folder.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Return when the names of a folder's files are on the disk."""
    _sync(folder)


def _sync(path: str | os.PathLike) -> None:
    """Return when a file or a folder is on the disk. A file system that cannot sync
    folders is no error; which number it returns differs."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with path_named(path):
            os.fsync(descriptor)
    except OSError as error:
        if not (os.path.isdir(path) and error.errno in NO_SYNC_OF_FOLDERS):
            raise
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
