"""Array checksums: a uint32 that shows every flipped bit, the same on any mesh.

    sum over elements i of  mix(bits_i + i * GOLDEN)    modulo 2**32

`mix` is a bijection of the 32-bit words, and `i` is the row-major index in the whole
array. So a change of one element always changes the checksum. Sums modulo 2**32 do not
depend on the order of the terms. `mix` must be non-linear: in a weighted sum of the
bits, two flipped sign bits of float32 would cancel.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

GOLDEN = 0x9E3779B9


def named_leaves(tree) -> dict:
    """Return the leaves by path, such as 'params/blocks/w_edf', in the tree's order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in paths]
    assert len(set(names)) == len(names), f"two leaves have one name: {sorted(names)}"
    return {name: leaf for name, (_, leaf) in zip(names, paths)}


def checksums(state) -> dict[str, int]:
    """Return the checksum of every leaf by name, computed on the arrays' devices.

    Leaves are jax.Arrays of at most 32 bits per element. Each device sums its shards,
    and needs no copy of them on GPUs (compiled for 8 H100, a shard of 1.07 GB needs 70
    kB). XLA:CPU materializes the terms of a sum, so leaves are summed one after the
    other. Blocks until the checksums are computed.
    """
    leaves = named_leaves(state)
    sums = jax.device_get([_summed(leaf) for leaf in leaves.values()])
    return dict(zip(leaves, map(int, sums)))


def array_sum(x: jax.Array) -> jax.Array:
    """Return the checksum of an array, a uint32, inside a jitted function."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    word = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    position, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for dim in reversed(range(x.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        position += index * jnp.uint32(stride % 2**32)
        stride *= x.shape[dim]
    return jnp.sum(_mix(bits + position * jnp.uint32(GOLDEN)), dtype=jnp.uint32)


_summed = jax.jit(array_sum)


def _mix(x: jax.Array) -> jax.Array:
    """Apply MurmurHash3's finalizer (Appleby, public domain): a bijection of uint32."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def digest(sums: dict[str, int]) -> str:
    """Return 16 hex digits that identify the arrays with these checksums."""
    text = "\n".join(f"{name} {sums[name]:08x}" for name in sorted(sums))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe_arrays(state) -> dict[str, dict]:
    """Return the dtype, shape and checksum of every leaf by name, for JSON."""
    sums = checksums(state)
    return {
        name: {"dtype": str(x.dtype), "shape": list(x.shape), "checksum": sums[name]}
        for name, x in named_leaves(state).items()
    }


def require_same_arrays(saved: dict[str, dict], abstract_state) -> None:
    """Raise ValueError unless the saved arrays have the types of the abstract state.

    `saved` is the result of describe_arrays. The names, dtypes and shapes must agree.
    """
    there = {name: _type(x["dtype"], x["shape"]) for name, x in saved.items()}
    here = {n: _type(x.dtype, x.shape) for n, x in named_leaves(abstract_state).items()}
    different = [n for n in here | there if there.get(n) != here.get(n)]
    if different:
        name = different[0]
        was, now = there.get(name, "missing"), here.get(name, "missing")
        more = f", and {len(different) - 1} more differ" if len(different) > 1 else ""
        raise ValueError(
            f"checkpoint of another model: {name} is {was} there and {now} here{more}"
        )


def _type(dtype, shape) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
