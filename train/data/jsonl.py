"""Read documents from JSON lines. Line breaks separate records, which are located by
their line number.
"""

import codecs
import json
import sys
from collections.abc import Iterator
from typing import BinaryIO

from train.data.records import (
    GZIP_ERRORS,
    MAX_RECORD_BYTES,
    READ_BYTES,
    BadRecord,
    EndOfRange,
    Event,
    FileRange,
    TextPart,
    find_problem,
    is_gzipped,
    open_file,
)
from train.messages import one_line


def read(
    file_range: FileRange, text_key: str, forbidden: str | None
) -> Iterator[Event]:
    """Yield the documents and bad records of a range, then an EndOfRange.

    The range holds the lines that start in it. Blank lines count as records, but are
    neither documents nor bad.
    """
    count = 0
    with open_file(file_range.path, file_range.max_expansion) as file:
        try:
            stop = sys.maxsize if is_gzipped(file_range.path) else file_range.stop
            for line in _read_lines(file, file_range.start, stop):
                count += 1
                try:
                    if line is None or not line.isspace():
                        yield TextPart(_parse_line(line, text_key, forbidden))
                except _BadLine as error:
                    yield BadRecord(count, str(error))
        except GZIP_ERRORS as error:
            yield BadRecord(count + 1, f"damaged gzip data, the rest is lost: {error}")
    yield EndOfRange(count)


def _read_lines(file: BinaryIO, start: int, stop: int) -> Iterator[bytes | None]:
    """Yield the lines that start in the byte range; None stands for one that is longer
    than MAX_RECORD_BYTES."""
    position = start
    if start:
        file.seek(start - 1)
        position += _skip_line(file, stop - start + 1) - 1
    while position < stop:
        line = file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            return
        position += len(line)
        if len(line) > MAX_RECORD_BYTES:
            if not line.endswith(b"\n"):
                position += _skip_line(file, stop - position)
            line = None
        yield line


def _skip_line(file: BinaryIO, limit: int) -> int:
    """Read to the end of the line, at most `limit` bytes; return the number read."""
    count = 0
    while count < limit:
        part = file.readline(min(READ_BYTES, limit - count))
        count += len(part)
        if not part or part.endswith(b"\n"):
            break
    return count


class _BadLine(Exception):
    """A line is not a document; the message gives the reason."""


def _parse_line(line: bytes | None, text_key: str, forbidden: str | None) -> str:
    """Return the text in a line of JSON, or raise _BadLine."""
    if line is None:
        raise _BadLine(f"the line is longer than {MAX_RECORD_BYTES // 2**20} MiB")
    try:
        record = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        raise _BadLine(f"broken UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise _BadLine(f"the line is a {type(record).__name__}, not an object")
    if text_key not in record:
        fields = one_line(", ".join(sorted(record)[:5]), 80) or "none"
        raise _BadLine(f"no field '{text_key}' among {fields}: set text_key")
    text = record[text_key]
    if not isinstance(text, str):
        raise _BadLine(f"field '{text_key}' is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _BadLine(
            f"field '{text_key}' is not valid text: {error.reason}"
        ) from error
    if problem := find_problem(text, forbidden):
        raise _BadLine(problem)
    return text
