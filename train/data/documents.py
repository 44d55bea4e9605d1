"""Documents of text, JSONL and parquet files, read as a stream in constant memory.

    file               a document is          a piece is                  located as
    .txt and others    the file               the file                    file
    .jsonl, .ndjson    `text_key` of a line   lines that start in a       file:line
                                              range of bytes
    .parquet           `text_key` of a row    a row group                 file:row
    .txt.gz, .jsonl.gz as without .gz         the file

Lines and rows count from 1. A file is cut into pieces by its contents alone, and each
piece is read by itself: any number of workers sees the same documents. A record that
cannot be read is an event like any other, and the reader goes on behind it.
"""

import codecs
import glob
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from train.data import jsonl
from train.data.records import (
    DAMAGED_GZIP,
    READ_BYTES,
    Bad,
    End,
    Event,
    Piece,
    Text,
    find_fault,
    is_packed,
    opened,
    unreadable,
)

PIECE_BYTES = 4 * 2**20
BLOCK_CHARS = 2**18
"""Longest text that is given to a tokenizer in one go: an encoding takes some 100 bytes
a token."""
_NO_STREAMS = {
    ".npy": "holds tokens, no text: name it as Data.corpus as it is",
    ".bin": "holds tokens, no text: name it as Data.corpus as it is",
    ".idx": "is the index of a .bin of tokens: name the .bin as Data.corpus",
} | dict.fromkeys(
    (".zst", ".xz", ".bz2", ".zip", ".tar", ".7z"),
    "is compressed in a way that is not read: unpack it, or use .gz",
)


def expand(patterns: Iterable[str | Path]) -> list[Path]:
    """Return the files that paths and globs name, each once, in the order given.

    Files of a glob are sorted. A path that exists is itself, whatever brackets it has.
    Raises ValueError for what names no file.
    """
    paths = [path for pattern in patterns for path in _expand(str(pattern))]
    for path in paths:
        if path.is_dir():
            raise ValueError(f"'{path}' is a directory: name its files, '{path}/*.txt'")
        if not path.is_file():
            raise ValueError(f"'{path}' is no file: check the path")
    return list(dict.fromkeys(paths))


def _expand(pattern: str) -> list[Path]:
    pattern = os.path.expanduser(pattern)
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [Path(pattern)]
    found = sorted(glob.glob(pattern, recursive=True))
    files = [Path(name) for name in found if not os.path.isdir(name)]
    if not files:
        raise ValueError(f"the glob '{pattern}' matches no file: check the path")
    return files


def file_format(path: Path) -> str:
    """Return the format of a file, a name in FORMATS, by its extension. Raises
    ValueError for what holds no stream of text."""
    suffix, *rest = [suffix.lower() for suffix in reversed(path.suffixes)] or [""]
    is_gzip = suffix == ".gz"
    if is_gzip:
        suffix = rest[0] if rest else ""
    if suffix in _NO_STREAMS:
        raise ValueError(f"'{path}' {_NO_STREAMS[suffix]}")
    for kind, its in FORMATS.items():
        if suffix in its.suffixes:
            if is_gzip and not its.can_be_packed:
                raise ValueError(f"'{path}' is a packed {suffix}: unpack it")
            return kind
    return OTHERWISE


def pieces(path: Path, text_key: str) -> list[Piece]:
    """Return the pieces of a file in order; check a parquet file's schema.

    Raises ValueError when the file cannot be opened, or is parquet without a column
    `text_key` of strings.
    """
    kind = file_format(path)
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
    return FORMATS[kind].pieces(path, text_key, size)


def read(piece: Piece, text_key: str, forbidden: str | None) -> Iterator[Event]:
    """Yield the documents and bad records of a piece in order, then its End.

    A text that holds `forbidden`, the separator of documents, is a bad record. Raises
    ValueError when the file cannot be read at all.
    """
    try:
        yield from FORMATS[piece.kind].read(piece, text_key, forbidden)
    except OSError as fault:
        raise unreadable(piece.path, fault) from fault


def blocks(texts: Iterable[str]) -> Iterator[str]:
    """Yield the joined texts in blocks of at most BLOCK_CHARS, cut after a line break
    if there is one, else before a space. How the texts were cut makes no difference."""
    held = ""
    for text in texts:
        held += text
        start = 0
        while len(held) - start > BLOCK_CHARS:
            stop = _cut(held, start)
            yield held[start:stop]
            start = stop
        held = held[start:]
    if held:
        yield held


def _cut(text: str, start: int) -> int:
    limit = start + BLOCK_CHARS
    after_line = text.rfind("\n", start, limit) + 1
    before_space = text.rfind(" ", start + 1, limit)
    return after_line or (before_space if before_space > 0 else limit)


def _read_text(piece: Piece, text_key: str, forbidden: str | None) -> Iterator[Event]:
    """Read twice, so that a fault at the end is known before the document begins."""
    path = piece.path
    fault = _fault_in_file(path, forbidden)
    if fault is not None:
        yield Bad(None, fault)
        yield End(1)
        return
    begins = True
    with opened(path) as file:
        for text in blocks(_decoded(file)):
            yield Text(text, begins)
            begins = False
    if begins:
        yield Text("")
    yield End(1)


def _fault_in_file(path: Path, forbidden: str | None) -> str | None:
    with opened(path) as file:
        try:
            faults = (find_fault(text, forbidden) for text in _decoded(file))
            return next((fault for fault in faults if fault), None)
        except UnicodeDecodeError as fault:
            return f"broken UTF-8: {fault.reason}"
        except DAMAGED_GZIP as fault:
            return f"damaged gzip data: {fault}"


def _decoded(file: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while part := file.read(READ_BYTES):
        yield decoder.decode(part)
    yield decoder.decode(b"", True)


def _whole_file(path: Path, text_key: str, size: int) -> list[Piece]:
    return [Piece(path, "text", 0, sys.maxsize, size, True)]


def _ranges_of_lines(path: Path, text_key: str, size: int) -> list[Piece]:
    if is_packed(path):
        return [Piece(path, "jsonl", 0, sys.maxsize, size, True)]
    starts = range(0, size, PIECE_BYTES)
    stops = [min(start + PIECE_BYTES, size) for start in starts]
    return [Piece(path, "jsonl", a, b, b - a, b == size) for a, b in zip(starts, stops)]


def _row_groups(path: Path, text_key: str, size: int) -> list[Piece]:
    from train.data import parquet  # takes half a second to import

    return parquet.pieces(path, text_key, size)


def _read_rows(piece: Piece, text_key: str, forbidden: str | None) -> Iterator[Event]:
    from train.data import parquet

    return parquet.read(piece, text_key, forbidden)


class Format(NamedTuple):
    """How the documents of one kind of file are found."""

    suffixes: tuple[str, ...]
    pieces: Callable[[Path, str, int], list[Piece]]
    """pieces(path, text_key, num_bytes): parts that can be read by themselves."""
    read: Callable[[Piece, str, str | None], Iterator[Event]]
    """read(piece, text_key, forbidden): its documents and faults, then its End."""
    can_be_packed: bool = True
    """Whether a .gz may hold it."""


OTHERWISE = "text"
"""The format of files with any other extension."""
FORMATS = {
    "text": Format((".txt",), _whole_file, _read_text),
    "jsonl": Format((".jsonl", ".ndjson"), _ranges_of_lines, jsonl.read),
    "parquet": Format((".parquet",), _row_groups, _read_rows, can_be_packed=False),
}
"""Every format of documents. Its name is part of what names a cache of tokens."""
