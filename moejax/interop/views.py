"""Views: arrays made from tensors that are not read yet, of which any box can be read.

A view says how an array of ours consists of tensors on disk: transposed, stacked,
joined, or with other rows first. To read a box of the array it reads the boxes of the
tensors that this one needs, and no more.

    experts_efd = stacked([folder.view(f"experts.{e}.up.weight") for e in range(8)])
    up_edf = transposed(experts_efd, (0, 2, 1))
    up_edf.read((slice(2, 4),))    # reads experts 2 and 3

Each operation has an inverse among them, so that one table serves import and export:

    transposed(x, dims)             transposed, by the inverse permutation
    stacked([x, y, ..])             item(s, 0, i)
    joined([x, y, ..], dim)         taken(j, dim, range(first, end))
    taken(x, dim, permutation)      taken(t, dim, np.argsort(permutation))
"""

import abc
from collections.abc import Sequence

import numpy as np

from moejax.interop.boxes import Box, as_box, common, shape_of, slices_in

TRANSPOSE_BLOCK_BYTES = 256
"""Columns that are transposed at a time. NumPy alone would walk the cache line by line.
Four to six times the speed for 2 and 4 bytes (docs/decisions/0026)."""
SPARSE = 4
"""Indices that `taken` reads together may be spread over so many times their number."""


class View(abc.ABC):
    """An array that is not in memory, and any box of which can be read."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        order: tuple[int, ...],
        label: str,
    ):
        self.shape, self.dtype = shape, dtype
        self.order = order
        """Dims from the slowest to the fastest in the file."""
        self.label = label
        """File and name of the first tensor, for messages."""

    @abc.abstractmethod
    def fill(self, out: np.ndarray, box: Box) -> None:
        """Read a box, which is not empty, into an array of its shape, and cast to the
        array's dtype."""

    def read(
        self, index: Sequence[slice] | None = None, dtype: np.dtype | None = None
    ) -> np.ndarray:
        """Return the array, or the part that a tuple of slices cuts out.

        It has the view's dtype if `dtype` is None. Raises ValueError for indices that
        are no slices without a step, and what reading the files raises.
        """
        return self.read_box(as_box(index, self.shape), dtype)

    def read_box(self, box: Box, dtype: np.dtype | None = None) -> np.ndarray:
        """Return the part of the array in a box."""
        out = np.empty(shape_of(box), self.dtype if dtype is None else dtype)
        if out.size:
            self.fill(out, box)
        return out

    def take(self, dim: int, index_i: np.ndarray) -> "View":
        """Return the view that `taken` describes. Views that change no entries pass
        this on to what they are made from, so that less is read and decoded."""
        return _Taken(self, dim, index_i)


def held(array: np.ndarray) -> View:
    """Return the view of an array in memory, for export."""
    return _Held(array)


def transposed(view: View, dims: Sequence[int]) -> View:
    """Return a view whose dim i is dim `dims[i]` of another."""
    return _Transposed(view, tuple(dims))


def cast(view: View, dtype: np.dtype) -> View:
    """Return a view with another dtype; values are cast as they are read."""
    return view if view.dtype == dtype else _Cast(view, np.dtype(dtype))


def stacked(views: Sequence[View]) -> View:
    """Return views of one shape and dtype, stacked on a new first dim.

    Raises ValueError where their shapes or dtypes differ.
    """
    return _Stacked(views)


def joined(views: Sequence[View], dim: int) -> View:
    """Return views one after the other along a dim.

    Raises ValueError where their dtypes or their other dims differ.
    """
    return _Joined(views, dim % len(views[0].shape))


def item(view: View, dim: int, index: int) -> View:
    """Return the view at one index of a dim, without that dim."""
    return _Item(view, dim % len(view.shape), range(view.shape[dim])[index])


def taken(view: View, dim: int, indices: Sequence[int]) -> View:
    """Return a view that has these indices along a dim, in their order: a range, every
    second one, or a permutation.

    Where indices have gaps, as every second one has, what is between them is read too.
    """
    dim %= len(view.shape)
    index_i = np.asarray(indices, np.int64)
    assert index_i.ndim == 1
    assert not index_i.size or 0 <= index_i.min() <= index_i.max() < view.shape[dim]
    return view.take(dim, index_i)


def assign(out: np.ndarray, values: np.ndarray) -> None:
    """Copy values, with a cast, into an array that may be transposed against them."""
    is_along = values.ndim < 2 or values.strides[-1] == values.itemsize
    if is_along:
        np.copyto(out, values, casting="unsafe")
        return
    if out.dtype != values.dtype:  # a cast is fast only along rows
        same = np.empty(out.shape, values.dtype)
        assign(same, values)
        np.copyto(out, same, casting="unsafe")
        return
    step = TRANSPOSE_BLOCK_BYTES // out.itemsize
    for first in range(0, out.shape[-1], step):
        part = slice(first, first + step)
        np.copyto(out[..., part], values[..., part])


