"""Memory-mapped files of token ids: Megatron's .bin with its .idx, 1-D .npy, and text.

    .bin   the ids of all sequences, one after the other, little-endian
    .idx   "MMIDIDX\\0\\0"  version u64 = 1  dtype code u8  s u64  d u64, then
           s lengths int32   s offsets in .bin int64   d bounds of documents int64

s is the number of sequences, d the number of bounds. A bound is the number of the
sequence with which a document begins; the last bound is s. The format is that of
NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py. An index is checked
before any token is read. `scan` reads a file whole; its sums verify the tokens later,
when they are used (block_sums.py).
"""

import array
import dataclasses
import hashlib
import io
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np

from train.data.block_sums import BlockCheck, BlockSums, open_mapped, verify_file

DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64",
    7: "float32", 8: "uint16",
}  # fmt: skip
MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
_READ_BYTES = 2**20
_MAX_SEQUENCE = 2**31 - 1
_MAX_NPY_HEADER = 2**16
"""Maximum size of a .npy header, in bytes. NumPy itself refuses more than 10,000."""
_BAD_HEADER = (
    ValueError, SyntaxError, TypeError, OverflowError, RecursionError, TokenError,
)  # fmt: skip
"""Exceptions that numpy raises for a header that it cannot parse."""


@dataclasses.dataclass(frozen=True)
class Sums:
    """Checksums of the blocks of a file of tokens and of its index: uint32 [k]."""

    data_k: np.ndarray
    index_k: np.ndarray
    """Sums of the .idx that belongs to a .bin; empty for other files."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """Findings of a pass over the whole of a file of tokens."""

    sha256: str
    largest_id: int
    sums: Sums


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Memory-mapped token ids of one file, at least one, and its document starts."""

    path: Path | None
    """None for ids that are in memory."""
    token_b: np.ndarray
    """All ids of the file, in the dtype of the file."""
    start_d: np.ndarray
    """Indices at which documents start, ascending, from 0. No document is empty."""
    check: BlockCheck | None = None
    """Verification of the file's bytes; None if its sums are not known."""
    offset: int = 0
    """Offset of the first id in the file, in bytes."""

    def verify(self, first: int, stop: int) -> None:
        """Raise ValueError if a block that holds ids first .. stop - 1 is damaged."""
        if self.check is not None:
            size = self.token_b.itemsize
            self.check.verify(self.offset + first * size, self.offset + stop * size)


def open_tokens(
    path: Path, separator: int | None = None, sums: Sums | None = None
) -> TokenFile:
    """Open a file of token ids: a .npy, or else a .bin with its .idx.

    With the sums of `scan`, the index, the header and whatever else is read here are
    verified, and the ids can be.
    """
    path = Path(path)
    if path.suffix == ".npy":
        return open_npy(path, separator, sums)
    return open_indexed(path, sums)


def open_indexed(path: Path, sums: Sums | None = None) -> TokenFile:
    """Open a .bin and the .idx beside it; `path` may name either.

    Raises a ValueError of one line when a file is missing, damaged or empty, when the
    two do not fit each other, or when ids are not integers or not in the order of the
    sequences.
    """
    path = Path(path)
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    bin_path, idx_path = Path(f"{stem}.bin"), Path(f"{stem}.idx")
    size = _file_size(bin_path, "the .bin of ids")
    _file_size(idx_path, "the .idx that belongs to the .bin")
    if sums is not None:
        verify_file(idx_path, sums.index_k)
    dtype, length_s, offset_s, bound_d = _read_index(idx_path)
    _check_sequences(bin_path, length_s, offset_s, dtype.itemsize, size)
    _check_bounds(idx_path, bound_d, length_s.size)
    if size == 0:
        raise ValueError(f"'{bin_path}' holds no tokens: leave it out")
    mapping = open_mapped(bin_path)
    token_b = np.frombuffer(mapping, dtype)
    start_s = np.append(offset_s // dtype.itemsize, token_b.size)
    edge_d = start_s[bound_d]
    has_tokens_d = np.diff(edge_d) > 0
    start_d = edge_d[:-1][has_tokens_d].astype(np.int64)
    return TokenFile(bin_path, token_b, start_d, _check(bin_path, mapping, sums))


def open_npy(path: Path, separator: int | None, sums: Sums | None = None) -> TokenFile:
    """Open a 1-D array of integers; a document starts at each separator, and at 0.

    Without a separator, the whole array is one document. Raises a ValueError of one
    line.
    """
    path = Path(path)
    size = _file_size(path, "the .npy of ids")
    if not size:
        raise ValueError(f"'{path}' has no .npy header: it is empty")
    mapping = open_mapped(path)
    check = _check(path, mapping, sums)
    if check is not None:
        check.verify_blocks(0, 1)
    dtype, shape, offset = _npy_header(path)
    if dtype.kind not in "iu":
        raise ValueError(
            f"'{path}' holds {str(dtype)[:60]}, but ids are integers: save it as "
            "uint16 or int32"
        )
    if len(shape) != 1:
        raise ValueError(
            f"'{path}' has the shape {str(shape)[:60]}, not one dimension: ravel it"
        )
    expected = offset + shape[0] * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"'{path}' has {size} bytes, but its header says {str(expected)[:40]}: it "
            "is cut short or damaged"
        )
    if not shape[0]:
        raise ValueError(f"'{path}' holds no tokens: leave it out")
    token_b = np.frombuffer(mapping, dtype, offset=offset)
    file = TokenFile(path, token_b, np.zeros(1, np.int64), check, offset)
    if separator is None:
        return file
    starts = [file.start_d]
    for first, part_b in _parts(token_b):
        file.verify(first, first + part_b.size)
        starts.append(first + np.flatnonzero(part_b == separator))
    return dataclasses.replace(file, start_d=np.unique(np.concatenate(starts)))


