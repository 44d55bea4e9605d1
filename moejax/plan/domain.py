"""Which devices of a group share gathered experts, in plain Python: Domain.

    axes dc = 4, expert = 2, shared = (2, 1): data centres 0 and 1 are a domain for each
    index of expert, 2 and 3 another one

Rows go to the device of another domain that has the same place in it.
"""

import dataclasses
import itertools
import math
import typing
from typing import Literal

Form = Literal["none", "residual", "delta"]
"""How experts that move inside a domain are compressed
(moejax.moe.weights.compression); 'none' is an all_gather of weights."""


@dataclasses.dataclass(frozen=True)
class Domain:
    """Along each mesh axis of the group (Layout.axes): how many devices there are, and
    how many in a row share their experts."""

    sizes: tuple[int, ...]
    shared: tuple[int, ...]
    form: Form = "none"
    ratio: float = 1.0
    """Compressed experts take so many times fewer bytes."""
    gradient_compression: float | None = None
    """And their gradients, on the way to the owners; None: they travel whole."""

    def __post_init__(self) -> None:
        forms = typing.get_args(Form)
        if self.form not in forms or not self.ratio >= 1:
            raise ValueError(
                f"a domain's form='{self.form}' and ratio={self.ratio} must be one of "
                f"{', '.join(forms)}, and at least 1"
            )
        if self.gradient_compression is not None and not self.gradient_compression >= 1:
            raise ValueError(
                f"a domain's gradient_compression={self.gradient_compression} must be "
                "at least 1, or None"
            )
        for name in ("sizes", "shared"):  # JSON makes them lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes, shared = self.sizes, self.shared
        fits = len(sizes) == len(shared) and min(shared, default=0) >= 1
        if not fits or any(n % s for n, s in zip(sizes, shared)):
            near = tuple(math.gcd(n, max(s, 1)) for n, s in zip(sizes, shared))
            raise ValueError(
                f"domain={shared} must have a divisor of each axis of the group "
                f"{sizes}: use {near or sizes}"
            )

    @property
    def num_devices(self) -> int:
        """In one domain."""
        return math.prod(self.shared)

    def members(self) -> list[list[int]]:
        """Devices of the group by domain, each in the order in which it gathers their
        experts: by number."""
        counts = [n // s for n, s in zip(self.sizes, self.shared)]
        return [
            [self._number(which, place) for place in _indices(self.shared)]
            for which in _indices(counts)
        ]

    def _number(self, which: tuple[int, ...], place: tuple[int, ...]) -> int:
        number = 0
        for size, shared, i, j in zip(self.sizes, self.shared, which, place):
            number = number * size + i * shared + j
        return number


def _indices(sizes) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in sizes)))
