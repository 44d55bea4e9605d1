"""Bytes of checkpoints: needed, free and written; and files synced to the disk."""

import errno
import os
import pathlib

import jax


def num_bytes(state) -> int:
    """Return the bytes of all arrays of a state, on all processes together."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def num_free_bytes(folder: pathlib.Path) -> int | None:
    """Return the bytes that are free for users in the file system of `folder`, or None
    if it has no limit or does not say. Raises OSError."""
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize if there.f_blocks else None


def lack_of_room(folder: pathlib.Path, needed_bytes: int) -> str:
    """Return why a checkpoint of this size does not fit into `folder`, or ''."""
    free_bytes = num_free_bytes(folder)
    if free_bytes is None or free_bytes >= needed_bytes:
        return ""
    return f"no room: {describe_room(folder, needed_bytes)}"


def describe_room(folder: pathlib.Path, needed_bytes: int) -> str:
    """Return how many bytes a checkpoint needs, and how many are free, for an error."""
    try:
        free_bytes = num_free_bytes(folder)
    except OSError as error:
        free_bytes, why = None, f" ({error.strerror})"
    else:
        why = ""
    free = "an unknown number" if free_bytes is None else f"{free_bytes:,}"
    return f"it needs {needed_bytes:,} bytes, and {free}{why} are free in {folder}"


def num_written_bytes(folder: pathlib.Path) -> int:
    """Return the bytes of all files below `folder`, without following links.

    Files and folders that come and go meanwhile are no error.
    """
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def sync_tree(folder: pathlib.Path) -> None:
    """Return when the files and folders below `folder`, itself, and its name in its
    parent are on the disk. Raises OSError."""
    for parent, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            _sync(os.path.join(parent, name))
        _sync(parent)
    _sync(folder.parent)


def _sync(path: str | os.PathLike) -> None:
    """Return when a file or a folder is on the disk. A file system that cannot sync
    folders, and says so, is no error."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (os.path.isdir(path) and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
