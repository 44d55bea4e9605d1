"""Rates of grouped products that others published, as bars for our own.

tokamax_h100.json beside this file has those of tokamax on an H100, from the files of
its own search for tiles; it says where they are from.
"""

import functools
import json
import pathlib
from typing import NamedTuple

from moejax.kernels.shapes import ProductShape

PATH = pathlib.Path(__file__).with_name("tokamax_h100.json")
HOPPERS = ("NVIDIA H100", "NVIDIA H200")
"""Begins of the kinds of devices that a bar is shown for. An H200 has the
multiprocessors of an H100 and a faster memory."""
MAX_FACTOR = 2
"""Largest factor between the rows of a bar and those of the shape that it is shown
for."""


class Bar(NamedTuple):
    """The fastest published run of a grouped product, on nearly even groups."""

    impl: str
    which: str
    shape: ProductShape
    msec: float
    version: str
    """Version of the library."""

    @property
    def tflops(self) -> float:
        """Rate in TFLOP/s."""
        return 2 * self.shape.rows * self.shape.d * self.shape.f / self.msec / 1e9


@functools.cache
def bars() -> tuple[Bar, ...]:
    """Return all published runs."""
    rates = json.loads(PATH.read_text(encoding="utf-8"))["rates"]
    return tuple(
        Bar(impl, which, ProductShape(*sizes), msec, version)
        for impl, which, *sizes, msec, version in rates
    )


def find(which: str, shape: ProductShape, device_kind: str) -> Bar | None:
    """Return the bar of a pass: the one with the highest rate of those with the same
    widths and groups and with the nearest number of rows; None if there is none, or the
    device is no Hopper GPU."""
    if not device_kind.startswith(HOPPERS):
        return None

    def factor(bar: Bar) -> float:
        rows = sorted((bar.shape.rows, shape.rows))
        return rows[1] / rows[0]

    fitting = [
        bar
        for bar in bars()
        if bar.which == which
        and (bar.shape.d, bar.shape.f, bar.shape.groups)
        == (shape.d, shape.f, shape.groups)
        and factor(bar) <= MAX_FACTOR
    ]
    return min(fitting, key=lambda bar: (factor(bar), -bar.tflops), default=None)
