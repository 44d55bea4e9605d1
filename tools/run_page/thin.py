"""Thin what a run has recorded while it is read, so that its size has a bound.

Numbers of steps go into bins, which keep the smallest, the mean and the largest number
(`Bins`). Tables and records are dropped evenly, and the first and the last stay
(`Thinned`). What is kept is a function of what was taken, in its order: a file that is
read in pieces leaves the same as one that is read at once.

Letters in names: n steps that are taken together, b bins, c numbers of a step.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

BATCH = 256
"""Number of steps that are put into bins at once."""
MAX_NUMBER = 1e100
"""Largest number that is believed: sums of such numbers are finite."""


@dataclasses.dataclass(frozen=True)
class Binned:
    """Numbers of steps by bin. A bin without a step is left out."""

    width: int
    """Steps in a bin, of which the log may lack some."""
    step_b: np.ndarray
    """Middle of the steps of each bin."""
    has_bc: np.ndarray
    """Whether a step of the bin has the number, finite or not."""
    min_bc: np.ndarray
    """Smallest finite number; NaN where there is none, as in the next two."""
    mean_bc: np.ndarray
    max_bc: np.ndarray


class Bins:
    """Bins of equally many steps, at most `max_bins`, which must be even.

    When a step lies beyond the last bin, pairs of bins become one.
    """

    def __init__(self, num_numbers: int, max_bins: int) -> None:
        assert max_bins % 2 == 0, max_bins
        shape = max_bins, num_numbers + 1  # the last is the step itself
        self._width, self._first = 1, None
        self._num_bc = np.zeros(shape, np.int64)
        self._num_finite_bc = np.zeros(shape, np.int64)
        self._sum_bc = np.zeros(shape)
        self._min_bc = np.full(shape, np.inf)
        self._max_bc = np.full(shape, -np.inf)
        self._waiting: list[tuple[int, Sequence[float], Sequence[bool]]] = []

    def take(self, step: int, number_c: Sequence[float], has_c: Sequence[bool]) -> None:
        """Take the numbers of a step, and which of them it has. Steps rise from call to
        call. A number that is not finite, or beyond MAX_NUMBER, counts as there but not
        in min, mean and max."""
        self._waiting.append((step, number_c, has_c))
        if len(self._waiting) == BATCH:
            self._put()

    def binned(self) -> Binned:
        """Return what was taken so far."""
        whole = copy.copy(self)
        if self._waiting:
            whole = copy.deepcopy(self)
            whole._put()
        return whole._binned()

    def _put(self) -> None:
        """Put the steps that wait into their bins."""
        step_n = np.array([step for step, _, _ in self._waiting])
        if self._first is None:
            self._first = int(step_n[0])
        while (step_n[-1] - self._first) // self._width >= len(self._sum_bc):
            self._widen()
        ones_n = np.ones(len(step_n), bool)
        number_nc = np.column_stack([[x for _, x, _ in self._waiting], step_n])
        has_nc = np.column_stack([[x for _, _, x in self._waiting], ones_n])
        self._waiting = []
        is_finite_nc = has_nc & (np.abs(number_nc) <= MAX_NUMBER)  # False for NaN
        bin_n = (step_n - self._first) // self._width
        b, start = np.unique(bin_n, return_index=True)
        self._num_bc[b] += np.add.reduceat(has_nc, start, dtype=np.int64)
        self._num_finite_bc[b] += np.add.reduceat(is_finite_nc, start, dtype=np.int64)
        self._sum_bc[b] += np.add.reduceat(np.where(is_finite_nc, number_nc, 0), start)
        low_nc = np.where(is_finite_nc, number_nc, np.inf)
        high_nc = np.where(is_finite_nc, number_nc, -np.inf)
        self._min_bc[b] = np.minimum(
            self._min_bc[b], np.minimum.reduceat(low_nc, start)
        )
        self._max_bc[b] = np.maximum(
            self._max_bc[b], np.maximum.reduceat(high_nc, start)
        )

    def _widen(self) -> None:
        """Make bins of twice the width, each of two bins."""
        self._width *= 2
        num_bins, half = len(self._sum_bc), len(self._sum_bc) // 2
        for array_bc, merge, rest in (
            (self._num_bc, np.add, 0),
            (self._num_finite_bc, np.add, 0),
            (self._sum_bc, np.add, 0),
            (self._min_bc, np.minimum, np.inf),
            (self._max_bc, np.maximum, -np.inf),
        ):
            merged_bc = merge(array_bc[0:num_bins:2], array_bc[1:num_bins:2])
            array_bc[:half], array_bc[half:] = merged_bc, rest

    def _binned(self) -> Binned:
        has_step_b = self._num_bc[:, -1] > 0
        num_bc = self._num_finite_bc[has_step_b]
        is_none_bc = num_bc == 0
        sum_bc, min_bc, max_bc = (
            np.where(is_none_bc, np.nan, array_bc[has_step_b])
            for array_bc in (self._sum_bc, self._min_bc, self._max_bc)
        )
        mean_bc = sum_bc / np.maximum(num_bc, 1)
        return Binned(
            width=self._width,
            step_b=np.rint(mean_bc[:, -1]).astype(np.int64),
            has_bc=self._num_bc[has_step_b, :-1] > 0,
            min_bc=min_bc[:, :-1],
            # A mean of equal numbers may differ from them by rounding.
            mean_bc=np.clip(mean_bc, min_bc, max_bc)[:, :-1],
            max_bc=max_bc[:, :-1],
        )


class Thinned[T]:
    """Items in order, of which every one, every second, every fourth, .. is kept, so
    that their sizes stay within a budget; and the last one."""

    def __init__(self, budget: int, size_of: Callable[[T], int] = lambda _: 1) -> None:
        self.num_taken = self.num_bad = 0
        self._budget, self._size_of, self._stride = budget, size_of, 1
        self._kept: dict[int, T] = {}
        self._size = 0
        self._last: tuple[int, Callable[[], T | None]] = -1, lambda: None

    def take(self, make: Callable[[], T | None]) -> None:
        """Take the next item. It is made only if it is kept; `make` returns None where
        there turns out to be no item, which is counted in `num_bad`."""
        number = self.num_taken
        self.num_taken += 1
        self._last = number, make
        if number % self._stride:
            return
        item = make()
        if item is None:
            self.num_bad += 1
            return
        self._last = number, lambda: item
        self._kept[number] = item
        self._size += self._size_of(item)
        while self._size > self._budget and len(self._kept) > 2:
            self._stride *= 2
            for other in [n for n in self._kept if n % self._stride]:
                self._size -= self._size_of(self._kept.pop(other))

    def items(self) -> list[T]:
        """Return the items that are kept, in order, with the last one."""
        number, make = self._last
        last = None if number in self._kept else make()
        return [*self._kept.values(), *([] if last is None else [last])]
