"""Array checksums: a uint32 that shows every flipped bit, the same on any mesh.

    sum over elements i of  mix(bits_i + i * GOLDEN)    modulo 2**32

`mix` is a bijection of the 32-bit words, and `i` is the row-major index in the whole
array. So a change of one element always changes the checksum. Sums modulo 2**32 do not
depend on the order of the terms. `mix` must be non-linear: in a weighted sum of the
bits, two flipped sign bits of float32 would cancel.
"""

import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

GOLDEN = 0x9E3779B9
BLOCK = 2**16
"""Number of elements summed at a time. XLA:CPU materializes the terms that it sums: 256
KiB stay in the cache, but for a whole array they would be a second copy of it."""


def named_leaves(tree) -> dict:
    """Return the leaves by path, such as 'params/blocks/w_edf', in the tree's order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in paths]
    assert len(set(names)) == len(names), f"two leaves have one name: {sorted(names)}"
    return {name: leaf for name, (_, leaf) in zip(names, paths)}


def checksums(state) -> dict[str, int]:
    """Return the checksum of every leaf by name, computed on the arrays' devices.

    Leaves are jax.Arrays of at most 32 bits per element. Blocks until the checksums are
    computed.
    """
    leaves = named_leaves(state)
    by_mesh: dict[Mesh | None, list[str]] = {}
    for name, leaf in leaves.items():
        is_named = isinstance(leaf.sharding, NamedSharding)
        by_mesh.setdefault(leaf.sharding.mesh if is_named else None, []).append(name)
    sums = {}
    for mesh, names in by_mesh.items():
        group = [leaves[name] for name in names]
        if mesh is None:
            sum_n = _sums_anywhere(group)
        else:
            sum_n = _sums_on_mesh(group, mesh, tuple(x.sharding.spec for x in group))
        sums |= zip(names, map(int, jax.device_get(sum_n)))
    return {name: sums[name] for name in leaves}


def shard_sum(shard: jax.Array) -> jax.Array:
    """Return the checksum, a uint32, of an array by itself, wherever it lies in a
    larger one."""
    return _sum(shard, shard.shape, (0,) * shard.ndim)


def replicated_over(spec: PartitionSpec, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of a mesh over which an array with this spec is not split."""
    dims = [(dim,) if isinstance(dim, str) else dim for dim in spec if dim is not None]
    return tuple(axis for axis in axes if not any(axis in dim for dim in dims))


def as_own(shard: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    """Return a shard, inside shard_map, as a value that may differ on every device."""
    over = replicated_over(spec, axes)
    return jax.lax.pcast(shard, over, to="varying") if over else shard


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


@jax.jit
def _sums_anywhere(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([shard_sum(x) for x in leaves])


@functools.partial(jax.jit, static_argnames=("mesh", "specs"))
def _sums_on_mesh(
    leaves: list[jax.Array], mesh: Mesh, specs: tuple[PartitionSpec, ...]
) -> jax.Array:
    """Sum on each device the shards of which it has the first copy; then all-reduce."""
    axes = tuple(mesh.axis_names)

    def local(shards: list[jax.Array]) -> jax.Array:
        partial_n = [
            _shard_sum(shard, leaf.shape, spec, axes)
            for shard, leaf, spec in zip(shards, leaves, specs)
        ]
        return jax.lax.psum(jnp.stack(partial_n), axes)

    return jax.shard_map(
        local, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec()
    )(leaves)


def _shard_sum(
    shard: jax.Array, shape: tuple[int, ...], spec: PartitionSpec, axes: tuple[str, ...]
) -> jax.Array:
    dims = [() if d is None else (d,) if isinstance(d, str) else d for d in spec]
    dims += [()] * (shard.ndim - len(dims))
    start = [
        jax.lax.axis_index(dim) * size if dim else 0
        for dim, size in zip(dims, shard.shape)
    ]
    copied_over = replicated_over(spec, axes)
    x = as_own(shard, spec, axes)
    if jax.lax.axis_size(copied_over) == 1:
        return _sum(x, shape, start)
    return jax.lax.cond(
        jax.lax.axis_index(copied_over) == 0,
        lambda x: _sum(x, shape, start),
        lambda x: jax.lax.pcast(jnp.uint32(0), axes, to="varying"),
        x,
    )


def _sum(x: jax.Array, shape: tuple[int, ...], start) -> jax.Array:
    """Return the sum over a part `x` of an array of shape `shape`.

    The part begins at the indices `start`. It is viewed as rows along its last dim, and
    summed one block of rows at a time.
    """
    if x.size == 0:
        return jnp.sum(x.astype(jnp.uint32))
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if x.ndim == 0:
        x, shape, start = x[None], (1,), (0,)
    num_rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    x_rc = x.reshape(num_rows, width)
    rows_per_block = max(1, BLOCK // width)

    def block(first_row, num) -> jax.Array:
        row_r = first_row + jnp.arange(num)
        part_rc = jax.lax.dynamic_slice_in_dim(x_rc, first_row, num)
        position_r = jnp.zeros(num, jnp.uint32)
        for dim in reversed(range(x.ndim - 1)):
            stride = jnp.uint32(math.prod(shape[dim + 1 :]) % 2**32)
            index_r = start[dim] + row_r % x.shape[dim]
            position_r += index_r.astype(jnp.uint32) * stride
            row_r = row_r // x.shape[dim]
        col_c = (start[-1] + jnp.arange(width)).astype(jnp.uint32)
        return _mixed_sum(part_rc, position_r[:, None] + col_c)

    num_blocks, rest = divmod(num_rows, rows_per_block)
    num_last = rest or rows_per_block
    num_blocks -= not rest
    total = block(num_rows - num_last, num_last)
    if num_blocks == 0:
        return total
    return jax.lax.fori_loop(
        0, num_blocks, lambda i, t: t + block(i * rows_per_block, rows_per_block), total
    )


def _mixed_sum(x: jax.Array, position: jax.Array) -> jax.Array:
    word = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    return jnp.sum(_mix(bits + position * jnp.uint32(GOLDEN)), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Apply MurmurHash3's finalizer (Appleby, public domain): a bijection of uint32."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
