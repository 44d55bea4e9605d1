"""Put batches on devices: each process reads only the rows that its devices hold."""

import jax
import numpy as np

from moejax.moe.types import Windows


def feed(source, index: int, batch_size: int, micro_batches: int, sharding) -> Windows:
    """Put batch `index` of `source` on the mesh: leaves [micro-batch, b, t + 1].

    Micro-batch i holds rows i*b .. (i+1)*b - 1 of the batch on every mesh.
    """
    rows = batch_size // micro_batches
    first = source.rows(index, 0, 1)
    width = first.token_bt.shape[1]
    names = [name for name, part in vars(first).items() if part is not None]
    cache: dict[tuple[int, int, int], Windows] = {}

    def read_part(name: str, where: tuple[slice, ...]) -> np.ndarray:
        low, high, _ = where[1].indices(rows)
        parts = []
        for i in range(*where[0].indices(micro_batches)):
            key = (i, low, high)
            if key not in cache:
                cache[key] = source.rows(index, i * rows + low, i * rows + high)
            parts.append(getattr(cache[key], name))
        return np.stack(parts)

    shape = (micro_batches, rows, width)
    return Windows(
        **{
            name: jax.make_array_from_callback(
                shape, sharding, lambda where, name=name: read_part(name, where)
            )
            for name in names
        }
    )


def own_rows(batch_size: int, micro_batches: int, sharding) -> list[int]:
    """Return the numbers of the batch rows that this process feeds, in order."""
    rows = batch_size // micro_batches
    where = sharding.addressable_devices_indices_map((micro_batches, rows, 1))
    spans = {part[1].indices(rows)[:2] for part in where.values()}
    return [
        micro * rows + row
        for micro in range(micro_batches)
        for first, last in sorted(spans)
        for row in range(first, last)
    ]
