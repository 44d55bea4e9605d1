"""Flip bits of one replica of an array, as a failing device would."""

import jax
import numpy as np


def flip(array: jax.Array, device: int, bit: int, element: int = 0) -> jax.Array:
    """Return the array with one bit flipped in the shard that one device holds.

    `device` is a position in the array's mesh, and `element` one in its shard. Bit 0 is
    the lowest. The other devices keep their buffers, also those of replicas.
    """
    target = array.sharding.mesh.devices.flat[device]
    buffers = []
    for shard in array.addressable_shards:
        data = shard.data
        if shard.device == target:
            host = np.array(data)
            word_n = host.reshape(-1).view(f"uint{8 * host.dtype.itemsize}")
            word_n[element] ^= word_n.dtype.type(1 << bit)
            data = jax.device_put(host, target)
        buffers.append(data)
    return jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, buffers, dtype=array.dtype
    )


def flip_leaf(state, name: str, device: int, bit: int, element: int = 0):
    """Return a state with one bit flipped in the first leaf whose name ends with
    `name`."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves]
    index = next(i for i, path in enumerate(names) if path.endswith(name))
    flat = [leaf for _, leaf in leaves]
    flat[index] = flip(flat[index], device, bit, element)
    return jax.tree.unflatten(tree, flat)
