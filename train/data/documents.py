"""Read text, JSONL and parquet files as a stream of documents, in constant memory.

    file               a document is          a range is                  located as
    .txt and others    the file               the file                    file
    .jsonl, .ndjson    `text_key` of a line   lines that start in a       file:line
                                              range of bytes
    .parquet           `text_key` of a row    a row group                 file:row
    .txt.gz, .jsonl.gz as without .gz         the file

Lines and rows are counted from 1. Where a file is cut into ranges depends on its
contents alone, and each range is read independently, so any number of workers reads the
same documents. A record that cannot be read is reported as an event like any other, and
the reader goes on with the next record.
"""

import codecs
import dataclasses
import glob
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from train.data import jsonl
from train.data.records import (
    GZIP_ERRORS,
    MAX_EXPANSION,
    READ_BYTES,
    BadRecord,
    EndOfRange,
    Event,
    FileRange,
    TextPart,
    find_problem,
    is_gzipped,
    open_file,
    unreadable_error,
)

RANGE_BYTES = 4 * 2**20
BLOCK_CHARS = 2**18
"""Maximum number of characters that a tokenizer gets in one call. The limit bounds
memory: an encoding takes about 100 bytes for each token."""
_NOT_TEXT = {
    ".npy": "holds tokens, not text: use it as Data.corpus directly",
    ".bin": "holds tokens, not text: use it as Data.corpus directly",
    ".idx": "is the index of a .bin file of tokens: use the .bin as Data.corpus",
} | dict.fromkeys(
    (".zst", ".xz", ".bz2", ".zip", ".tar", ".7z"),
    "has a compression format that is not supported: unpack it, or use .gz",
)
"""Extensions that are refused, each with the reason and the remedy."""


def expand(patterns: Iterable[str | Path]) -> list[Path]:
    """Return the files that paths and globs name, each once, in the order given.

    The files of one glob are sorted. A path that exists names itself, even when it
    contains brackets. Raises ValueError for a path or pattern that names no file.
    """
    paths = [path for pattern in patterns for path in _expand(str(pattern))]
    for path in paths:
        if path.is_dir():
            raise ValueError(f"'{path}' is a directory: name its files, '{path}/*.txt'")
        if not path.is_file():
            raise ValueError(f"'{path}' is not a file: check the path")
    return list(dict.fromkeys(paths))


def _expand(pattern: str) -> list[Path]:
    pattern = os.path.expanduser(pattern)
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [Path(pattern)]
    names = sorted(glob.glob(pattern, recursive=True))
    files = [Path(name) for name in names if not os.path.isdir(name)]
    if not files:
        raise ValueError(f"the glob '{pattern}' matches no file: check the path")
    return files


def file_format(path: Path) -> str:
    """Return the format of a file, a key of FORMATS, from its extension.

    Raises ValueError for an extension that does not stand for text.
    """
    suffix, *rest = [suffix.lower() for suffix in reversed(path.suffixes)] or [""]
    is_gzip = suffix == ".gz"
    if is_gzip:
        suffix = rest[0] if rest else ""
    if suffix in _NOT_TEXT:
        raise ValueError(f"'{path}' {_NOT_TEXT[suffix]}")
    for kind, entry in FORMATS.items():
        if suffix in entry.suffixes:
            if is_gzip and not entry.can_be_gzipped:
                raise ValueError(f"'{path}' is a gzipped {suffix} file: unpack it")
            return kind
    return DEFAULT_FORMAT


def split_file(
    path: Path, text_key: str, max_expansion: int = MAX_EXPANSION
) -> list[FileRange]:
    """Cut a file into ranges that can be read independently; return them in order.

    Raises ValueError when the file cannot be opened, or when it is a parquet file
    without a column `text_key` of strings.
    """
    kind = file_format(path)
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
    return [
        dataclasses.replace(file_range, max_expansion=max_expansion)
        for file_range in FORMATS[kind].split(path, text_key, size)
    ]


def read(
    file_range: FileRange, text_key: str, forbidden: str | None
) -> Iterator[Event]:
    """Yield the documents and bad records of a range in order, then an EndOfRange.

    A text that holds `forbidden`, the separator of documents, is a bad record. Raises
    ValueError when the file cannot be read at all, or is found to hold more text than
    its size allows.
    """
    try:
        yield from FORMATS[file_range.kind].read(file_range, text_key, forbidden)
    except OSError as error:
        raise unreadable_error(file_range.path, error) from error


