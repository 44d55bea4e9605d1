"""Shards as they are written, and what is counted on the way."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from train.data.encoding import Chunk
from train.data.indexed_writer import IndexedWriter, Shard
from train.data.records import Bad, Piece

SHARD_TOKENS = 2**29
SHARD_DOCUMENTS = 2**22
_MAX_NAMED = 1000
"""Bad records that are named; all are counted."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far prepare() is; bytes are those of the files as they lie on the disk."""

    num_bytes: int
    total_bytes: int
    num_documents: int
    num_tokens: int
    num_bad: int


class Shards:
    """Takes the chunks of all pieces in order; a new shard begins with a document once
    one has SHARD_TOKENS or SHARD_DOCUMENTS."""

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype,
        pieces: Sequence[Piece],
        max_bad_records: int,
        show: Callable[[Progress], None] | None,
    ) -> None:
        self._folder, self._dtype, self._show = folder, dtype, show
        self._max_bad_records = max_bad_records
        self._total_bytes = sum(piece.num_bytes for piece in pieces)
        self._num_bytes = self._num_documents = self._num_tokens = 0
        self._num_empty = self._num_bad = 0
        self._named: list[str] = []
        self._first_record = 0
        self._done: list[Shard] = []
        self._writer = self._next_writer()

    def __enter__(self) -> "Shards":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()

    def append(self, piece: Piece, chunk: Chunk) -> None:
        """Raises ValueError at one bad record more than may be."""
        for bad in chunk.bad:
            self._note(piece, bad)
        begins = chunk.start_d.size > 0 and chunk.start_d[0] == 0
        is_full = self._writer.num_tokens >= SHARD_TOKENS
        if begins and (is_full or self._writer.num_documents >= SHARD_DOCUMENTS):
            self._done.append(self._writer.finish())
            self._writer = self._next_writer()
        self._writer.append(chunk.token_b, chunk.start_d)
        self._num_documents += chunk.start_d.size
        self._num_tokens += chunk.token_b.size
        self._num_empty += chunk.num_empty
        if chunk.num_records is not None:
            self._num_bytes += piece.num_bytes
            self._first_record += chunk.num_records
            if piece.ends_file:
                self._first_record = 0
        if self._show is not None:
            self._show(self._progress())

    def finish(self) -> None:
        """Raises ValueError when there is no document."""
        if not self._num_documents:
            first = f": {self._named[0]}" if self._named else ""
            raise ValueError(
                f"the files hold no documents: {self._num_empty} are empty, "
                f"{self._num_bad} bad{first}: check the files and text_key"
            )
        self._done.append(self._writer.finish())

    def record(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "num_documents": self._num_documents,
            "num_tokens": self._num_tokens,
            "num_empty": self._num_empty,
            "num_bad": self._num_bad,
            "bad_records": self._named,
            "shards": [
                {
                    "file": shard.path.name,
                    "sha256": shard.sha256,
                    "num_documents": shard.num_documents,
                    "num_tokens": shard.num_tokens,
                }
                for shard in self._done
            ],
        }

    def _next_writer(self) -> IndexedWriter:
        name = f"shard-{len(self._done):05d}.bin"
        return IndexedWriter(self._folder / name, self._dtype)

    def _progress(self) -> Progress:
        return Progress(
            self._num_bytes,
            self._total_bytes,
            self._num_documents,
            self._num_tokens,
            self._num_bad,
        )

    def _note(self, piece: Piece, bad: Bad) -> None:
        where = "" if bad.record is None else f":{self._first_record + bad.record}"
        self._num_bad += 1
        if self._num_bad <= _MAX_NAMED:
            self._named.append(f"{piece.path}{where}: {' '.join(bad.reason.split())}")
        if self._num_bad > self._max_bad_records:
            raise ValueError(
                f"more than max_bad_records={self._max_bad_records} records are bad: "
                f"{'; '.join(self._named[:3])}: mend the files, or raise the limit"
            )
