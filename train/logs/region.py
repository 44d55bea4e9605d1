"""A region at the bottom of a terminal, drawn again and again; other output stays
above it.

    step 20  swap 1e49->610b ..       what is printed, to stdout or to stderr
    step 24  adopted 610b ..
    ------------------------
    step 137/480  ━━━━━─────          the region, drawn by a thread
    loss 2.911  ▇▅▄▃▂▁

It is no alternate screen: what was printed can be scrolled back to. The cursor is never
hidden, so a program that is killed leaves a terminal in order.
"""

import contextlib
import functools
import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
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
"""A function (width, rows) -> lines of at most `width` cells, at most `rows` of them.
`rows` is the height of the terminal."""

REWRAPPING = ("TMUX", "VTE_VERSION", "KITTY_WINDOW_ID", "WT_SESSION", "KONSOLE_VERSION",
              "ITERM_SESSION_ID", "ALACRITTY_WINDOW_ID", "WEZTERM_PANE")  # fmt: skip
"""Variables set by terminals that wrap old lines anew when they become narrower."""


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
        self._console, self._draw = _make_console(stream), draw
        self._lock = threading.RLock()
        """Held by whoever writes to the terminal."""
        self._lines: list[Line] = []
        self._size = self._console.size
        """Size of the terminal when the region was drawn last."""
        self._live = Live(
            console=self._console,
            get_renderable=lambda: _Drawn(self._lines),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._ends = contextlib.ExitStack()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)

    def __enter__(self) -> "Region":
        with self._lock:
            for name in ("stdout", "stderr"):
                self._ends.enter_context(_printing_above(name, self))
            self._live.start()
            self._ends.callback(self._live.stop)
            self._console.show_cursor(True)
            self.refresh()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        self._thread.join()
        with self._lock:
            if self._console.size != self._size:
                self.refresh()
            self._ends.close()

    def refresh(self) -> None:
        """Draw the region anew."""
        with self._lock:
            self._make_room()
            self._size = self._console.size
            self._lines = self._drawn_lines()
            self._live.refresh()

    def print(self, lines: Sequence[str]) -> None:
        """Print lines above the region, which is drawn as it was."""
        encoding = self._console.encoding
        plain = [x.encode(encoding, "backslashreplace").decode(encoding) for x in lines]
        with self._lock:
            if self._console.size != self._size:
                self.refresh()
            self._console.print(_Drawn([[(line, "")] for line in plain], is_whole=True))
            self._console.file.flush()

    def _drawn_lines(self) -> list[Line]:
        """Return the lines of the region. An error in drawing is shown in its place,
        and ends nothing."""
        size = self._size
        width = max(size.width - 1, 1)  # some terminals wrap after the last column
        try:
            return self._draw(width, size.height)
        except Exception as fault:
            text = f"the screen cannot be drawn: {type(fault).__name__}: {fault}"
            return [[(one_line(text)[:width], "")]]

    def _make_room(self) -> None:
        """Erase the rows that a terminal which has become narrower has added to the
        region."""
        width = self._console.size.width
        if width < self._size.width and rewraps():
            rows = [math.ceil(cells(line) / width) for line in self._lines]
            num_added = sum(max(row, 1) - 1 for row in rows)
            up = (ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)
            begin = ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)
            self._console.control(Control(*begin, *up * num_added))

    def _run(self) -> None:
        """Draw the region until it is over."""
        wait_sec = MIN_SEC
        while not self._is_over.wait(wait_sec):
            begun_sec = time.thread_time()
            self.refresh()
            wait_sec = max(MIN_SEC, (time.thread_time() - begun_sec) / MAX_SHARE)


def rewraps(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the terminal is known to wrap old lines anew when it becomes
    narrower. Of an unknown one too many rows are never erased; some may stay."""
    return any(environ.get(name) for name in REWRAPPING)


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


class _Drawn:
    """Lines as rich renders them, without any change."""

    def __init__(self, lines: Sequence[Line], *, is_whole: bool = False) -> None:
        """With `is_whole` the last line ends too."""
        self._lines, self._is_whole = lines, is_whole

    def __rich_console__(
        self, _: Console, options: ConsoleOptions
    ) -> Iterator[Segment]:
        for index, line in enumerate(self._lines):
            for text, style in line:
                yield Segment(text, _parsed(style))
            if self._is_whole or index < len(self._lines) - 1:
                yield Segment.line()


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