class _Held(View):
    def __init__(self, array: np.ndarray):
        order = tuple(range(array.ndim))
        super().__init__(
            array.shape, np.dtype(array.dtype), order, "an array in memory"
        )
        self._array = array

    def fill(self, out, box) -> None:
        assign(out, self._array[tuple(slice(*part) for part in box)])


class _Cast(View):
    def __init__(self, view: View, dtype: np.dtype):
        super().__init__(view.shape, dtype, view.order, view.label)
        self._view = view

    def fill(self, out, box) -> None:
        self._view.fill(out, box)


class _Transposed(View):
    def __init__(self, view: View, dims: tuple[int, ...]):
        assert sorted(dims) == list(range(len(view.shape))), (dims, view.shape)
        shape = tuple(view.shape[dim] for dim in dims)
        order = tuple(dims.index(dim) for dim in view.order)
        super().__init__(shape, view.dtype, order, view.label)
        self._view, self._dims = view, dims

    def take(self, dim, index_i) -> View:
        return _Transposed(self._view.take(self._dims[dim], index_i), self._dims)

    def fill(self, out, box) -> None:
        inverse = np.argsort(self._dims)
        inner = tuple(box[dim] for dim in inverse)
        assign(out, self._view.read_box(inner).transpose(self._dims))


class _Stacked(View):
    def __init__(self, views: Sequence[View]):
        first = views[0]
        for view in views[1:]:
            _check_dtype(first, view)
            if view.shape != first.shape:
                raise ValueError(
                    f"{view.label} has shape {list(view.shape)}, and {first.label} has "
                    f"{list(first.shape)}: they must be equal; download the folder "
                    "again"
                )
        order = (0, *(dim + 1 for dim in first.order))
        super().__init__((len(views), *first.shape), first.dtype, order, first.label)
        self._views = tuple(views)

    def fill(self, out, box) -> None:
        for i in range(*box[0]):
            self._views[i].fill(out[i - box[0][0]], box[1:])


class _Joined(View):
    def __init__(self, views: Sequence[View], dim: int):
        first = views[0]
        for view in views[1:]:
            _check_dtype(first, view)
            if _without(view.shape, dim) != _without(first.shape, dim):
                raise ValueError(
                    f"{view.label} has shape {list(view.shape)}, and {first.label} has "
                    f"{list(first.shape)}: they must be equal but in dim {dim}; "
                    "download the folder again"
                )
        size = sum(view.shape[dim] for view in views)
        shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
        order = (dim, *(other for other in first.order if other != dim))
        super().__init__(shape, first.dtype, order, first.label)
        self._views, self._dim = tuple(views), dim

    def fill(self, out, box) -> None:
        dim, first = self._dim, 0
        for view in self._views:
            end = first + view.shape[dim]
            own = (*box[:dim], (first, end), *box[dim + 1 :])
            part = common(box, own)
            if part is not None:
                start, stop = part[dim]
                inner = (*part[:dim], (start - first, stop - first), *part[dim + 1 :])
                view.fill(out[slices_in(part, box)], inner)
            first = end


class _Item(View):
    def __init__(self, view: View, dim: int, index: int):
        order = tuple(d - (d > dim) for d in view.order if d != dim)
        super().__init__(_without(view.shape, dim), view.dtype, order, view.label)
        self._view, self._dim, self._index = view, dim, index

    def fill(self, out, box) -> None:
        dim, index = self._dim, self._index
        inner = (*box[:dim], (index, index + 1), *box[dim:])
        self._view.fill(np.expand_dims(out, dim), inner)


class _Taken(View):
    def __init__(self, view: View, dim: int, index_i: np.ndarray):
        shape = (*view.shape[:dim], len(index_i), *view.shape[dim + 1 :])
        super().__init__(shape, view.dtype, view.order, view.label)
        self._view, self._dim, self._index_i = view, dim, index_i

    def take(self, dim, index_i) -> View:
        if dim != self._dim:
            return super().take(dim, index_i)
        return _Taken(self._view, dim, self._index_i[index_i])

    def fill(self, out, box) -> None:
        dim, (start, stop) = self._dim, box[self._dim]
        index_i = self._index_i[start:stop]
        first, end = int(index_i.min()), int(index_i.max()) + 1
        if end - first <= SPARSE * len(index_i):
            inner = (*box[:dim], (first, end), *box[dim + 1 :])
            if np.array_equal(index_i, np.arange(first, end)):
                self._view.fill(out, inner)
            else:
                assign(out, self._view.read_box(inner).take(index_i - first, axis=dim))
            return
        ends = np.flatnonzero(np.diff(index_i) != 1) + 1
        for run_i in np.split(np.arange(len(index_i)), ends):
            first = int(index_i[run_i[0]])
            inner = (*box[:dim], (first, first + len(run_i)), *box[dim + 1 :])
            at = (*[slice(None)] * dim, slice(run_i[0], run_i[-1] + 1))
            self._view.fill(out[at], inner)


def _check_dtype(first: View, view: View) -> None:
    if view.dtype != first.dtype:
        raise ValueError(
            f"{view.label} is {view.dtype}, and {first.label} is {first.dtype}: they "
            "must be equal; download the folder again"
        )


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]
