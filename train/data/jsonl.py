"""Documents of JSON lines: records cut by line breaks alone, located by their line."""

import codecs
import json
import sys
from collections.abc import Iterator
from typing import BinaryIO

from train.data.records import (
    DAMAGED_GZIP,
    MAX_RECORD_BYTES,
    READ_BYTES,
    Bad,
    End,
    Event,
    Piece,
    Text,
    find_fault,
    is_packed,
    opened,
)


def read(piece: Piece, text_key: str, forbidden: str | None) -> Iterator[Event]:
    count = 0
    with opened(piece.path) as file:
        try:
            stop = sys.maxsize if is_packed(piece.path) else piece.stop
            for line in _lines(file, piece.start, stop):
                count += 1
                try:
                    if line is None or not line.isspace():
                        yield Text(_document(line, text_key, forbidden))
                except _Fault as fault:
                    yield Bad(count, str(fault))
        except DAMAGED_GZIP as fault:
            yield Bad(count + 1, f"damaged gzip data, the rest is lost: {fault}")
    yield End(count)


def _lines(file: BinaryIO, start: int, stop: int) -> Iterator[bytes | None]:
    """Yield lines that start in the range; None stands for one that is too long."""
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
    """Read to the end of the line, at most `limit` bytes; return how many."""
    count = 0
    while count < limit:
        part = file.readline(min(READ_BYTES, limit - count))
        count += len(part)
        if not part or part.endswith(b"\n"):
            break
    return count


class _Fault(Exception):
    """Why a line is no document."""


def _document(line: bytes | None, text_key: str, forbidden: str | None) -> str:
    """Return the text of a line. Raises _Fault."""
    if line is None:
        raise _Fault(f"the line is longer than {MAX_RECORD_BYTES // 2**20} MiB")
    try:
        record = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as fault:
        raise _Fault(f"broken UTF-8: {fault.reason}") from fault
    except (ValueError, RecursionError) as fault:
        raise _Fault(f"not JSON: {fault}") from fault
    if not isinstance(record, dict):
        raise _Fault(f"the line is a {type(record).__name__}, not an object")
    if text_key not in record:
        found = ", ".join(sorted(record)[:5])[:80] or "none"
        raise _Fault(f"no field '{text_key}' among {found}: set text_key")
    text = record[text_key]
    if not isinstance(text, str):
        raise _Fault(f"field '{text_key}' is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise _Fault(f"field '{text_key}' is no text: {fault.reason}") from fault
    if fault := find_fault(text, forbidden):
        raise _Fault(fault)
    return text
