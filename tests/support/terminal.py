"""Run a program in a pseudo-terminal, and read what its screen shows."""

import fcntl
import os
import pathlib
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence

import pyte

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_SEC = 120.0
UTF8 = {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color", "NO_COLOR": ""}
OBEYING = "import sys\nfor line in sys.stdin: exec(line)"
"""Program that runs the statements that it is told."""


class Terminal:
    """A program whose output goes to a terminal of so many columns and rows.

    It is a context manager, and kills the program at the end of the block.
    """

    def __init__(
        self, words: Sequence[str], columns: int = 80, rows: int = 24, **env: str
    ) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=2000)
        self._stream = pyte.ByteStream(self._screen)
        self._changed = threading.Condition()
        self.raw = b""
        self._own, theirs = pty.openpty()
        self._set_size(columns, rows)
        kept = {"XLA_FLAGS", "COLUMNS", "LINES", "TMUX"}
        rest = {name: text for name, text in os.environ.items() if name not in kept}
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=theirs,
            stderr=theirs,
            env={**rest, **UTF8, "PYTHONPATH": str(ROOT), **env},
            start_new_session=True,
        )
        os.close(theirs)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        os.close(self._own)
        self.process.stdin.close()

    def tell(self, *statements: str) -> None:
        """Let a program that obeys run statements."""
        text = "".join(f"{statement}\n" for statement in statements)
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal."""
        with self._changed:
            self._screen.resize(rows, columns)
            self._set_size(columns, rows)

    def lines(self) -> list[str]:
        """Return what the terminal shows, without blanks at the ends."""
        with self._changed:
            return [line.rstrip() for line in self._screen.display]

    def history(self) -> list[str]:
        """Return what has left the terminal at its top, and what it shows."""
        with self._changed:
            top = [
                "".join(row[x].data for x in range(self._screen.columns)).rstrip()
                for row in self._screen.history.top
            ]
        return top + self.lines()

    @property
    def shows_cursor(self) -> bool:
        """Whether the cursor is visible."""
        return not self._screen.cursor.hidden

    def wait_for(self, what: str | Callable[[list[str]], bool]) -> list[str]:
        """Wait until the terminal shows a text, or lines of which `what` is true;
        return the lines."""
        end_sec = time.monotonic() + LIMIT_SEC
        while True:
            lines = self.lines()
            if what(lines) if callable(what) else any(what in line for line in lines):
                return lines
            left_sec = end_sec - time.monotonic()
            is_open = left_sec > 0 and self._thread.is_alive()
            assert is_open, (what, self.history())
            with self._changed:
                self._changed.wait(min(left_sec, 1.0))

    def end(self, number: int | None = None) -> int:
        """Send the signal if one is given. Wait for the end of the program, and return
        its exit code."""
        if number is not None:
            self.process.send_signal(number)
        self.process.stdin.close()
        code = self.process.wait(LIMIT_SEC)
        self._thread.join()
        return code

    def _set_size(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, size)

    def _read(self) -> None:
        """Read until the program has closed the terminal."""
        while True:
            try:
                data = os.read(self._own, 65536)
            except OSError:
                data = b""
            with self._changed:
                self.raw += data
                self._stream.feed(data)
                self._changed.notify_all()
            if not data:
                return


def obeying(columns: int = 80, rows: int = 24, **env: str) -> Terminal:
    """Return a terminal with a program that runs the statements that it is told."""
    return Terminal([sys.executable, "-c", OBEYING], columns, rows, **env)
