"""Arrays on devices, filled from views.

Each process reads what its own devices hold, and what several of them hold only once.
Beside the arrays the host needs as much as one device holds of one array.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from moejax.interop.views import Box, View, as_box

NUM_READERS = min(8, len(os.sched_getaffinity(0)))
"""Threads that read: one for each core that the process may use, up to 8."""


def to_arrays(
    views: Mapping[str, View],
    shardings: Mapping[str, Sharding],
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> dict[str, jax.Array]:
    """Return views as arrays with the shardings of the same names, in `dtype`.

    Every process that has devices of the shardings must call this. Values are rounded
    on the host, to nearest even. Raises ValueError for a view of integers or of 8-bit
    floats, which are no weights without their scales.
    """
    for view in views.values():
        is_float = jnp.issubdtype(view.dtype, jnp.floating)
        if not is_float or view.dtype.itemsize == 1:
            raise ValueError(
                f"{view.label} is {view.dtype}, which is no dtype of weights: if they "
                "are quantised, config.json must say how"
            )
    arrays = {}
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for name, view in views.items():
            sharding, devices = shardings[name], {}
            indices = sharding.addressable_devices_indices_map(view.shape)
            for device, index in indices.items():
                devices.setdefault(as_box(index, view.shape), []).append(device)
            parts = []
            for box, holders in devices.items():
                values = _read(view, box, np.dtype(dtype), pool)
                parts += [jax.device_put(values, device) for device in holders]
                jax.block_until_ready(parts)
            arrays[name] = jax.make_array_from_single_device_arrays(
                view.shape, sharding, parts
            )
    return arrays


def _read(
    view: View, box: Box, dtype: np.dtype, pool: ThreadPoolExecutor
) -> np.ndarray:
    """Return a box of a view, each thread reading a part of its first dim."""
    out = np.empty(tuple(map(len, box)), dtype)
    if not out.ndim or not out.size:
        return view.read(box, dtype)
    step = -(-len(out) // NUM_READERS)
    starts = range(0, len(out), step)
    filling = [
        pool.submit(view.fill, out[i : i + step], (box[0][i : i + step], *box[1:]))
        for i in starts
    ]
    for each in filling:
        each.result()
    return out
