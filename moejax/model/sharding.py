"""Shardings of parameters: stored fully sharded, gathered where they are used.

    parameter       stored split over         used split over
    dense matrix    (data, expert), tensor    tensor
    embedding, head (data, expert, tensor)    expert, tensor (moejax.model.vocabulary)
    norm            nothing: small            nothing: whole
    expert weights  moejax.moe.weights.stores.master_param_spec

Over (data, expert) the largest dim is split that the number of those devices divides; a
vocabulary that the devices do not divide is stored as a dense matrix is.
Small parameters stay whole there, because gathering them would cost more than it saves.
`on_rows` gathers matrices inside shard_map, where each device multiplies its own rows;
so their gradients are summed where they rest (moejax.moe.weights.gather).

Over tensor the dim is split that the module names: the columns of a matrix that reads
x, the rows of a matrix whose output is added to x (Shoeybi et al. 2019, Megatron-LM,
section 3). Each part then needs one sum over tensor at its end, and one for its
gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from moejax import axes
from moejax.moe.mesh_roles import MeshLayout
from moejax.moe.weights.gather import MIN_SHARDED_SIZE, Fsdp, gather, resting_dim
from moejax.moe.weights.stores import master_param_spec
from moejax.plan.layout import Store


def param_sharding(
    variable: nnx.Variable,
    mesh: Mesh,
    mesh_layout: MeshLayout,
    stacked: bool,
    store: Store,
) -> NamedSharding:
    """Return the sharding in which a parameter is stored between steps.

    A `stacked` parameter has a leading layer dim, which is never split. Expert weights
    are split as `store` requires, over the axes of `mesh_layout`.
    """
    shape = variable.shape[1:] if stacked else variable.shape
    dims = variable.get_metadata().get("expert_dims")
    if dims is not None:
        mesh, split = (
            mesh_layout.mesh,
            tuple(master_param_spec(dims, store, mesh_layout)),
        )
    elif _are_rows_split(variable, mesh):
        split = (axes.VOCAB_AXES,)
    else:
        split = _dense_split(shape, mesh, _used_split(variable, len(shape), mesh))
    return axes.sharding(mesh, None, *split) if stacked else axes.sharding(mesh, *split)


def _are_rows_split(variable: nnx.Variable, mesh: Mesh) -> bool:
    """Return whether a parameter is a table with a row for each token id, and is split
    by rows where it is stored."""
    if not variable.get_metadata().get("is_vocabulary"):
        return False
    is_small = variable.size < MIN_SHARDED_SIZE
    num_shards = axes.axis_size(mesh, axes.VOCAB_AXES)
    return not is_small and variable.shape[0] % num_shards == 0


def _used_split(variable: nnx.Variable, num_dims: int, mesh: Mesh) -> tuple:
    """Return how a dense parameter is split where it is used: over the tensor axis in
    the dim that its module names, or not at all."""
    tensor_dim = variable.get_metadata().get("tensor_dim")
    if tensor_dim is None or mesh.shape[axes.TENSOR] == 1:
        return ()
    return tuple(axes.TENSOR if i == tensor_dim else None for i in range(num_dims))


def _dense_split(shape: tuple[int, ...], mesh: Mesh, used: tuple) -> tuple:
    """Return how a dense parameter is split where it is stored: as in `used`, and over
    (data, expert) in another dim if one fits."""
    taken = tuple(i for i, axis in enumerate(used) if axis is not None)
    dim = resting_dim(shape, axes.axis_size(mesh, axes.FSDP_AXES), taken)
    if dim is None:
        return used
    split = list(used or (None,) * len(shape))
    split[dim] = axes.FSDP_AXES
    return tuple(split)


def on_rows(
    body: Callable[..., Any],
    parts: tuple[Array, ...],
    params: tuple[nnx.Param, ...],
    mesh: Mesh,
    reduce_dtype: str,
    *,
    tensor_dim: int | None = None,
    out_tensor_dim: int | None = None,
) -> tuple[Any, ...]:
    """Return body(x, *weights) for each part x of a batch, which each device computes
    for its own rows of x. Weights are gathered once for all parts.

    x [b, ..] is split over the batch axes, and over the tensor axis in `tensor_dim`. So
    are the arrays that `body` returns, in `out_tensor_dim`. Inside, weights have the
    dtype of x and are whole but for the tensor axis; the body sums over that axis
    (`sum_parts`) what `out_tensor_dim` = None makes whole. Gradients travel in
    `reduce_dtype` (Model.gradient_reduce_dtype). Parameters that have the mark
    `is_gathered` are whole over data and expert already, and stay so.
    """
    values = tuple(param[...] for param in params)
    along = () if is_gathered(params[0]) else _several(mesh, axes.FSDP_AXES)
    fsdp = Fsdp(along, parts[0].dtype, reduce_dtype)
    splits = [
        _dense_split(value.shape, mesh, _used_split(param, value.ndim, mesh))
        for param, value in zip(params, values)
    ]
    dims = tuple(
        split.index(axes.FSDP_AXES) if axes.FSDP_AXES in split else None
        for split in splits
    )
    specs = (
        P(*(along if a == axes.FSDP_AXES else a for a in split)) for split in splits
    )

    def on_device(parts, *values):
        with jax.named_scope("gathered"):
            weights = gather(values, dims, parts[0], fsdp)
        return tuple(body(x, *weights) for x in parts)

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(_batch_spec(mesh, tensor_dim), *specs),
        out_specs=_batch_spec(mesh, out_tensor_dim),
    )(parts, *values)


def on_own_rows(
    body: Callable[..., Array],
    arrays: tuple[Array, ...],
    tensor_dims: tuple[int | None, ...],
    mesh: Mesh,
    *,
    out_tensor_dim: int | None = None,
    per_head: tuple[Array, ...] = (),
) -> Array:
    """Return body(*arrays, *per_head), which each device computes for its own rows and,
    along the tensor axis, for its own part of one dim.

    It is for kernels, which XLA's partitioner cannot split. Arrays [b, ..] are split
    over the batch axes, and over the tensor axis in their dim of `tensor_dims`, where
    that is not None; so is the result, in `out_tensor_dim`. Scalars are whole. Arrays
    `per_head` [h] are split over the tensor axis alone. `body` has no matrices: those
    take `on_rows`.
    """
    specs = [
        _batch_spec(mesh, tensor_dim) if array.ndim else P()
        for array, tensor_dim in zip(arrays, tensor_dims)
    ]
    head_spec = P(axes.TENSOR) if mesh.shape[axes.TENSOR] > 1 else P()
    specs += [head_spec] * len(per_head)
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=_batch_spec(mesh, out_tensor_dim),
    )(*arrays, *per_head)


def is_gathered(param: nnx.Param) -> bool:
    """Return whether a dense parameter is whole over data and expert where its module
    gets it, as for decoding (train.step.state.model_graph)."""
    return bool(param.get_metadata().get("is_gathered"))


def halve_rows(x: Array, mesh: Mesh) -> tuple[Array, Array]:
    """Return the first and the second half of each device's rows of an activation
    [b, ..]: two arrays [b/2, ..] that are split over the batch axes. `join_rows` undoes
    it. Nothing is sent."""

    def body(x):
        first, second = jnp.split(x, 2)
        return first, second

    spec = _batch_spec(mesh, None)
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def join_rows(parts: tuple[Array, ...], mesh: Mesh) -> Array:
    """Return each device's rows of all parts of a batch, one part after the other."""
    if len(parts) == 1:
        return parts[0]

    def body(*parts):
        return jnp.concatenate(parts)

    spec = _batch_spec(mesh, None)
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(*parts)


def sum_parts(y: Array, mesh: Mesh) -> Array:
    """Sum over the tensor axis inside shard_map, in the dtype of y: the product of a
    part of the rows of a matrix is an addend of the whole product."""
    return jax.lax.psum(y, axes.TENSOR) if mesh.shape[axes.TENSOR] > 1 else y


def _batch_spec(mesh: Mesh, tensor_dim: int | None) -> P:
    """Return the PartitionSpec of an activation [b, ..] (see `on_rows`)."""
    batch = _several(mesh, axes.BATCH_AXES)
    if tensor_dim is None or mesh.shape[axes.TENSOR] == 1:
        return P(batch)
    return P(batch, *(None,) * (tensor_dim - 1), axes.TENSOR)


def _several(mesh: Mesh, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes along which the mesh has several devices. XLA for CPUs runs a sum
    over one device too, as a copy."""
    return tuple(axis for axis in names if mesh.shape[axis] > 1)


def shard_batch(x: Array, mesh: Mesh) -> Array:
    """Constrain an activation's sharding: the leading (batch) dim over the batch axes,
    all others whole. The gradient has the same sharding."""
    return jax.lax.with_sharding_constraint(x, axes.sharding(mesh, axes.BATCH_AXES))
