"""Arrays on devices, filled from views chunk by chunk.

Each process reads what its own devices hold, and what several of them hold only once.
Beside the arrays the host needs a few chunks of CHUNK_BYTES, however large they are.

    box      the part of an array that one device holds
    cover    boxes joined along the fastest dim of the file: where devices share the
             rows of a tensor on disk, a row is read once
    chunk    a part of a cover, cut along the slowest dims of the file
"""

import os
import queue
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from moejax.interop import boxes
from moejax.interop.boxes import Box
from moejax.interop.views import View

CHUNK_BYTES = 2**22
NUM_READERS = min(8, len(os.sched_getaffinity(0)))
"""Threads that read chunks: one for each core that the process may use, up to 8."""
NUM_CHUNKS = 2 * NUM_READERS
"""Chunks in memory: those that are read, and those that wait for a device."""
ALIGNMENT = 64
"""Bytes to which XLA:CPU wants arrays aligned that it takes without a copy."""


def to_arrays(
    views: Mapping[str, View],
    shardings: Mapping[str, Sharding],
    dtype: jax.typing.DTypeLike = jnp.float32,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, jax.Array]:
    """Return views as arrays with the shardings of the same names, in `dtype`.

    Every process that has devices of the shardings must call this. Values are rounded
    on the host, to nearest even. Raises ValueError for a view of integers or of 8-bit
    floats, which are no weights without their scales, and what reading the files
    raises.
    """
    for view in views.values():
        is_float = jnp.issubdtype(view.dtype, jnp.floating)
        if not is_float or view.dtype.itemsize == 1:
            raise ValueError(
                f"{view.label} is {view.dtype}, which is no dtype of weights: if they "
                "are quantised, config.json must say how"
            )
    with _Reader(np.dtype(dtype), chunk_bytes) as reader:
        return {
            name: _to_array(view, shardings[name], reader)
            for name, view in views.items()
        }


def _to_array(view: View, sharding: Sharding, reader: "_Reader") -> jax.Array:
    devices: dict[Box, list[jax.Device]] = {}
    indices = sharding.addressable_devices_indices_map(view.shape)
    for device, index in indices.items():
        devices.setdefault(boxes.as_box(index, view.shape), []).append(device)
    shards = [_Shard(box, reader.dtype, where) for box, where in devices.items()]
    for chunk, values in reader.chunks(view, list(devices)):
        for shard in shards:
            part = boxes.common(chunk, shard.box)
            if part is not None:
                shard.put(values[boxes.slices_in(part, chunk)], part)
    arrays = [array for shard in shards for array in shard.arrays()]
    return jax.make_array_from_single_device_arrays(view.shape, sharding, arrays)


class _Shard:
    """The part of an array in one box, on all devices that hold it."""

    def __init__(self, box: Box, dtype: np.dtype, devices: list[jax.Device]):
        self.box = box
        self._dtype, self._devices = dtype, devices
        self._arrays: list[jax.Array] = []

    def put(self, values: np.ndarray, part: Box) -> None:
        """Put the values of a part of the box on the devices. When this returns,
        `values` may be overwritten."""
        if part == self.box:
            own = values.copy()  # XLA:CPU may keep the memory of what it is given
            self._arrays = [jax.device_put(own, device) for device in self._devices]
        else:
            start = np.int32([at.start for at in boxes.slices_in(part, self.box)])
            self._arrays = [
                _update(array, *jax.device_put((values, start), device))
                for array, device in zip(self.arrays(), self._devices)
            ]
        jax.block_until_ready(self._arrays)

    def arrays(self) -> list[jax.Array]:
        """Return the arrays, one for each device, as they are filled so far."""
        return self._arrays or [self._zeros(device) for device in self._devices]

    def _zeros(self, device: jax.Device) -> jax.Array:
        # jnp.zeros(device=..) makes zeros on the first device and copies them.
        with jax.default_device(device):
            zeros = jnp.zeros(boxes.shape_of(self.box), self._dtype)
        return jax.device_put(zeros, device)


@partial(jax.jit, donate_argnums=0)
def _update(array: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
    """Return the array with other values from index `start` on, in the same memory."""
    return jax.lax.dynamic_update_slice(array, values, tuple(start))


class _Reader:
    """Threads that read chunks into a fixed number of buffers."""

    def __init__(self, dtype: np.dtype, chunk_bytes: int):
        self.dtype = dtype
        self._max_elements = max(1, chunk_bytes // dtype.itemsize)
        self._free: queue.SimpleQueue = queue.SimpleQueue()
        for _ in range(NUM_CHUNKS):
            self._free.put(_aligned(self._max_elements, dtype))
        self._pool = ThreadPoolExecutor(NUM_READERS)

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_exception) -> None:
        self._pool.shutdown(cancel_futures=True)

    def chunks(
        self, view: View, of_devices: list[Box]
    ) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield chunks that cover the boxes, with values that are valid until the next
        chunk."""
        filled = [box for box in of_devices if boxes.size_of(box)]
        covers = boxes.joined(filled, view.order[-1]) if view.shape else filled[:1]
        parts = (
            chunk
            for cover in covers
            for chunk in boxes.cut(cover, view.order, self._max_elements)
        )
        reading: deque = deque()
        for chunk in parts:
            reading.append(self._submit(view, chunk))
            if len(reading) == NUM_CHUNKS:
                yield from self._finish(*reading.popleft())
        while reading:
            yield from self._finish(*reading.popleft())

    def _submit(self, view: View, chunk: Box):
        buffer = self._free.get()
        values = buffer[: boxes.size_of(chunk)].reshape(boxes.shape_of(chunk))
        return chunk, buffer, values, self._pool.submit(view.fill, values, chunk)

    def _finish(self, chunk: Box, buffer, values, filling):
        filling.result()
        yield chunk, values
        self._free.put(buffer)


def _aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """Return a new array [size] that begins at a multiple of ALIGNMENT."""
    data = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    first = -data.ctypes.data % ALIGNMENT
    return data[first : first + size * dtype.itemsize].view(dtype)
