"""Read arrays of numbers from .npz files, which may be damaged or made to do harm.

numpy.load believes the header of an array: one that claims 8 TiB is allocated before a
byte is read. Here the header must agree with the size of the zip member, and that size
with a limit, before anything is allocated.
"""

import math
import os
import pathlib
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

EXPANSION = 8
"""Bytes that the numbers of a file may take as float64, for each byte of the file. The
counts of a recorded routing take 7."""
SPARE_BYTES = 2**26
"""Bytes that they may take beside that, for small files of equal numbers."""
MAX_HEADER_BYTES = 4096
CHUNK = 2**20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Compression methods that numpy writes."""


def read_npz(path: pathlib.Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return those of the arrays `names` that an .npz file holds.

    They are arrays of integers or floats. Raises ValueError with one line for a file
    that is damaged, that holds other things under these names, or that expands beyond
    EXPANSION times its size plus SPARE_BYTES.
    """
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}: give the path of an .npz file")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a zip archive")
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
            limit = EXPANSION * os.path.getsize(path) + SPARE_BYTES
            return {
                name: _read_member(archive, members[f"{name}.npy"], limit)
                for name in names
                if f"{name}.npy" in members
            }
    except (
        ValueError, TypeError, KeyError, RuntimeError, EOFError, OSError, MemoryError,
        zipfile.BadZipFile, zlib.error,
    ) as fault:  # fmt: skip
        raise ValueError(
            f"{path} is damaged or not an .npz file ({fault}): get the file again, or "
            "write one with np.savez"
        ) from fault


def names_in_npz(path: pathlib.Path) -> list[str]:
    """Return the names of the arrays of an .npz file that read_npz can read."""
    with zipfile.ZipFile(path) as archive:
        return sorted(name.removesuffix(".npy") for name in archive.namelist())


def _read_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int
) -> np.ndarray:
    """Return the array in a member of the archive; raise ValueError if it is none."""
    name = member.filename.removesuffix(".npy")
    if member.compress_type not in _METHODS:
        raise ValueError(f"'{name}' is compressed in a way that numpy does not write")
    with archive.open(member) as file:
        shape, is_fortran, dtype = _read_header(file, name)
        if dtype.hasobject or dtype.kind not in "iuf" or dtype.itemsize > 8:
            raise ValueError(f"'{name}' holds {dtype}, and must hold numbers")
        count = math.prod(shape)
        if 8 * count > limit:
            raise ValueError(
                f"'{name}' of shape {list(shape)} takes {8 * count} bytes as float64, "
                f"and a file of this size may expand to {limit}"
            )
        # A member that holds more than its entry in the archive says fails its checksum
        # or is cut there, so the entry bounds what is read.
        if member.file_size - file.tell() != count * dtype.itemsize:
            raise ValueError(
                f"'{name}' of shape {list(shape)} and type {dtype} does not take the "
                f"{member.file_size} bytes that the archive has of it"
            )
        data = bytearray(count * dtype.itemsize)
        view, size = memoryview(data), 0
        while size < len(data) and (part := file.readinto(view[size:][:CHUNK])):
            size += part
        if size < len(data) or file.read(1):
            raise ValueError(f"'{name}' ends after {size} of {len(data)} bytes")
    flat = np.frombuffer(data, dtype)
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _read_header(file: BinaryIO, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, order and type of the array whose header the file begins with."""
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):  # later ones are for longer headers and for names
            raise ValueError(f"its format is {version}, and numbers have (1, 0)")
        header = np.lib.format.read_array_header_1_0(
            file, max_header_size=MAX_HEADER_BYTES
        )
    except (
        ValueError, TypeError, RecursionError, SyntaxError, AttributeError, IndexError,
        tokenize.TokenError,
    ) as fault:  # fmt: skip
        reason = str(fault).partition("\n")[0]
        raise ValueError(f"'{name}' has a damaged header: {reason:.100}") from fault
    if any(type(size) is not int or size < 0 for size in header[0]):
        raise ValueError(f"'{name}' has the shape {header[0]!r:.100}")
    return header
