"""Numbers, arrays and records in the form that the page's data has."""

import base64
import itertools
import sys

import numpy as np

from moejax.perf.traffic import over_mean

MAX_TEXT = 1000
"""Largest number of characters of a text from a run's files."""
MAX_ITEMS, MAX_DEPTH = 1000, 6
"""Bounds on the lists and dicts from a run's files."""
MAX_INT = 2**53


def short(number: float) -> float | int | None:
    """Return a number rounded to five significant digits, from 100,000 on to a whole
    number; None if it is not finite.

    >>> short(0.123456), short(2.0), short(1234567.8), short(math.nan)
    (0.12346, 2, 1234568, None)
    """
    if not abs(number) <= sys.float_info.max:
        return None
    value = round(number) if abs(number) >= 1e5 else float(f"{number:.5g}")
    return int(value) if value == int(value) and abs(value) < MAX_INT else float(value)


def plain(value, depth: int = MAX_DEPTH):
    """Return a value of a JSON line with short numbers, and with bounds on the sizes of
    its parts; None for what is not finite or lies too deep."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list | dict):
        return _plain_items(value, depth - 1) if depth else None
    if isinstance(value, float):
        return short(value)
    is_huge = isinstance(value, int) and abs(value) > MAX_INT
    return None if is_huge else value


def _plain_items(value: list | dict, depth: int) -> list | dict:
    """Return a list or a dict with its first items as `plain` returns them."""
    if isinstance(value, list):
        return [plain(item, depth) for item in value[:MAX_ITEMS]]
    items = itertools.islice(value.items(), MAX_ITEMS)
    return {clean_text(name): plain(item, depth) for name, item in items}


def clean_text(text: str) -> str:
    """Return a text that UTF-8 can express, cut to MAX_TEXT characters."""
    whole = text.encode("utf-8", "replace").decode()
    return whole if len(whole) <= MAX_TEXT else whole[: MAX_TEXT - 2] + ".."


def left_out(count: int, one: str, several: str = "") -> str:
    """Return that so many things are left out.

    >>> left_out(1, "damaged line"), left_out(2, "damaged line")
    ('1 damaged line is left out', '2 damaged lines are left out')
    """
    if count == 1:
        return f"1 {one} is left out"
    return f"{count} {several or one + 's'} are left out"


def short_list(number_n: np.ndarray) -> list[float | int | None]:
    """Return numbers as `short` does."""
    return [short(number) for number in number_n.tolist()]


def encoded(array: np.ndarray, dtype: str) -> str:
    """Return the bytes of an array, little-endian, as base64."""
    return base64.b64encode(np.ascontiguousarray(array, dtype)).decode()


def as_number(value) -> float:
    """Return a value as a number; NaN for null, which stands for a value that was not
    finite, and for anything that is not a number."""
    is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return float(value) if is_number else np.nan


def table_over_mean(table) -> np.ndarray | None:
    """Return a table of loads over the mean of each layer; None if it is not a table of
    finite numbers."""
    try:
        load_lx = np.asarray(table, np.float32)
    except (ValueError, TypeError, OverflowError):
        return None
    is_table = load_lx.ndim == 2 and load_lx.size and np.isfinite(load_lx).all()
    return over_mean(load_lx).astype(np.float32) if is_table else None
