"""Host rows to device arrays: each process reads only the rows its devices hold."""

import jax
import numpy as np


def feed(
    source, index: int, batch_size: int, micro_batches: int, sharding
) -> jax.Array:
    """Batch `index` of `source` as int32 [micro-batch, b, t + 1] on the mesh.

    Micro-batch i holds rows i*b .. (i+1)*b - 1 of the batch, whatever the mesh.
    """
    rows = batch_size // micro_batches
    width = source.rows(index, 0, 1).shape[1]

    def part(where: tuple[slice, ...]) -> np.ndarray:
        first, last, _ = where[1].indices(rows)
        micro = range(*where[0].indices(micro_batches))
        return np.stack(
            [source.rows(index, i * rows + first, i * rows + last) for i in micro]
        )

    return jax.make_array_from_callback((micro_batches, rows, width), sharding, part)
