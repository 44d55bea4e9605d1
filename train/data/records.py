"""Types and functions that all document readers share.

A file is cut into ranges. The reader of a range yields events: texts, bad records and
the end of the range.
"""

import dataclasses
import gzip
import zlib
from pathlib import Path
from typing import BinaryIO

MAX_RECORD_BYTES = 16 * 2**20
"""Maximum size of a line or row. A longer one is a bad record; it is skipped without
being held in memory."""
READ_BYTES = 2**20
GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)
"""Exceptions that reading a damaged .gz file raises."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileRange:
    """Part of a file that one worker reads: a range of bytes or of row groups."""

    path: Path
    kind: str
    """Format of the file: a key of train.data.documents.FORMATS."""
    start: int
    stop: int
    num_bytes: int
    ends_file: bool
    """Whether this is the last range of its file."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a document, or the next part of the document that began last."""

    text: str
    begins: bool = True
    """Whether a document begins with this text."""


@dataclasses.dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that was skipped, and the reason."""

    record: int | None
    """Number of the record in its range, from 1; None when the whole file is bad."""
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class EndOfRange:
    """Event after the last record of a range."""

    num_records: int
    """Number of lines or rows in the range, bad ones included."""


Event = TextPart | BadRecord | EndOfRange


def find_problem(text: str, forbidden: str | None) -> str | None:
    """Return why a text cannot be a document, or None when it can."""
    if forbidden is not None and forbidden in text:
        return f"the text holds {forbidden!r}, which separates documents"
    return None


def is_gzipped(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading bytes, and decompress a .gz file on the way.

    Raises ValueError when the file cannot be opened.
    """
    try:
        return gzip.open(path) if is_gzipped(path) else path.open("rb")
    except OSError as error:
        raise unreadable_error(path, error) from error


def unreadable_error(path: Path, error: OSError) -> ValueError:
    """Make the ValueError that tells a user why a file cannot be read."""
    return ValueError(
        f"'{path}' cannot be read: {error.strerror or error}: check the path, its "
        "permissions and its disk"
    )
