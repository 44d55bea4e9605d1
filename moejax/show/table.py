"""One plain table, as HTML for notebooks and as text for terminals."""

import dataclasses
import html
import math

MAX_TEXT_COLUMNS = 24
"""Number of columns of a table in a terminal; further ones are left out."""
_CELL = "padding:2px 5px;border:1px solid #8888;text-align:right"
_TABLE = "border-collapse:collapse;margin:4px 0"


@dataclasses.dataclass(frozen=True, repr=False)
class View:
    """A table that a notebook shows as HTML and a terminal as lines. Its first row and
    its first column are headings."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """Return the table as HTML, by the method that notebooks look for. Styles are
        inline, since notebooks drop style sheets."""
        rows = "".join(
            f"<tr>{''.join(_cell_html(text, i, j) for j, text in enumerate(row))}</tr>"
            for i, row in enumerate(self.rows)
        )
        notes = "".join(
            f'<div style="font-size:90%;opacity:.8">{html.escape(note)}</div>'
            for note in self.notes
        )
        return (
            f'<div style="overflow-x:auto"><div><b>{html.escape(self.title)}</b></div>'
            f'<table aria-label="{html.escape(self.title)}" style="{_TABLE}">'
            f"<tbody>{rows}</tbody></table>{notes}</div>"
        )

    def __repr__(self) -> str:
        width = max(map(len, self.rows), default=0)
        padded = [(*row, *[""] * (width - len(row))) for row in self.rows]
        shown = [row[:MAX_TEXT_COLUMNS] for row in padded]
        widths = [max(map(len, column)) for column in zip(*shown)]
        end = " .." * (width > MAX_TEXT_COLUMNS)
        lines = [
            " ".join(f"{text:>{w}}" for text, w in zip(row, widths)).rstrip() + end
            for row in shown
        ]
        return "\n".join([self.title, *lines, *self.notes])


def quantity(value: float, units: tuple[str, ...], base: float = 1000.0) -> str:
    """Return a number with three digits, in the largest of the units that leaves at
    least 1 before the point. Each unit is `base` times the one before it.

    >>> quantity(0.0031, ("us", "ms", "s"))
    '0.0031 us'
    >>> quantity(3100, ("us", "ms", "s"))
    '3.1 ms'
    """
    if not math.isfinite(value):
        return f"{value} {units[0]}"
    index = 0
    while abs(value) >= base and index + 1 < len(units):
        value, index = value / base, index + 1
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {units[index]}"


def groups(size: int, limit: int) -> list[tuple[int, int]]:
    """Return the first and the last index of each of at most `limit` runs.

    The runs have equal lengths, except that the last one may be shorter.
    """
    step = -(-size // limit)
    return [(i, min(i + step, size) - 1) for i in range(0, size, step)]


def span(word: str, first: int, last: int) -> str:
    """Return a word and a number, or a range of numbers: 'layer 3', 'layer 3-5'."""
    numbers = f"{first}" if first == last else f"{first}-{last}"
    return f"{word} {numbers}".lstrip()


def left_out(number: int, what: str) -> list[str]:
    """Return the note that things are not shown, or no note where number is 0."""
    return [f"{number} more {what} not shown"] if number > 0 else []


def _cell_html(text: str, row: int, column: int) -> str:
    """Return a cell as an HTML element. A heading without a word is a plain cell."""
    tag, scope = "td", ""
    if text and 0 in (row, column):
        tag, scope = "th", f' scope="{"col" if row == 0 else "row"}"'
    return f'<{tag}{scope} style="{_CELL}">{html.escape(text)}</{tag}>'
