"""Records that all readers of documents share: pieces of files, and the texts and
faults that are found in them.
"""

import dataclasses
import gzip
import zlib
from pathlib import Path
from typing import BinaryIO

MAX_RECORD_BYTES = 16 * 2**20
"""A longer line or row is a bad record: it is skipped without being held."""
READ_BYTES = 2**20
DAMAGED_GZIP = (gzip.BadGzipFile, EOFError, zlib.error)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file: a range of its bytes, or of its row groups."""

    path: Path
    kind: str
    """A name in train.data.documents.FORMATS."""
    start: int
    stop: int
    num_bytes: int
    ends_file: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A document, or the next part of the document that has begun."""

    text: str
    begins: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Bad:
    """A record that was skipped: its number in the piece, or None for all of a file."""

    record: int | None
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """The piece is over and held so many lines or rows."""

    num_records: int


Event = Text | Bad | End


def find_fault(text: str, forbidden: str | None) -> str | None:
    """Return why a text cannot be a document, or None."""
    if forbidden is not None and forbidden in text:
        return f"the text holds {forbidden!r}, which separates documents"
    return None


def is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def opened(path: Path) -> BinaryIO:
    """Return the open file, unpacked. Raises ValueError when it cannot be opened."""
    try:
        return gzip.open(path) if is_packed(path) else path.open("rb")
    except OSError as fault:
        raise unreadable(path, fault) from fault


def unreadable(path: Path, fault: OSError) -> ValueError:
    return ValueError(
        f"'{path}' cannot be read: {fault.strerror or fault}: check the path, its "
        "rights and its disk"
    )