def open_bytes(path: Path, sums: Sums | None = None) -> TokenFile:
    """Open a file whose bytes are ids, as one document."""
    if _file_size(path, "the text") == 0:
        raise ValueError(f"'{path}' is empty: give a file that holds text")
    mapping = open_mapped(path)
    byte_b = np.frombuffer(mapping, np.uint8)
    return TokenFile(path, byte_b, np.zeros(1, np.int64), _check(path, mapping, sums))


def scan(path: Path) -> Scan:
    """Read a file of tokens in one pass, and return what is to be known of it.

    The sha256 of a .bin covers its bytes followed by those of its .idx. Raises
    ValueError for a negative id.
    """
    tokens = open_tokens(path)
    digest, data, index = hashlib.sha256(), BlockSums(), BlockSums()
    with tokens.path.open("rb") as file:
        header = file.read(tokens.offset)
    digest.update(header)
    data.update(header)
    largest = -1
    for first, part_b in _parts(tokens.token_b):
        digest.update(part_b)
        data.update(part_b)
        largest = max(largest, int(part_b.max()))
        if part_b.dtype.kind == "i" and (low := int(part_b.min())) < 0:
            at = first + int(np.argmin(part_b))
            raise ValueError(f"'{path}' has the id {low} at {at}: ids are 0 or more")
    if tokens.path.suffix == ".bin":
        for part in _read_parts(tokens.path.with_suffix(".idx")):
            digest.update(part)
            index.update(part)
    return Scan(digest.hexdigest(), largest, Sums(data.sums(), index.sums()))


def scan_bytes(path: Path) -> Scan:
    """Return the same as `scan` for a file whose bytes are ids. The largest is 255,
    whether it occurs or not."""
    digest, data = hashlib.sha256(), BlockSums()
    for part in _read_parts(path):
        digest.update(part)
        data.update(part)
    return Scan(digest.hexdigest(), 255, Sums(data.sums(), np.zeros(0, np.uint32)))


