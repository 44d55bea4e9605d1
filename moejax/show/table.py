"""One table of colored cells, as HTML for notebooks and as text for terminals.

Colors are translucent and text keeps the color of the page, so that a table is readable
in light and dark themes. Styles are inline, since notebooks drop style sheets.
"""

import dataclasses
import html
import itertools
import math

PALETTE = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)
"""RGB of Okabe and Ito's colors, which differ for every kind of color vision."""
MAX_TEXT_COLUMNS = 24
"""Number of columns of a table in a terminal; further ones are left out."""
FULL_RATIO = 4.0
"""Load over the mean from which a cell has its full color."""
_CELL = "padding:2px 5px;border:1px solid #8888;text-align:center"
_TABLE = "border-collapse:collapse;margin:4px 0;table-layout:auto"
_HATCH = "background:repeating-linear-gradient(45deg,#8886 0 2px,transparent 2px 6px)"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str = ""
    color: str = ""
    """CSS color of the background; '' for none."""
    hint: str = ""
    """Text that a notebook shows while the mouse is over the cell."""
    span: int = 1
    """Number of columns that the cell covers."""
    is_head: bool = False
    """Whether the cell is a heading."""
    is_hatched: bool = False
    """Whether the cell is drawn with hatching, as empty slots are."""


@dataclasses.dataclass(frozen=True, repr=False)
class View:
    """A table of cells that a notebook shows as HTML and a terminal as lines."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """Return the table as HTML, by the method that notebooks look for."""
        rows = "".join(map(_row_html, self.rows))
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
        num_columns = max((sum(c.span for c in row) for row in self.rows), default=0)
        width_q = [0] * num_columns
        for cell, first in _with_columns(self.rows):
            if cell.span == 1:
                width_q[first] = max(width_q[first], len(cell.text))
        for cell, first in _with_columns(self.rows):
            spanned = slice(first, first + cell.span)
            missing = len(cell.text) - sum(width_q[spanned]) - (cell.span - 1)
            width_q[first] += max(missing, 0)
        lines = [_line(row, width_q) for row in self.rows]
        return "\n".join([self.title, *lines, *self.notes])


def tint(rgb: tuple[int, int, int], strength: float) -> str:
    """Return the CSS of a translucent color; `strength` is its opacity, 0 to 1."""
    return f"rgba({rgb[0]},{rgb[1]},{rgb[2]},{strength:.2f})"


def hue(index: int) -> str:
    """Return the CSS of one of many colors; those of neighbouring indices lie far apart
    on the color wheel."""
    return f"hsla({round(index * 222.5) % 360},75%,50%,.4)"


def head(text: str, span: int = 1, color: str = "") -> Cell:
    """Return a cell that is a heading."""
    return Cell(text, color, span=span, is_head=True)


def heat(ratio: float) -> str:
    """Return the color of a load over the mean."""
    return tint(PALETTE[0], 0.55 * min(ratio / FULL_RATIO, 1.0))


def bar(share: float) -> str:
    """Return the color of a share of a whole, 0 to 1."""
    return tint(PALETTE[1], 0.55 * min(max(share, 0.0), 1.0))


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


def _row_html(row: tuple[Cell, ...]) -> str:
    """Return a row as an HTML element. Its headings are those of columns if it has
    nothing else, and else those of the row."""
    scope = "col" if all(cell.is_head for cell in row) else "row"
    cells = "".join(_cell_html(cell, scope) for cell in row)
    return f'<tr style="background:none">{cells}</tr>'


def _cell_html(cell: Cell, scope: str) -> str:
    """Return a cell as an HTML element. A heading without a word is a plain cell."""
    tag, where = "td", ""
    if cell.is_head and cell.text:
        tag, where = "th", f' scope="{scope}{"group" * (cell.span > 1)}"'
    span = f' colspan="{cell.span}"' if cell.span > 1 else ""
    hint = f' title="{html.escape(cell.hint)}"' if cell.hint else ""
    fill = f";background:{cell.color}" if cell.color else ""
    fill = f";{_HATCH}" if cell.is_hatched else fill
    text = html.escape(cell.text)
    return f'<{tag}{where}{span}{hint} style="{_CELL}{fill}">{text}</{tag}>'


def _with_columns(rows):
    """Yield each cell and the column where it begins."""
    for row in rows:
        firsts = itertools.accumulate((cell.span for cell in row), initial=0)
        yield from zip(row, firsts)


def _line(row: tuple[Cell, ...], width_q: list[int]) -> str:
    """Return a row as text, in columns of these widths.

    '..' stands for the columns after the first MAX_TEXT_COLUMNS.
    """
    words = []
    for cell, first in _with_columns([row]):
        if first >= MAX_TEXT_COLUMNS:
            words.append("..")
            break
        last = first + cell.span
        width = sum(width_q[first:last]) + cell.span - 1
        words.append(f"{cell.text or '-' * cell.is_hatched:>{width}}")
    return " ".join(words).rstrip()
