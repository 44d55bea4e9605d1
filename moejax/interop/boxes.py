"""Boxes: the parts of arrays that are read, a range of indices in each dim."""

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]
"""First index and end in each dim."""


def as_box(index: Sequence[slice] | None, shape: Sequence[int]) -> Box:
    """Return the box of a tuple of slices; of the whole array if it is None.

    Dims without a slice are whole. Raises ValueError for more slices than dims, for a
    step, and for indices that are not slices.
    """
    index = tuple(index or ())
    if len(index) > len(shape):
        raise ValueError(f"{len(index)} slices for an array of shape {tuple(shape)}")
    box = []
    for part, size in zip(index, shape):
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise ValueError(f"only slices without a step are read, and not {part}")
        start, stop, _ = part.indices(size)
        box.append((start, max(start, stop)))
    return (*box, *((0, size) for size in shape[len(index) :]))


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of the array that a box cuts out."""
    return tuple(stop - start for start, stop in box)


def size_of(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(shape_of(box))


def common(first: Box, second: Box) -> Box | None:
    """Return the box that two boxes have in common, or None if they have no element in
    common."""
    both = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True)
    )
    return both if all(start < stop for start, stop in both) else None


def slices_in(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that cut a box out of the array of an outer box."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, outer)
    )


def joined(boxes: Sequence[Box], dim: int) -> list[Box]:
    """Return the boxes with those made one that differ in `dim` alone and meet or
    overlap there."""
    out: list[Box] = []
    for box in sorted(boxes, key=lambda box: (box[:dim], box[dim + 1 :], box[dim])):
        last = out[-1] if out else None
        is_next = (
            last is not None
            and last[:dim] + last[dim + 1 :] == box[:dim] + box[dim + 1 :]
            and box[dim][0] <= last[dim][1]
        )
        if is_next:
            stop = max(last[dim][1], box[dim][1])
            out[-1] = (*box[:dim], (last[dim][0], stop), *box[dim + 1 :])
        else:
            out.append(box)
    return out


def cut(box: Box, order: Sequence[int], max_elements: int) -> Iterator[Box]:
    """Yield boxes of at most `max_elements` that cover a box, in order.

    `order` lists the dims from the slowest to the fastest in the file. Slow dims are
    cut first, so that the parts are long runs of the file.
    """
    if size_of(box) <= max_elements or not order:
        yield box
        return
    dim, rest = order[0], order[1:]
    start, stop = box[dim]
    step = max(1, max_elements // (size_of(box) // (stop - start)))
    for first in range(start, stop, step):
        part = (*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :])
        yield from cut(part, rest, max_elements)
