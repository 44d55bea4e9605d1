"""Where parameters live: fully sharded masters, gathered where they are used.

    dense matrix    lies split over (data, expert), tensor   used split over tensor
    embedding       (data, expert)                           whole
    norm            whole: small                             whole
    expert weights  say their own split (moe/layer.py)

Over (data, expert) it is the largest dim that those devices divide; what is small stays
whole there, for a gather costs more than it saves. Over tensor it is the dim that the
module names: columns of what reads x, rows of what writes it (Shoeybi et al. 2019,
Megatron-LM, section 3), so that one sum over tensor ends each part, and one its
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
    """Where a parameter rests; `stacked` ones have a leading layer dim. Experts lie as
    `store` wants them, along the axes of `mesh_layout`."""
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
    """Over tensor alone, or not at all: how a dense parameter is used."""
    tensor_dim = variable.get_metadata().get("tensor_dim")
    if tensor_dim is None or mesh.shape[axes.TENSOR] == 1:
        return ()
    return tuple(axes.TENSOR if i == tensor_dim else None for i in range(num_dims))


def _dense_split(shape: tuple[int, ...], mesh: Mesh, used: tuple) -> tuple:
    """Over (data, expert) too, on another dim than that of `used`."""
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
def gathered(param: nnx.Param, mesh: Mesh, dtype=None) -> Array:
    """The parameter as it is used, cast before it travels: split over tensor where its
    module says so, else whole on every device."""
    value = param[...] if dtype is None else param[...].astype(dtype)
    used = _used_split(param, value.ndim, mesh)
    return jax.lax.with_sharding_constraint(value, axes.sharding(mesh, *used))


def batch_sharded(x: Array, mesh: Mesh, tensor_dim: int | None = None) -> Array:
    """Keep the leading (batch) dim split over all batch axes, and `tensor_dim`, counted
    from the front, over tensor. All else is whole, and so is the gradient."""
    dims = [axes.BATCH_AXES, *(None,) * (x.ndim - 1)]
    if tensor_dim is not None:
        dims[tensor_dim] = axes.TENSOR
    return jax.lax.with_sharding_constraint(x, axes.sharding(mesh, *dims))


def check_tensor(name: str, size: int, tensor: int) -> None:
    """ValueError when a tensor axis of so many devices cannot split a size so named."""
    if size % tensor:
        raise ValueError(
            f"{name}={size} must be divisible by Mesh.tensor={tensor}: use "
            f"{-(-size // tensor) * tensor}, or Mesh.tensor = {math.gcd(size, tensor)}"
        )