def file_sha256(path: Path, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Return the sha256 of a file.

    `is_stopped` is called before every MiB. Once it returns True, reading stops, and
    the result covers only the beginning of the file.
    """
    digest = hashlib.sha256()
    for part in _read_parts(path, is_stopped):
        digest.update(part)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Shard:
    """A .bin with its .idx that an IndexedWriter has written."""

    path: Path
    """Path of the .bin."""
    sha256: str
    """Hash of the .bin followed by the .idx, as `scan` computes it."""
    num_documents: int
    num_tokens: int


class IndexedWriter:
    """Writer of a .bin and, at the end, its .idx. It keeps 8 bytes per document."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype = path.with_suffix(".bin"), np.dtype(dtype)
        self.num_tokens = 0
        self._lengths = array.array("q")
        self._digest = hashlib.sha256()
        self._file = self.path.open("xb")

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def append(self, token_b: np.ndarray, start_d: np.ndarray) -> None:
        """Write ids, in which documents begin at the indices `start_d`.

        Ids before the first start continue the document that began last.
        """
        edges = [0, *start_d.tolist(), token_b.size]
        if edges[1]:
            self._lengths[-1] += edges[1]
        self._lengths.extend(b - a for a, b in itertools.pairwise(edges[1:]))
        data = token_b.astype(self.dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.num_tokens += token_b.size

    def finish(self) -> Shard:
        """Write the index, and flush both files to the disk."""
        index = self.path.with_suffix(".idx")
        with index.open("xb") as file:
            for part in _index_parts(
                self.dtype, np.frombuffer(self._lengths, np.int64)
            ):
                file.write(part)
                self._digest.update(part)
            _sync(file)
        _sync(self._file)
        self.close()
        sha256, count = self._digest.hexdigest(), self.num_documents
        return Shard(self.path, sha256, count, self.num_tokens)

    def close(self) -> None:
        self._file.close()


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise ValueError(f"'{path}' is not a Megatron index: its header differs")
    _, version, code, num_s, num_d = HEADER.unpack(header)
    if version != 1:
        raise ValueError(
            f"'{path}' is of version {version}, but only version 1 is read: convert it"
        )
    name = DTYPES.get(code)
    if name is None or name.startswith("float"):
        raise ValueError(
            f"'{path}' has the dtype code {code} ({name or 'unknown'}), but ids are "
            "integers: their codes are 1 to 5 and 8"
        )
    expected = HEADER.size + 12 * num_s + 8 * num_d
    if size != expected:
        raise ValueError(
            f"'{path}' has {size} bytes, but needs {expected} for {num_s} sequences "
            f"and {num_d} bounds: it is cut short, damaged or not an index of text"
        )
    at = HEADER.size
    length_s = _map_array(path, "<i4", at, num_s)
    offset_s = _map_array(path, "<i8", at + 4 * num_s, num_s)
    bound_d = _map_array(path, "<i8", at + 12 * num_s, num_d)
    return np.dtype(name).newbyteorder("<"), length_s, offset_s, bound_d


def _map_array(path: Path, dtype: str, offset: int, count: int) -> np.ndarray:
    if not count:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r", offset, (count,))


def _check_sequences(
    path: Path, length_s: np.ndarray, offset_s: np.ndarray, itemsize: int, size: int
) -> None:
    """Raise ValueError unless the sequences fill the .bin one after the other."""
    if length_s.size and int(length_s.min()) < 0:
        raise ValueError(f"the .idx of '{path}' has a negative length: it is damaged")
    stop_s = np.cumsum(length_s, dtype=np.int64) * itemsize
    if not np.array_equal(offset_s, stop_s - length_s.astype(np.int64) * itemsize):
        raise ValueError(
            f"the sequences in the .idx of '{path}' do not follow one another in the "
            ".bin: it is damaged, or must be rewritten in order"
        )
    total = int(stop_s[-1]) if stop_s.size else 0
    if total != size:
        raise ValueError(
            f"'{path}' has {size} bytes, but its .idx says {total}: one of the two is "
            "cut short or belongs to another file"
        )


def _check_bounds(path: Path, bound_d: np.ndarray, num_sequences: int) -> None:
    if not bound_d.size or bound_d[0] != 0 or bound_d[-1] != num_sequences:
        raise ValueError(
            f"the documents in '{path}' do not extend from sequence 0 to "
            f"{num_sequences}: it is damaged"
        )
    # The range first: the difference of two absurd bounds may overflow.
    is_inside = bound_d.min() >= 0 and bound_d.max() <= num_sequences
    if not is_inside or (np.diff(bound_d) < 0).any():
        raise ValueError(f"the documents in '{path}' are not in order: it is damaged")


def _npy_header(path: Path) -> tuple[np.dtype, tuple[int, ...], int]:
    """Return the dtype, the shape and the offset of the data, without unpickling."""
    with path.open("rb") as whole_file:
        file = io.BytesIO(whole_file.read(_MAX_NPY_HEADER))
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except _BAD_HEADER as error:
        raise ValueError(
            f"'{path}' has no .npy header: {' '.join(str(error).split())[:120]}"
        ) from error
    return dtype, shape, file.tell()


def _check(path: Path, mapping: mmap.mmap, sums: Sums | None) -> BlockCheck | None:
    return None if sums is None else BlockCheck(path, mapping, sums.data_k)


def _parts(token_b: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield consecutive parts of the array, copied to memory, with their offsets."""
    step = _READ_BYTES // token_b.itemsize
    for first in range(0, token_b.size, step):
        yield first, np.array(token_b[first : first + step])


def _file_size(path: Path, what: str) -> int:
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(
            f"{what}, '{path}', cannot be read: {error.strerror}: check the path"
        ) from error


def _read_parts(
    path: Path, is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[bytes]:
    """Yield the bytes of a file, a MiB at a time, until `is_stopped` returns True."""
    with path.open("rb") as file:
        while not is_stopped() and (part := file.read(_READ_BYTES)):
            yield part


def _index_parts(dtype: np.dtype, length_d: np.ndarray) -> Iterator[bytes]:
    """Yield the parts of the .idx. A document may need several sequences."""
    num_d = -(-length_d // _MAX_SEQUENCE)
    length_s = np.repeat(length_d, num_d)
    if length_s.size > length_d.size:
        last_d = np.cumsum(num_d) - 1
        length_s = np.full(length_s.size, _MAX_SEQUENCE)
        length_s[last_d] = length_d - (num_d - 1) * _MAX_SEQUENCE
    code = next(code for code, name in DTYPES.items() if name == dtype.name)
    yield HEADER.pack(MAGIC, 1, code, length_s.size, length_d.size + 1)
    yield length_s.astype("<i4").tobytes()
    offset_s = np.cumsum(length_s) - length_s
    yield (offset_s * dtype.itemsize).astype("<i8").tobytes()
    yield np.append(0, np.cumsum(num_d)).astype("<i8").tobytes()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
