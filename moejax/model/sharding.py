"""Shardings of parameters: stored fully sharded, gathered where they are used.

    parameter       stored split over         used split over
    dense matrix    (data, expert), tensor    tensor
    embedding       (data, expert)            nothing: whole
    norm            nothing: small            nothing: whole
    expert weights  moejax.moe.weights.stores.master_param_spec

Over (data, expert) the largest dim is split that the number of those devices divides.
Small parameters stay whole there, because gathering them would cost more than it saves.
Over tensor the dim is split that the module names: the columns of a matrix that reads
x, the rows of a matrix whose output is added to x (Shoeybi et al. 2019, Megatron-LM,
section 3). Each part then needs one sum over tensor at its end, and one for its
gradient.
"""

import math

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from moejax import axes
from moejax.moe.mesh_roles import MeshLayout
from moejax.moe.weights.stores import master_param_spec
from moejax.plan.layout import Store

MIN_SHARDED_SIZE = 4096
"""Elements below which a parameter is replicated (norms, small routers)."""


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
    else:
        split = _dense_split(shape, mesh, _used_split(variable, len(shape), mesh))
    return axes.sharding(mesh, None, *split) if stacked else axes.sharding(mesh, *split)


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
    num_shards = axes.axis_size(mesh, axes.FSDP_AXES)
    split = list(used or (None,) * len(shape))
    fits = [
        i for i, size in enumerate(shape) if split[i] is None and size % num_shards == 0
    ]
    if not fits or math.prod(shape) < MIN_SHARDED_SIZE:
        return used
    split[max(fits, key=lambda i: shape[i])] = axes.FSDP_AXES
    return tuple(split)


@jax.named_scope("gathered")
def gather_param(param: nnx.Param, mesh: Mesh, dtype=None) -> Array:
    """Return a parameter as it is used: split over the tensor axis if its module says
    so, otherwise whole on every device.

    It is cast to `dtype` before it is gathered, so that fewer bytes travel.
    """
    value = param[...] if dtype is None else param[...].astype(dtype)
    used = _used_split(param, value.ndim, mesh)
    return jax.lax.with_sharding_constraint(value, axes.sharding(mesh, *used))


def shard_batch(x: Array, mesh: Mesh, tensor_dim: int | None = None) -> Array:
    """Constrain an activation's sharding: the leading (batch) dim over the batch axes.

    `tensor_dim`, counted from the front, is split over the tensor axis. All other dims
    are whole. The gradient has the same sharding.
    """
    dims = [axes.BATCH_AXES, *(None,) * (x.ndim - 1)]
    if tensor_dim is not None:
        dims[tensor_dim] = axes.TENSOR
    return jax.lax.with_sharding_constraint(x, axes.sharding(mesh, *dims))


def check_tensor(name: str, size: int, tensor: int) -> None:
    """Raise ValueError unless `tensor`, the size of the tensor axis, divides `size`.

    `name` is the size's name in the message.
    """
    if size % tensor:
        raise ValueError(
            f"{name}={size} must be divisible by Mesh.tensor={tensor}: use "
            f"{-(-size // tensor) * tensor}, or Mesh.tensor = {math.gcd(size, tensor)}"
        )
