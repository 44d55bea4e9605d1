"""Views of arrays on devices, for export: a box is fetched where it lies, and no
more."""

from typing import Any

import jax
import numpy as np

from moejax.interop.views import View, as_box, assign


def as_views(tree: Any) -> Any:
    """Return a tree of arrays, all of whose parts are on devices of this process, as a
    tree of views."""
    return jax.tree.map(_as_view, tree)


def _as_view(array: jax.Array) -> View:
    assert array.is_fully_addressable, array.sharding
    shard_by_box = {  # one of those that hold the same
        as_box(shard.index, array.shape): shard.data
        for shard in array.addressable_shards
    }

    def fill(out: np.ndarray, box: tuple[range, ...]) -> None:
        for held, data in shard_by_box.items():
            part = [
                range(max(b.start, h.start), min(b.stop, h.stop))
                for b, h in zip(box, held)
            ]
            if not all(part):
                continue
            start = np.int32([p.start - h.start for p, h in zip(part, held)])
            # With an operand as start, one program serves all boxes of a shape.
            values = jax.lax.dynamic_slice(data, start, tuple(map(len, part)))
            at = [slice(p.start - b.start, p.stop - b.start) for p, b in zip(part, box)]
            assign(out[tuple(at)], np.asarray(values))

    return View(array.shape, array.dtype, "an array on devices", fill)
