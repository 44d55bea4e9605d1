"""Shards of token ids: a .bin that is memory-mapped, with an .idx that says where
documents begin.

    .bin   the ids of all documents, one after the other, little-endian
    .idx   "MMIDIDX\\0\\0"  version u64 = 1  dtype code u8  s u64  d u64, then
           s lengths int32   s offsets in .bin int64   d bounds of documents int64

s is the number of sequences, d the number of bounds. A bound is the number of the
sequence with which a document begins; the last bound is s. A document is one sequence
unless it has more than 2**31 - 1 tokens. The format is that of NVIDIA/Megatron-LM,
megatron/core/datasets/indexed_dataset.py.
"""

import array
import dataclasses
import hashlib
import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

DTYPES = {4: "int32", 8: "uint16"}
MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
MARK = 2**30
"""Added to the id of a token that is a target, in shards of conversations."""
_MAX_SEQUENCE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Token ids of one shard, at least one, and its document starts."""

    token_b: np.ndarray
    """All ids, in the dtype of the file."""
    start_d: np.ndarray
    """Indices at which documents start, ascending, from 0. No document is empty."""
    window: int | None = None
    """Number of tokens of the windows in which whole conversations lie, whose targets
    are marked (train/data/conversations.py); None: text."""


def open_shard(path: Path, sha256: str) -> TokenFile:
    """Compare a .bin and the .idx beside it with their sha256, and map the .bin.

    The hash is that of the .bin followed by the .idx. It is the only check: what has
    this hash was written by a ShardWriter. Raises ValueError when a file cannot be
    read, or when the hash differs.
    """
    index_path, digest = path.with_suffix(".idx"), hashlib.sha256()
    try:
        for part in (path, index_path):
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        if digest.hexdigest() != sha256:
            raise ValueError(
                f"'{path}' with its .idx differs from the sha256 in the manifest: it "
                f"is damaged, cut short or changed: remove '{path.parent}' and prepare "
                "it again"
            )
        index = index_path.read_bytes()
        _, _, code, num_s, num_d = HEADER.unpack_from(index)
        token_b = np.memmap(path, np.dtype(DTYPES[code]).newbyteorder("<"), "r")
    except OSError as error:
        raise ValueError(
            f"'{error.filename or path}' cannot be read: {error.strerror}: check the "
            f"path, or remove '{path.parent}' and prepare it again"
        ) from error
    length_s = np.frombuffer(index, "<i4", num_s, HEADER.size)
    bound_d = np.frombuffer(index, "<i8", num_d, HEADER.size + 12 * num_s)
    start_s = np.append(0, np.cumsum(length_s, dtype=np.int64))
    return TokenFile(np.asarray(token_b), start_s[bound_d[:-1]])


@dataclasses.dataclass(frozen=True)
class Shard:
    """A .bin with its .idx that a ShardWriter has written."""

    path: Path
    """Path of the .bin."""
    sha256: str
    """Hash of the .bin followed by the .idx."""
    num_documents: int
    num_tokens: int


class ShardWriter:
    """Writer of a .bin and, at the end, its .idx. It keeps 8 bytes per document."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype = Path(path).with_suffix(".bin"), np.dtype(dtype)
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
        length_d = np.frombuffer(self._lengths, np.int64)
        with self.path.with_suffix(".idx").open("xb") as file:
            for part in _index_parts(self.dtype, length_d):
                file.write(part)
                self._digest.update(part)
            _sync(file)
        _sync(self._file)
        self.close()
        sha256, count = self._digest.hexdigest(), self.num_documents
        return Shard(self.path, sha256, count, self.num_tokens)

    def close(self) -> None:
        self._file.close()


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
