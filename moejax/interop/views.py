"""Views: arrays made from tensors that are not read yet, of which any box can be read.

A view says how an array of ours consists of tensors on disk: transposed, stacked,
joined, or with other rows first. Reading a box of it copies what that box needs from
the memory-mapped files straight into the result.

    experts_efd = stacked([folder.view(f"experts.{e}.up.weight") for e in range(8)])
    up_edf = transposed(experts_efd, (0, 2, 1))
    up_edf.read((slice(2, 4),))    # reads experts 2 and 3

Each operation has an inverse among them, so that one table serves import and export:

    transposed(x, dims)             transposed, by the inverse permutation
    stacked([x, y, ..])             item(s, 0, i)
    joined([x, y], dim, places)     taken(j, dim, places[i])
    taken(x, dim, permutation)      taken(t, dim, np.argsort(permutation))
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

TRANSPOSE_BLOCK_BYTES = 256
"""Columns that are transposed at a time. NumPy alone would walk the cache line by line.
Four to six times the speed for 2 and 4 bytes (docs/decisions/0026)."""

Box = tuple[range, ...]
"""Indices in each dim that are read."""


@dataclasses.dataclass(frozen=True)
class View:
    """An array that is not in memory, and any box of which can be read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    label: str
    """File and name of the first tensor, for messages."""
    fill: Callable[[np.ndarray, Box], None]
    """Function that copies a box, which is not empty, into an array of its shape, with
    a cast to that array's dtype."""

    def read(
        self, index: Sequence[slice] | Box = (), dtype: np.dtype | None = None
    ) -> np.ndarray:
        """Return the array, or the part that slices or a box cut out of its first dims,
        in `dtype`, or in the view's own if it is None."""
        box = as_box(index, self.shape)
        out = np.empty(tuple(map(len, box)), self.dtype if dtype is None else dtype)
        if out.size:
            self.fill(out, box)
        return out


def as_box(index: Sequence[slice] | Box, shape: Sequence[int]) -> Box:
    """Return the box that slices cut out of an array; dims without a slice are
    whole."""
    assert len(index) <= len(shape), (index, shape)
    whole = tuple(map(range, shape))
    slices = [_slice(part) if isinstance(part, range) else part for part in index]
    return tuple(r[part] for r, part in zip(whole, slices)) + whole[len(slices) :]


def held(
    array: np.ndarray,
    label: str = "an array in memory",
    count: Callable[[int], None] = lambda num_bytes: None,
) -> View:
    """Return the view of an array in memory, or in a mapped file. `count` is told the
    number of bytes that are read."""

    def fill(out, box):
        part = array[tuple(map(_slice, box))]
        count(part.nbytes)
        assign(out, part)

    return View(array.shape, array.dtype, label, fill)


def transposed(view: View, dims: Sequence[int]) -> View:
    """Return a view whose dim i is dim `dims[i]` of another."""
    inverse = np.argsort(dims)

    def fill(out, box):
        view.fill(out.transpose(inverse), tuple(box[dim] for dim in inverse))

    return dataclasses.replace(
        view, shape=tuple(view.shape[dim] for dim in dims), fill=fill
    )


def cast(view: View, dtype: np.dtype) -> View:
    """Return a view with another dtype; values are cast as they are read."""
    return dataclasses.replace(view, dtype=np.dtype(dtype))


def stacked(views: Sequence[View]) -> View:
    """Return views of one shape, stacked on a new first dim, in the narrowest dtype
    that holds all of their values. Raises ValueError where their shapes differ."""
    first = _widened(views)
    for view in views:
        _check_same(first, view, first.shape, view.shape)

    def fill(out, box):
        for part, i in zip(out, box[0]):
            views[i].fill(part[...], box[1:])

    return dataclasses.replace(first, shape=(len(views), *first.shape), fill=fill)


def joined(views: Sequence[View], dim: int, places: Sequence[range]) -> View:
    """Return one view made of several, each at its places along a dim: one after the
    other, or in turns; in the narrowest dtype that holds all of their values. Raises
    ValueError where their other dims differ."""
    first = _widened(views)
    for view in views:
        _check_same(first, view, *(_without(v.shape, dim) for v in (first, view)))
    shape = list(first.shape)
    shape[dim] = sum(map(len, places))

    def fill(out, box):
        wanted = box[dim]
        assert wanted.step == 1
        for view, place in zip(views, places, strict=True):
            inner = range(
                _num_below(place, wanted.start), _num_below(place, wanted.stop)
            )
            if not inner:
                continue
            own = place[inner.start : inner.stop]
            at = slice(own.start - wanted.start, own.stop - wanted.start, own.step)
            view.fill(
                out[(*[slice(None)] * dim, at)], (*box[:dim], inner, *box[dim + 1 :])
            )

    return dataclasses.replace(first, shape=tuple(shape), fill=fill)


def item(view: View, dim: int, index: int) -> View:
    """Return the view at one index of a dim, without that dim."""

    def fill(out, box):
        inner = (*box[:dim], range(index, index + 1), *box[dim:])
        view.fill(np.expand_dims(out, dim), inner)

    return dataclasses.replace(view, shape=_without(view.shape, dim), fill=fill)


def taken(view: View, dim: int, indices: range | np.ndarray) -> View:
    """Return a view that has these indices along a dim, in their order. A range reads
    them alone; of an array, what is between them is read too."""
    shape = (*view.shape[:dim], len(indices), *view.shape[dim + 1 :])

    def fill(out, box):
        wanted = indices[_slice(box[dim])]
        if isinstance(wanted, range):
            view.fill(out, (*box[:dim], wanted, *box[dim + 1 :]))
            return
        between = range(int(wanted.min()), int(wanted.max()) + 1)
        part = view.read((*box[:dim], between, *box[dim + 1 :]))
        assign(out, part.take(wanted - between.start, axis=dim))

    return dataclasses.replace(view, shape=shape, fill=fill)


def assign(out: np.ndarray, values: np.ndarray) -> None:
    """Copy values, with a cast, into an array that may be transposed against them."""
    order = np.argsort([-stride for stride in out.strides], kind="stable")
    out, values = out.transpose(order), values.transpose(order)
    if out.ndim < 2 or values.strides[-1] == values.itemsize:
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


def _slice(part: range) -> slice:
    return slice(part.start, part.stop, part.step)


def _num_below(place: range, bound: int) -> int:
    """Return how many entries of a range are below a bound."""
    return min(len(place), max(0, -(-(bound - place.start) // place.step)))


def _widened(views: Sequence[View]) -> View:
    """Return the first of some views, in the narrowest dtype that holds the values of
    all: float32 for bfloat16 and float16."""
    dtypes = {view.dtype for view in views}
    if len(dtypes) == 1:
        return views[0]
    return cast(views[0], np.result_type(np.float32, *map(numpy_dtype, dtypes)))


def numpy_dtype(dtype: np.dtype) -> np.dtype:
    """Return a dtype whose order NumPy knows: float32 in place of bfloat16."""
    return np.dtype(np.float32) if dtype.name == "bfloat16" else dtype


def _check_same(first: View, view: View, of_first, of_view) -> None:
    if of_view != of_first:
        raise ValueError(
            f"{view.label} has shape {list(view.shape)}, and {first.label} has "
            f"{list(first.shape)}: they must be equal, so they belong to different "
            "models"
        )


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]
