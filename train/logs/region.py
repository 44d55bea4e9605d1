"""A region at the bottom of a terminal, drawn again and again; other output stays
above it.

    step 20  swap 1e49->610b ..       what is printed, to stdout or to stderr
    step 24  adopted 610b ..
                                      an empty row, where the cursor is
    step 137/480  ━━━━━─────          the region, drawn by a thread
    loss 2.911  ▇▅▄▃▂▁

It is no alternate screen: what was printed can be scrolled back to. The cursor is never
hidden, so a program that is killed leaves a terminal in order. rich.live, which leaves
the cursor below its region, erases what C++ code writes there, such as XLA's warnings.
"""

import contextlib
import functools
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from train.messages import one_line

MIN_SEC = 0.25
"""Shortest time from one drawing to the next."""
MAX_SHARE = 0.005
"""Share of a core's time at most that drawing takes: slow drawings become rarer."""

Piece = tuple[str, str]
"""A text, and its style as rich names it; '' is plain."""
Line = Sequence[Piece]
Draw = Callable[[int, int], list[Line]]
"""A function (width, height) -> lines of at most `width` cells, for a terminal of
`height` rows."""

ERASE_REST, ERASE_BELOW = "\x1b[K", "\x1b[J"
"""Codes that erase the rest of a row, and all from the cursor to the end of the
terminal."""


def can_draw(stream: TextIO | None) -> bool:
    """Return whether a region can be drawn on a stream: a terminal whose TERM is not
    dumb, unless TTY_INTERACTIVE=0 or TTY_COMPATIBLE=0 (rich) forbids it."""
    if stream is None or not stream.isatty():
        return False
    console = _make_console(stream)
    return console.is_terminal and console.is_interactive


class Region:
    """A region on a terminal, in which `draw` draws; use as a context.

    Within the block sys.stdout and sys.stderr, as far as they are terminals, print
    above the region. At its end the region is erased.
    """

    def __init__(self, stream: TextIO, draw: Draw) -> None:
        self._stream, self._draw = stream, draw
        self._console = _make_console(stream)
        self._lock = threading.RLock()
        """Held by whoever writes to the terminal."""
        self._size = self._console.size
        """Size of the terminal when the region was drawn last."""
        self._rows: list[str] = []
        self._ends = contextlib.ExitStack()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)

    def __enter__(self) -> "Region":
        with self._lock:
            for name in ("stdout", "stderr"):
                self._ends.enter_context(_printing_above(name, self))
            self.refresh()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        self._thread.join()
        with self._lock:
            self._write(f"\r{ERASE_BELOW}")
            self._ends.close()

    def refresh(self) -> None:
        """Draw the region anew."""
        with self._lock:
            self._size = self._console.size
            self._rows = self._drawn_rows()
            self._write(self._frame())

    def print(self, lines: Sequence[str]) -> None:
        """Print lines above the region, which is drawn as it was."""
        with self._lock:
            if self._console.size != self._size:
                self.refresh()
            text = "".join(f"{line}\n" for line in lines)
            self._write(f"\r{ERASE_BELOW}{text}{self._frame()}")

    def _frame(self) -> str:
        """Return the codes that draw the region below an empty row, and bring the
        cursor back to that row.

        So what C++ code writes to the terminal has a row of its own, a terminal that
        wraps old lines anew moves the cursor with them, and nothing above is erased.
        """
        below = "".join(f"{ERASE_REST}\n{row}" for row in self._rows)
        return f"\r{below}{ERASE_BELOW}\x1b[{len(self._rows)}A\r"

    def _drawn_rows(self) -> list[str]:
        """Return the rows of the region, with codes of colours. An error in drawing is
        shown in their place, and ends nothing."""
        width = max(self._size.width - 1, 1)  # some terminals wrap after the last cell
        try:
            lines = self._draw(width, self._size.height)
        except Exception as fault:
            text = f"the screen cannot be drawn: {type(fault).__name__}: {fault}"
            lines = [[(one_line(text)[:width], "")]]
        lines = lines[: max(self._size.height - 2, 1)]
        with self._console.capture() as captured:
            self._console.print(Drawn(lines))
        return captured.get().split("\n")

    def _write(self, text: str) -> None:
        """Write a text to the terminal, with escapes for what its encoding lacks."""
        encoding = self._console.encoding
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()

    def _run(self) -> None:
        """Draw the region until it is over."""
        wait_sec = MIN_SEC
        while not self._is_over.wait(wait_sec):
            begun_sec = time.thread_time()
            self.refresh()
            wait_sec = max(MIN_SEC, (time.thread_time() - begun_sec) / MAX_SHARE)


def cells(line: Line) -> int:
    """Return the number of cells that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def flow(
    pieces: Sequence[Piece], width: int, num_rows: int, indent: int = 0
) -> list[Line]:
    """Return pieces in up to `num_rows` lines, two blanks between them; lines after the
    first are indented. The last piece that finds no room is cut, and the rest left
    out."""
    lines: list[list[Piece]] = [[]]
    for text, style in pieces:
        used = cells(lines[-1])
        gap = 2 if used > indent or (used and len(lines) == 1) else 0
        if used + gap + cell_len(text) > width and gap and len(lines) < num_rows:
            lines.append([(" " * indent, "")] if indent else [])
            used, gap = indent, 0
        room = width - used - gap
        if room < min(4, cell_len(text)):
            break
        lines[-1].append((" " * gap + cut(text, room), style))
        if cell_len(text) > room:
            break
    return lines if pieces and num_rows > 0 else []


def cut(text: str, width: int) -> str:
    """Return a text, or its beginning and '..' where it has more than `width` cells."""
    if cell_len(text) <= width:
        return text
    kept = text[: max(width - 2, 0)]
    while cell_len(kept) > max(width - 2, 0):
        kept = kept[:-1]
    return kept + ".." if width > 2 else text[:width]


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, such as 0:48, or with hours."""
    minutes, sec = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{sec:02}" if hours else f"{minutes}:{sec:02}"


class Drawn:
    """Lines as rich renders them, without any change."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def __rich_console__(
        self, _: Console, options: ConsoleOptions
    ) -> Iterator[Segment]:
        for index, line in enumerate(self._lines):
            if index:
                yield Segment.line()
            for text, style in line:
                yield Segment(text, _parsed(style))


@functools.cache
def _parsed(style: str) -> Style | None:
    return Style.parse(style) if style else None


class _Above(io.TextIOBase):
    """A text stream that prints whole lines above a region."""

    def __init__(self, stream: TextIO, region: Region) -> None:
        self._stream, self._region, self._rest = stream, region, ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._region.print(lines)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    @property
    def rest(self) -> str:
        """Text that no end of a line has followed yet."""
        return self._rest


@contextlib.contextmanager
def _printing_above(name: str, region: Region) -> Iterator[None]:
    """Let a stream of sys print above a region, if it is a terminal. An unfinished line
    is printed when the region is gone."""
    before = getattr(sys, name)
    if before is None or not before.isatty():
        yield
        return
    above = _Above(before, region)
    setattr(sys, name, above)
    try:
        yield
    finally:
        if getattr(sys, name) is above:
            setattr(sys, name, before)
        before.write(above.rest)
        before.flush()


def _make_console(stream: TextIO) -> Console:
    """Return a console that changes nothing of what it prints."""
    return Console(
        file=stream, highlight=False, soft_wrap=True, emoji=False, markup=False
    )
