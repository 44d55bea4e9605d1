"""Bytes of checkpoints: needed, free and written."""

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
