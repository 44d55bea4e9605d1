"""Signs of a terminal: bars and small curves, in Unicode or in ASCII."""

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import TextIO


@dataclasses.dataclass(frozen=True)
class Signs:
    """Characters that a terminal can show."""

    levels: str
    """Heights of a curve, from the lowest to the highest."""
    parts: str
    """Parts of a bar's last cell, from the smallest to the whole cell."""
    done: str
    left: str


UNICODE = Signs("▁▂▃▄▅▆▇█", "▏▎▍▌▋▊▉█", "━", "─")
ASCII = Signs("_.-:=+*#", "#", "#", "-")


def signs_for(stream: TextIO, environ: Mapping[str, str] = os.environ) -> Signs:
    """Return the signs for a stream: UNICODE if both its encoding and the locale are
    UTF-8.

    In the locale C Python writes UTF-8, and the terminal may not show it.
    """
    names = ("LC_ALL", "LC_CTYPE", "LANG")
    locale = next((environ[name] for name in names if environ.get(name)), "")
    if environ.get("PYTHONUTF8") == "1":
        locale = "utf-8"
    both = (locale, getattr(stream, "encoding", None) or "")
    is_utf8 = all("utf8" in text.lower().replace("-", "") for text in both)
    return UNICODE if is_utf8 else ASCII


def spark(values: Sequence[float | None], width: int, signs: Signs) -> str:
    """Return a curve of at most `width` characters, each the mean of equally many
    values, from the lowest level to the highest. Where no value is finite there is a
    blank."""
    num = min(width, len(values))
    edges = [i * len(values) // max(num, 1) for i in range(num + 1)]
    means = [mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [x for x in means if x is not None] or [0.0]
    low, top = min(finite), len(signs.levels) - 1
    scale = top / ((max(finite) - low) or 1.0)
    levels = [None if x is None else round(scale * (x - low)) for x in means]
    return "".join(" " if level is None else signs.levels[level] for level in levels)


def bar(share: float, width: int, signs: Signs) -> str:
    """Return a bar that fills a share, from 0 to 1, of `width` cells. One above 0 has
    at least the smallest part of a cell."""
    num_parts = len(signs.parts)
    filled = math.ceil(min(max(share, 0.0), 1.0) * width * num_parts)
    whole, part = divmod(filled, num_parts)
    return signs.parts[-1] * whole + (signs.parts[part - 1] if part else "")


def gauge(share: float, width: int, signs: Signs) -> tuple[str, str]:
    """Return the done and the remaining part of a line of `width` cells."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return signs.done * done, signs.left * (width - done)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the finite values, or None if there is none."""
    finite = [x for x in values if x is not None and math.isfinite(x)]
    return sum(finite) / len(finite) if finite else None


class Curve:
    """A curve of a growing number of values as at most `max_points` means of equally
    many values each."""

    def __init__(self, max_points: int = 512) -> None:
        self._max_points, self._stride = max_points, 1
        self._means: list[float | None] = []
        self._rest: list[float] = []

    def append(self, value: float) -> None:
        """Add a value; the number of values in a mean doubles when the points are too
        many."""
        self._rest.append(value)
        if len(self._rest) < self._stride:
            return
        self._means.append(mean(self._rest))
        self._rest = []
        if len(self._means) >= self._max_points:
            self._means = [
                mean(self._means[i : i + 2]) for i in range(0, len(self._means), 2)
            ]
            self._stride *= 2

    def points(self) -> list[float | None]:
        """Return the means, the last one of the values that are left over."""
        rest = list(self._rest)
        return [*self._means, mean(rest)] if rest else list(self._means)
