"""A row of a comparison: what a paper published, and what our price says."""

import dataclasses
import re

TOLERANCE = 0.15
"""Largest relative difference at which a figure counts as reproduced."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One published figure beside its price."""

    what: str
    published: float | str
    """A number, or words where the paper gives no number to compare with."""
    priced: float | str
    unit: str = ""
    measured: str = ""
    """What our own testbed measured, where it did."""
    note: str = ""
    """Reason, where the price is not within the tolerance."""
    tolerance: float = TOLERANCE

    @property
    def ratio(self) -> float | None:
        """Priced over published; None without two numbers above 0."""
        pair = self.priced, self.published
        if any(isinstance(x, str) or x == 0 for x in pair):
            return None
        return self.priced / self.published

    @property
    def verdict(self) -> str:
        """Whether the price reproduces the figure: 'yes', 'no', or '' without two
        figures."""
        if self.ratio is None:
            same = self.priced == self.published
            return "yes" if same and self.published != "" else ""
        return "yes" if abs(self.ratio - 1) <= self.tolerance else "no"


def noted(what: str, published: float, priced: float, unit: str, reason: str) -> Row:
    """Return a row that has the reason where the price is not the published figure."""
    row = Row(what, published, priced, unit)
    return row if row.verdict == "yes" else dataclasses.replace(row, note=reason)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of one table or figure of a paper."""

    title: str
    setting: str
    """Settings, with those that are ours."""
    rows: tuple[Row, ...]


def markdown(table: Table) -> str:
    """Return a table as Markdown."""
    has_measured = any(row.measured for row in table.rows)
    head = ["", "published", "priced", *["measured"] * has_measured, "reproduced", ""]
    align = ["---", "--:", "--:", *["--:"] * has_measured, "---", "---"]
    lines = [f"**{table.title}.** {table.setting}", "", _line(head), _line(align, "|")]
    for row in table.rows:
        cells = [row.what, _figure(row.published, row), _figure(row.priced, row)]
        cells += [row.measured] * has_measured
        lines.append(_line([*cells, row.verdict, row.note]))
    return "\n".join(lines)


def _line(cells: list[str], sep: str = " | ") -> str:
    if sep == "|":
        return f"|{sep.join(cells)}|"
    return re.sub(r"  +", " ", f"| {sep.join(cells)} |")


def _figure(value: float | str, row: Row) -> str:
    if isinstance(value, str):
        return value
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number}{' ' * bool(row.unit)}{row.unit}"
