"""Read the lines that a file of a run has gained since it was read last."""

import os
import pathlib
from collections.abc import Callable, Iterator

from train.files import path_named
from train.logs.record_lines import MAX_LINE_BYTES, lines

MARK_BYTES = 2**16
"""Bytes before the place where reading ended that are compared with the file when
reading goes on. They hold the times of a step, which differ when it runs again."""
BUFFER_BYTES = 2**20


class FollowedFile:
    """A file of lines that another process writes. It may not be there yet, be cut back
    by a run that resumes, or be replaced."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.num_torn_bytes = 0
        """Length of a last line without an end, which was not read."""
        self._begin()

    def poll(self, restart: Callable[[], None]) -> Iterator[bytes]:
        """Yield the whole lines that were not read before. If lines that were read are
        no longer in the file, call `restart` first and yield all lines.

        Raises OSError where the file is there and cannot be read.
        """
        try:
            file = self.path.open("rb", BUFFER_BYTES)
        except FileNotFoundError:
            if self._position:
                self._begin()
                restart()
            return
        with path_named(self.path), file:
            stat = os.fstat(file.fileno())
            key = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
            if key == self._key:
                return
            if self._position and not self._goes_on(file, stat):
                self._begin()
                restart()
            self._key = key
            yield from self._lines(file)

    def key(self) -> tuple:
        """Return a value that changes when there is something to read, or was."""
        return self._position, self.num_torn_bytes

    def forget(self) -> None:
        """Read the file from its beginning next time."""
        self._begin()

    def _begin(self) -> None:
        self._position = self._last_line = self.num_torn_bytes = 0
        self._key: tuple[int, ...] | None = None
        self._mark = 0, b""

    def _goes_on(self, file, stat: os.stat_result) -> bool:
        """Return whether the file still begins with what was read."""
        start, piece = self._mark
        if (stat.st_dev, stat.st_ino) != self._key[:2] or stat.st_size < self._position:
            return False
        file.seek(start)
        return file.read(len(piece)) == piece

    def _lines(self, file) -> Iterator[bytes]:
        """Yield the whole lines from the place where reading ended, and remember where
        it ends now."""
        file.seek(self._position)
        self.num_torn_bytes = 0
        for line in lines(file):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                self.num_torn_bytes = len(line)
                break
            self._last_line = self._position
            self._position += len(line)
            yield line
        start = max(0, self._last_line - MARK_BYTES // 4)
        file.seek(start)
        self._mark = start, file.read(min(MARK_BYTES, self._position - start))
