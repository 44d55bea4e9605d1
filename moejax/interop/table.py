"""Rows of a table between tensors on disk and our parameters, read in both directions.

A row names tensors of equal shape on disk, parameters of ours, and the steps from the
former to the latter. Each step has an inverse, so that a row serves import and export.
"""

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

from moejax.interop import views
from moejax.interop.views import View


class Step(abc.ABC):
    """A bijection between lists of arrays."""

    @abc.abstractmethod
    def load(self, arrays: list[View]) -> list[View]:
        """Return the arrays on our side of this step."""

    @abc.abstractmethod
    def save(self, arrays: list[View]) -> list[View]:
        """Return the arrays on the disk's side of this step."""


@dataclasses.dataclass(frozen=True)
class Transpose(Step):
    """Every array with its dims in another order."""

    dims: tuple[int, ...] = (1, 0)

    def load(self, arrays):
        return [views.transposed(array, self.dims) for array in arrays]

    def save(self, arrays):
        dims = [int(dim) for dim in np.argsort(self.dims)]
        return [views.transposed(array, dims) for array in arrays]


@dataclasses.dataclass(frozen=True)
class Permute(Step):
    """Every array with the entries of a dim in another order."""

    dim: int
    order: tuple[int, ...]
    """Entry on disk of each of our entries."""

    def load(self, arrays):
        return [views.taken(array, self.dim, np.array(self.order)) for array in arrays]

    def save(self, arrays):
        order = np.argsort(self.order)
        return [views.taken(array, self.dim, order) for array in arrays]


@dataclasses.dataclass(frozen=True)
class Split(Step):
    """One array cut into several along a dim."""

    dim: int
    sizes: tuple[int, ...]

    def load(self, arrays):
        (array,) = arrays
        return [views.taken(array, self.dim, part) for part in self._places()]

    def save(self, arrays):
        return [views.joined(arrays, self.dim, self._places())]

    def _places(self):
        ends = np.cumsum(self.sizes).tolist()
        return [range(end - size, end) for end, size in zip(ends, self.sizes)]


@dataclasses.dataclass(frozen=True)
class Stack(Step):
    """Several arrays as one, on a new first dim."""

    def load(self, arrays):
        return [views.stacked(arrays)]

    def save(self, arrays):
        (array,) = arrays
        return [views.item(array, 0, i) for i in range(array.shape[0])]


@dataclasses.dataclass(frozen=True)
class Squeeze(Step):
    """Every array without its first dim, which is 1."""

    def load(self, arrays):
        return [views.item(array, 0, 0) for array in arrays]

    def save(self, arrays):
        return [views.stacked([array]) for array in arrays]


@dataclasses.dataclass(frozen=True)
class Row:
    """Tensors on disk and the parameters that are the same numbers."""

    tensors: tuple[str, ...]
    """Names in the file, within a layer if the row is one of a layer."""
    shape: tuple[int, ...]
    """The shape of each tensor on disk."""
    params: tuple[str, ...]
    """Paths in our tree, with dots, within a layer likewise."""
    steps: tuple[Step, ...] = ()

    def load(self, tensors: Sequence[View]) -> dict[str, View]:
        """Return our parameters, made from the tensors."""
        arrays = list(tensors)
        for step in self.steps:
            arrays = step.load(arrays)
        return dict(zip(self.params, arrays, strict=True))

    def save(self, params: dict[str, View]) -> dict[str, View]:
        """Return the tensors, made from a dict that has our parameters."""
        arrays = [params[name] for name in self.params]
        for step in reversed(self.steps):
            arrays = step.save(arrays)
        for name, array in zip(self.tensors, arrays, strict=True):
            assert array.shape == self.shape, (name, array.shape, self.shape)
        return dict(zip(self.tensors, arrays, strict=True))


def half_split(num_heads: int, width: int, rotated: int | None = None) -> Permute:
    """Return the step by which rows of heads, whose rotary pairs are neighbours
    (2j, 2j + 1), become rows whose pairs are halves (j, j + i/2).

    `rotated` is the number of rows at the end of a head that are rotated; None: all.
    """
    start = 0 if rotated is None else width - rotated
    head = [*range(start), *range(start, width, 2), *range(start + 1, width, 2)]
    heads = range(0, num_heads * width, width)
    return Permute(0, tuple(first + row for first in heads for row in head))
