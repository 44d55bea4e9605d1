"""Writes Megatron's .bin and .idx, a part at a time; the format is in indexed.py."""

import array
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from train.data.indexed import DTYPES, HEADER, MAGIC

_MAX_SEQUENCE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Shard:
    """What a writer has written; `sha256` as by `scan`."""

    path: Path
    sha256: str
    num_documents: int
    num_tokens: int


class IndexedWriter:
    """Writes a .bin and, at the end, its .idx; holds 8 bytes for each document."""

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
        """Ids, and where in them documents begin; those before the first of these go on
        with the document that was begun last."""
        edges = [0, *start_d.tolist(), token_b.size]
        if edges[1]:
            self._lengths[-1] += edges[1]
        self._lengths.extend(b - a for a, b in itertools.pairwise(edges[1:]))
        data = token_b.astype(self.dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.num_tokens += token_b.size

    def finish(self) -> Shard:
        """Writes the index; both files are on the disk when it returns."""
        index = self.path.with_suffix(".idx")
        with index.open("xb") as file:
            for part in _index(self.dtype, np.frombuffer(self._lengths, np.int64)):
                file.write(part)
                self._digest.update(part)
            _sync(file)
        _sync(self._file)
        self.close()
        sha256, count = self._digest.hexdigest(), self.num_documents
        return Shard(self.path, sha256, count, self.num_tokens)

    def close(self) -> None:
        self._file.close()


def _index(dtype: np.dtype, length_d: np.ndarray) -> Iterator[bytes]:
    """Parts of the .idx; a document that a sequence cannot hold is several."""
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
