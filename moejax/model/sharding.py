"""Where parameters live: fully sharded masters, gathered where they are used.

Dense parameters and their moments are split over ("data", "expert") on their largest
dim that those devices divide; expert weights say their own split (moe/layer.py). What
is small stays whole: a gather costs more than it saves.
"""

import math

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from moejax import axes
from moejax.axes import AxisNames
from moejax.layout import GROUP_AXES, Store
from moejax.moe.stores import master_spec

MIN_SHARDED_SIZE = 4096
"""Elements below which a parameter is replicated (norms, small routers)."""


def param_spec(
    variable: nnx.Variable,
    mesh: Mesh,
    stacked: bool,
    store: Store = "owned",
    group: AxisNames = GROUP_AXES["expert"],
) -> P:
    """PartitionSpec of a parameter; `stacked` ones have a leading layer dim. Experts
    lie as `store` wants them in groups over these mesh axes."""
    shape = variable.shape[1:] if stacked else variable.shape
    split = variable.get_metadata().get("split")
    if split is not None:
        split = tuple(master_spec(split, store, group))
    else:
        split = _fsdp_split(shape, axes.axis_size(mesh, axes.FSDP_AXES))
    return P(None, *split) if stacked else P(*split)


def _fsdp_split(shape: tuple[int, ...], num_shards: int) -> tuple:
    fits = [i for i, size in enumerate(shape) if size % num_shards == 0]
    if not fits or math.prod(shape) < MIN_SHARDED_SIZE:
        return ()
    dim = max(fits, key=lambda i: shape[i])
    return tuple(axes.FSDP_AXES if i == dim else None for i in range(len(shape)))


@jax.named_scope("gathered")
def gathered(param: nnx.Param, mesh: Mesh, dtype=None) -> Array:
    """The whole parameter on every device, cast before it travels."""
    value = param[...] if dtype is None else param[...].astype(dtype)
    return jax.lax.with_sharding_constraint(value, axes.sharding(mesh))


def batch_sharded(x: Array, mesh: Mesh) -> Array:
    """Keep the leading (batch) dim split over all batch axes."""
    spread = axes.sharding(mesh, axes.BATCH_AXES)
    return jax.lax.with_sharding_constraint(x, spread)
