"""Views of arrays on devices, for export: a box is fetched where it lies, and no
more."""

from typing import Any

import jax
import numpy as np

from moejax.interop import boxes
from moejax.interop.boxes import Box
from moejax.interop.views import View, assign


def as_views(tree: Any) -> Any:
    """Return a tree of arrays, all of whose parts are on devices of this process, as a
    tree of views."""
    return jax.tree.map(_OnDevices, tree)


class _OnDevices(View):
    """An array on devices."""

    def __init__(self, array: jax.Array):
        order = tuple(range(array.ndim))
        super().__init__(array.shape, array.dtype, order, "an array on devices")
        shards = ((boxes.as_box(s.index, array.shape), s) for s in _own(array))
        self._shards = dict(shards)  # one of those that hold the same

    def fill(self, out: np.ndarray, box: Box) -> None:
        for held, shard in self._shards.items():
            part = boxes.common(box, held)
            if part is None:
                continue
            start = np.int32([at.start for at in boxes.slices_in(part, held)])
            # With an operand as start, one program serves all boxes of a shape.
            values = jax.lax.dynamic_slice(shard.data, start, boxes.shape_of(part))
            assign(out[boxes.slices_in(part, box)], np.asarray(values))


def _own(array: jax.Array):
    assert array.is_fully_addressable, array.sharding
    return array.addressable_shards
