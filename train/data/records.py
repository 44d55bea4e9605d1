"""Types and functions that all document readers share.

A file is cut into ranges. The reader of a range yields events: texts, bad records and
the end of the range.
"""

import dataclasses
import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO

MAX_EXPANSION = 200
"""Default of Data.max_expansion: largest ratio of the text in a file to its bytes."""
MAX_RECORD_BYTES = 16 * 2**20
"""Maximum size of a line or row. A longer one is a bad record; it is skipped without
being held in memory."""
READ_BYTES = 2**20
ALWAYS_READ_BYTES = 64 * 2**20
"""Bytes of text that a file of any size may hold."""
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
    max_expansion: int = MAX_EXPANSION
    """Largest ratio of the text in the whole file to the bytes of the file."""


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


def open_file(path: Path, max_expansion: int = MAX_EXPANSION) -> BinaryIO:
    """Open a file for reading bytes, and decompress a .gz file on the way.

    Raises ValueError when the file cannot be opened. Reading raises it when a .gz file
    has more bytes than `max_expansion` allows.
    """
    try:
        if not is_gzipped(path):
            return path.open("rb")
        return io.BufferedReader(_Unzipped(path, max_expansion), READ_BYTES)
    except OSError as error:
        raise unreadable_error(path, error) from error


class _Unzipped(io.RawIOBase):
    """The decompressed bytes of a .gz file, up to a limit."""

    def __init__(self, path: Path, max_expansion: int) -> None:
        self._path, self._max_expansion = path, max_expansion
        self._file = gzip.GzipFile(path)
        self._num_left = max_text_bytes(path, max_expansion)

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def readinto(self, buffer: memoryview) -> int:
        count = self._file.readinto1(buffer)  # what precedes damage, too
        self._num_left -= count
        if self._num_left < 0:
            raise expansion_error(self._path, self._max_expansion)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def max_text_bytes(path: Path, max_expansion: int) -> int:
    """Return the number of bytes of text that a file may hold."""
    return max(ALWAYS_READ_BYTES, max_expansion * path.stat().st_size)


def expansion_error(path: Path, max_expansion: int) -> ValueError:
    """Make the ValueError for a file that holds more text than its size allows."""
    size, limit = path.stat().st_size, max_text_bytes(path, max_expansion)
    return ValueError(
        f"'{path}' has {size:,} bytes, but holds more than {limit:,} bytes of text, as "
        f"a file made to fill a disk does: leave it out, or raise "
        f"max_expansion={max_expansion} if its text is wanted"
    )


def unreadable_error(path: Path, error: OSError) -> ValueError:
    """Make the ValueError that tells a user why a file cannot be read."""
    return ValueError(
        f"'{path}' cannot be read: {error.strerror or error}: check the path, its "
        "permissions and its disk"
    )
