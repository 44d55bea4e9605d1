"""Numbers, texts and arrays in the form that the page's data has, within bounds."""

import base64
import dataclasses
import itertools
import sys

import numpy as np

MAX_TEXT = 1000
"""Largest number of characters of a text from a run's files."""
MAX_ITEMS, MAX_DEPTH = 1000, 6
"""Bounds on the lists and dicts from a run's files."""
MAX_INT = 2**53
MAX_NUMBER = 1e100
"""Largest number that is believed: sums of such numbers are finite."""


def short(number: float) -> float | int | None:
    """Return a number rounded to five significant digits, from 100,000 on to a whole
    number; None if it is not finite.

    >>> short(0.123456), short(2.0), short(1234567.8), short(float("nan"))
    (0.12346, 2, 1234568, None)
    """
    if not abs(number) <= sys.float_info.max:
        return None
    value = round(number) if abs(number) >= 1e5 else float(f"{number:.5g}")
    return int(value) if value == int(value) and abs(value) < MAX_INT else float(value)


def short_list(number_n: np.ndarray) -> list[float | int | None]:
    """Return numbers as `short` does."""
    return [short(number) for number in number_n.tolist()]


def plain(value, depth: int = MAX_DEPTH):
    """Return a value of a JSON line with short numbers, and with bounds on the sizes of
    its parts; None for what is not finite or lies too deep."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list | dict) and not depth:
        return None
    if isinstance(value, list):
        return [plain(item, depth - 1) for item in value[:MAX_ITEMS]]
    if isinstance(value, dict):
        items = itertools.islice(value.items(), MAX_ITEMS)
        return {clean_text(name): plain(item, depth - 1) for name, item in items}
    if isinstance(value, float):
        return short(value)
    is_huge = isinstance(value, int) and abs(value) > MAX_INT
    return None if is_huge else value


def clean_text(text: str) -> str:
    """Return a text that UTF-8 can express, cut to MAX_TEXT characters."""
    whole = text.encode("utf-8", "replace").decode()
    return whole if len(whole) <= MAX_TEXT else whole[: MAX_TEXT - 2] + ".."


def as_number(value) -> float:
    """Return a value as a number; NaN for null, which stands for a value that was not
    finite, and for anything that is not a number."""
    is_number = isinstance(value, int | float) and abs(value) <= MAX_NUMBER
    return float(value) if is_number else np.nan


def encoded(array: np.ndarray, dtype: str) -> str:
    """Return the bytes of an array, little-endian, as base64."""
    return base64.b64encode(np.ascontiguousarray(array, dtype)).decode()


def left_out(count: int, one: str) -> str:
    """Return the words of a note that `count` things are left out.

    >>> left_out(1, "damaged line"), left_out(2, "damaged line")
    ('1 damaged line is left out', '2 damaged lines are left out')
    """
    return (
        f"{count} {one} is left out" if count == 1 else f"{count} {one}s are left out"
    )


def evenly[T](items: list[T], max_items: int) -> list[T]:
    """Return up to `max_items` items at even distances, always the first and the last.

    >>> evenly(list(range(10)), 4), evenly([1, 2], 4)
    ([0, 3, 6, 9], [1, 2])
    """
    if len(items) <= max_items:
        return items
    index = np.linspace(0, len(items) - 1, max(2, max_items)).round().astype(int)
    return [items[i] for i in index]


def thinning_note(what: str, num_shown: int, num_items: int) -> list[str]:
    """Return a note that some of the items are shown; none where all of them are."""
    if num_shown == num_items:
        return []
    return [f"{what}: {num_shown} of {num_items} are shown, at even distances"]


@dataclasses.dataclass(frozen=True)
class Binned:
    """Numbers of steps by bin of equally many steps, [bin, number]."""

    has: np.ndarray
    """Whether a step of the bin has the number, finite or not."""
    min: np.ndarray
    """Smallest finite number; NaN where there is none, as in the next two."""
    mean: np.ndarray
    max: np.ndarray


def binned(number_nc: np.ndarray, width: int) -> Binned:
    """Put numbers of steps [n, c] into bins of `width` steps. NaN is a number that a
    step does not have, and an infinite one is there but does not count."""
    begin_b = np.arange(0, len(number_nc), width)
    is_finite_nc = np.isfinite(number_nc)
    num_bc = np.add.reduceat(is_finite_nc, begin_b, dtype=np.int64)

    def over_bins(reduce: np.ufunc, fill: float) -> np.ndarray:
        filled_nc = np.where(is_finite_nc, number_nc, fill)
        return np.where(num_bc, reduce.reduceat(filled_nc, begin_b), np.nan)

    min_bc, max_bc = over_bins(np.minimum, np.inf), over_bins(np.maximum, -np.inf)
    mean_bc = over_bins(np.add, 0) / np.maximum(num_bc, 1)
    return Binned(
        has=np.logical_or.reduceat(~np.isnan(number_nc), begin_b),
        min=min_bc,
        # A mean of equal numbers may differ from them by rounding.
        mean=np.clip(mean_bc, min_bc, max_bc),
        max=max_bc,
    )
