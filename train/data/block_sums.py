"""Checksums of the blocks of a file, and their verification when tokens are read.

    file      |   block 0   |   block 1   |   block 2   |  3 |     64 KiB each
    sums      crc32           crc32         crc32         crc32

The sums are computed when a file is read whole for the first time, together with its
sha256. Later runs know the sha256 of an unchanged file without reading it, so a disk
that has altered a byte since then would not be noticed. A block is therefore compared
with its sum when its tokens are first used, and again after each pass over the file.
"""

import mmap
import zlib
from pathlib import Path

import numpy as np

from train.data.records import unreadable_error

BLOCK_BYTES = 2**16
"""Bytes of a block. zlib's crc32 takes 24 us for them, and releases the GIL."""


class BlockSums:
    """Computation of the checksums of a file's blocks from its bytes, in order."""

    def __init__(self) -> None:
        self._finished: list[int] = []
        self._crc = self._num_bytes = 0

    def update(self, data: bytes | memoryview | np.ndarray) -> None:
        """Add the next bytes of the file; they may end anywhere."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            part = view[: BLOCK_BYTES - self._num_bytes]
            self._crc = zlib.crc32(part, self._crc)
            self._num_bytes += part.nbytes
            if self._num_bytes == BLOCK_BYTES:
                self._finished.append(self._crc)
                self._crc = self._num_bytes = 0
            view = view[part.nbytes :]

    def sums(self) -> np.ndarray:
        """Return the sum of each block, uint32 [k]; the last block may be shorter."""
        rest = [self._crc] if self._num_bytes else []
        return np.array(self._finished + rest, np.uint32)


class BlockCheck:
    """Blocks of a memory-mapped file, each verified before its first use.

    The blocks count as unverified again when as many bytes as the file has were used,
    so a process that reads all of a file in several epochs verifies it about once in
    each. Threads may share the object: at worst, both verify the same block.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, sum_k: np.ndarray) -> None:
        """Prepare to verify a file that was mapped whole.

        Raises ValueError if the number of sums is not that of the file's blocks.
        """
        self._path, self._mapping = path, mapping
        self._view = memoryview(mapping)
        self._sum_k = sum_k
        self._start_pass()
        if self.num_blocks != -(-self._view.nbytes // BLOCK_BYTES):
            raise ValueError(f"'{path}' changed while it was read: try again")

    @property
    def num_blocks(self) -> int:
        return self._sum_k.size

    def verify(self, first: int, stop: int) -> None:
        """Raise ValueError if a block that holds bytes first .. stop - 1 is damaged."""
        self._num_unused -= stop - first
        if self._num_unused < 0:
            self._start_pass()
        self.verify_blocks(first // BLOCK_BYTES, -(-stop // BLOCK_BYTES))

    def verify_blocks(self, first: int, stop: int) -> None:
        """Raise ValueError if one of the blocks first .. stop - 1 is damaged."""
        if self._mapping.size() < self._view.nbytes:
            raise ValueError(
                f"'{self._path}' was cut short while it was in use: it had "
                f"{self._view.nbytes} bytes: restore it from a copy"
            )
        is_verified_k = self._is_verified_k
        while (k := is_verified_k.find(0, first, stop)) >= 0:
            at = k * BLOCK_BYTES
            part = self._view[at : at + BLOCK_BYTES]
            if zlib.crc32(part) != self._sum_k[k]:
                raise _damage_error(self._path, k, part.nbytes)
            is_verified_k[k] = 1

    def _start_pass(self) -> None:
        self._is_verified_k = bytearray(self.num_blocks)
        self._num_unused = self._view.nbytes


def verify_file(path: Path, sum_k: np.ndarray) -> None:
    """Read a whole file; raise ValueError if one of its blocks is damaged."""
    check = BlockCheck(path, open_mapped(path), sum_k)
    check.verify_blocks(0, check.num_blocks)


def open_mapped(path: Path) -> mmap.mmap:
    """Map a whole file, which must not be empty, for reading."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise unreadable_error(path, error) from error


def _damage_error(path: Path, k: int, num_bytes: int) -> ValueError:
    first = k * BLOCK_BYTES
    return ValueError(
        f"'{path}' is damaged: block {k} (bytes {first} to {first + num_bytes - 1}) "
        "differs from its checksum, which was taken when the file was first read: "
        "restore the file from a copy, or make it again; if it was changed on purpose, "
        f"run: touch {path.name}"
    )