def blocks(texts: Iterable[str]) -> Iterator[str]:
    """Join the texts, and yield the result in blocks of at most BLOCK_CHARS characters.

    A block ends after a line break if it has one, else before a space. The blocks
    depend on the joined text alone, not on where the given texts are cut.
    """
    pending = ""
    for text in texts:
        pending += text
        start = 0
        while len(pending) - start > BLOCK_CHARS:
            stop = _find_block_end(pending, start)
            yield pending[start:stop]
            start = stop
        pending = pending[start:]
    if pending:
        yield pending


def _find_block_end(text: str, start: int) -> int:
    limit = start + BLOCK_CHARS
    after_line = text.rfind("\n", start, limit) + 1
    before_space = text.rfind(" ", start + 1, limit)
    return after_line or (before_space if before_space > 0 else limit)


def _read_text(
    file_range: FileRange, text_key: str, forbidden: str | None
) -> Iterator[Event]:
    """Yield the events of a text file, which is one document.

    The file is read twice, so that a problem at its end is known before the document
    begins.
    """
    path = file_range.path
    problem = _find_problem_in_file(file_range, forbidden)
    if problem is not None:
        yield BadRecord(None, problem)
        yield EndOfRange(1)
        return
    begins = True
    with open_file(path, file_range.max_expansion) as file:
        for text in blocks(_decode(file)):
            yield TextPart(text, begins)
            begins = False
    if begins:
        yield TextPart("")
    yield EndOfRange(1)


def _find_problem_in_file(file_range: FileRange, forbidden: str | None) -> str | None:
    with open_file(file_range.path, file_range.max_expansion) as file:
        try:
            problems = (find_problem(text, forbidden) for text in _decode(file))
            return next((problem for problem in problems if problem), None)
        except UnicodeDecodeError as error:
            return f"broken UTF-8: {error.reason}"
        except GZIP_ERRORS as error:
            return f"damaged gzip data: {error}"


def _decode(file: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while part := file.read(READ_BYTES):
        yield decoder.decode(part)
    yield decoder.decode(b"", True)


def _split_text(path: Path, text_key: str, size: int) -> list[FileRange]:
    return [FileRange(path, "text", 0, sys.maxsize, size, True)]


def _split_lines(path: Path, text_key: str, size: int) -> list[FileRange]:
    if is_gzipped(path):
        return [FileRange(path, "jsonl", 0, sys.maxsize, size, True)]
    starts = range(0, size, RANGE_BYTES)
    stops = [min(start + RANGE_BYTES, size) for start in starts]
    return [
        FileRange(path, "jsonl", start, stop, stop - start, stop == size)
        for start, stop in zip(starts, stops)
    ]


def _split_parquet(path: Path, text_key: str, size: int) -> list[FileRange]:
    from train.data import parquet  # not at the top: the import takes half a second

    return parquet.split_file(path, text_key, size)


def _read_parquet(
    file_range: FileRange, text_key: str, forbidden: str | None
) -> Iterator[Event]:
    from train.data import parquet

    return parquet.read(file_range, text_key, forbidden)


class Format(NamedTuple):
    """Functions that find the documents in files of one format."""

    suffixes: tuple[str, ...]
    split: Callable[[Path, str, int], list[FileRange]]
    """split(path, text_key, num_bytes) cuts a file into ranges that can be read
    independently."""
    read: Callable[[FileRange, str, str | None], Iterator[Event]]
    """read(file_range, text_key, forbidden) yields documents and bad records in order,
    then an EndOfRange."""
    can_be_gzipped: bool = True
    """Whether a file of this format may be compressed with gzip."""


DEFAULT_FORMAT = "text"
"""Format of files whose extension is in no entry of FORMATS."""
FORMATS = {
    "text": Format((".txt",), _split_text, _read_text),
    "jsonl": Format((".jsonl", ".ndjson"), _split_lines, jsonl.read),
    "parquet": Format(
        (".parquet",), _split_parquet, _read_parquet, can_be_gzipped=False
    ),
}
"""All document formats by name. The name is part of the key of cached tokens."""
