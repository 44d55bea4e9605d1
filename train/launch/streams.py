"""Print to a terminal, a pipe or a file on a disk that may be full."""

import errno
import sys
from typing import TextIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of a disk that takes no more text."""


class LenientStream:
    """A text stream that loses text which a full disk does not take, instead of raising
    an error. A closed pipe still raises BrokenPipeError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, and return its length, written or not."""
        try:
            self._stream.write(text)
        except OSError as fault:
            _require_full(fault)
        return len(text)

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        try:
            self._stream.flush()
        except OSError as fault:
            _require_full(fault)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def print_leniently() -> None:
    """Let a program go on, with its own exit code, where the disk that its output goes
    to is full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, LenientStream):
            setattr(sys, name, LenientStream(stream))


def _require_full(fault: OSError) -> None:
    """Raise the error again unless it is that of a full disk."""
    if fault.errno not in FULL:
        raise fault
