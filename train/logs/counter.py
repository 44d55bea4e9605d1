"""Show on standard error how far a long piece of work is: a bar, a rate, the time left.

with counted("plans", "samples", total=600) as counter:
    for sample in samples:
        ..
        counter.advance()

plans  137 of 600 samples  ━━━━━━─────────────────  23%  41.2 samples/s  ETA 0:11
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from train.logs.region import Line, Piece, Region, can_draw, cells, clock, flow
from train.logs.signs import UNICODE, gauge, signs_for

MIN_BAR, MAX_BAR = 5, 40
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BYTES = "B"


def bytes_counted(
    what: str, total: int, poll: Callable[[], int]
) -> contextlib.AbstractContextManager["Counter"]:
    """Show how many of `total` bytes are done, which `poll` returns, until the block
    ends."""
    return counted(what, BYTES, total, poll)


@contextlib.contextmanager
def counted(
    what: str,
    unit: str,
    total: float | None = None,
    poll: Callable[[], float] | None = None,
) -> Iterator["Counter"]:
    """Yield the counter of a piece of work, which is shown until the block ends if
    standard error is a terminal.

    `poll`, if given, returns the amount done; it is called in a thread. Without `total`
    there is neither a bar nor a time that is left. What is printed meanwhile stays
    above.
    """
    counter = Counter(what, unit, total, poll)
    if not can_draw(sys.stderr):
        yield counter
        return
    counter.signs = signs_for(sys.stderr)
    with Region(sys.stderr, counter.draw):
        yield counter


class Counter:
    """The amount of work that is done. Setting it costs no time."""

    def __init__(
        self,
        what: str,
        unit: str,
        total: float | None = None,
        poll: Callable[[], float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.unit, self.total = what, unit, total
        self.done, self.signs = 0.0, UNICODE
        self.text = ""
        """Anything else to be shown."""
        self.poll = poll
        """Returns what is done, if that is not set; called in a thread."""
        self._monotonic, self._begun_sec = monotonic, monotonic()

    def advance(self, number: float = 1) -> None:
        """Add to what is done."""
        self.done += number

    def draw(self, width: int, height: int) -> list[Line]:
        """Return the lines of the counter for a terminal of this size."""
        if self.poll is not None:
            self.done = self.poll()
        sec = max(self._monotonic() - self._begun_sec, 1e-9)
        ends = self._ends(sec)
        head = [(self.what, "bold")]
        if self.done or self.total:
            head.append((self._amount(), ""))
        room = width - cells(head) - cells(ends) - 2 * (len(head) + len(ends))
        if self.total and room >= MIN_BAR:
            parts = gauge(self.done / self.total, min(room, MAX_BAR), self.signs)
            head.append(("".join(parts), "cyan"))
        return flow([*head, *ends], width, min(2, height - 1), indent=2)

    def _amount(self) -> str:
        """Return how much is done, and of how much."""
        if self.total is None:
            return f"{amount(self.done, self.unit)}"
        if self.unit == BYTES:
            return f"{amount(self.done, BYTES)} of {amount(self.total, BYTES)}"
        return f"{self.done:,.0f} of {amount(self.total, self.unit)}"

    def _ends(self, sec: float) -> list[Piece]:
        """Return share, rate, time left and other text, as far as they are known."""
        ends, rate = [], self.done / sec
        if self.total:
            ends.append((f"{min(self.done / self.total, 1.0):.0%}", ""))
        if self.done:
            ends.append((rate_text(rate, self.unit), ""))
        if self.total and self.done:
            left_sec = max(self.total - self.done, 0) / rate
            ends.append((f"ETA {clock(left_sec)}", ""))
        else:
            ends.append((clock(sec), ""))
        return [*ends, (self.text, "dim")] if self.text else ends


def amount(number: float, unit: str) -> str:
    """Return a number with its unit, bytes with a prefix: '12 samples', '4.5 GB'."""
    return _scaled(number, BYTES) if unit == BYTES else f"{number:,.0f} {unit}"


def rate_text(rate: float, unit: str) -> str:
    """Return a rate per second, or per minute or hour where it is small."""
    if unit == BYTES:
        return f"{_scaled(rate, BYTES)}/s"
    for seconds, name in ((1, "s"), (60, "min"), (3600, "h")):
        if rate * seconds >= 1 or name == "h":
            break
    value = rate * seconds
    return (
        f"{value:,.0f} {unit}/{name}" if value >= 100 else f"{value:.1f} {unit}/{name}"
    )


def _scaled(number: float, unit: str) -> str:
    for scale, prefix in PREFIXES:
        if number >= scale:
            return (
                f"{number / scale:.{1 if number < 100 * scale else 0}f} {prefix}{unit}"
            )
    return f"{number:.0f} {unit}"
