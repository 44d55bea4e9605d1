"""Weights, gathered where they are used; gradients, summed where the weights rest.

A weight rests in parts: split along one dim over the devices of some mesh axes. Inside
shard_map each device gathers the other parts, and multiplies its own rows by the whole.
It then has a gradient of the whole weight. The sum of all devices' gradients for its
own part is what it keeps:

    weight        cast to the compute dtype, one all_gather over all axes
    gradient      'bfloat16'  all_to_all in the compute dtype, summed in float32 where
                              they arrive, over one axis after the other, inner ones
                              first
                  'float32'   one reduce-scatter in float32

From a device n (1 - 1 / (D E)) bytes leave for a gradient of n bytes on D x E devices,
twice as many in float32. With one all_to_all over both axes, n (1 - 1 / D) of these
would cross the outer one, which has the slower links. After the sum over the inner axis
it is n / E (1 - 1 / D).
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from moejax.kernels import varying_alike
from moejax.moe.mesh_roles import Axes

MIN_SHARDED_SIZE = 4096
"""Elements below which a parameter rests whole (norms, small routers): gathering it
would cost more than it saves."""


def resting_dim(
    shape: tuple[int, ...], num_parts: int, taken: tuple[int, ...] = ()
) -> int | None:
    """Return the dim along which a dense parameter rests in `num_parts` parts: the
    largest one that they divide and that is not `taken`. None: it rests whole."""
    fits = [i for i, n in enumerate(shape) if i not in taken and n % num_parts == 0]
    if not fits or math.prod(shape) < MIN_SHARDED_SIZE:
        return None
    return max(fits, key=lambda i: shape[i])


@dataclasses.dataclass(frozen=True)
class Rest:
    """How a weight rests, how it is gathered, and how its gradient travels."""

    dim: int
    """Dim along which it is split."""
    along: Axes
    """Mesh axes over which it is split, the outermost first. Empty: it is whole."""
    dtype: str | None
    """Dtype in which it is gathered and used. None: that in which it rests."""
    reduce_dtype: str
    """Dtype in which gradients travel (Model.gradient_reduce_dtype), unless `dtype` is
    wider."""

    @property
    def spec(self) -> P:
        """PartitionSpec of the weight where it rests, without the tensor axis."""
        return P(*(None,) * self.dim, self.along) if self.along else P()


def gather(part: Array, x: Array, rest: Rest) -> Array:
    """Return the whole weight in `rest.dtype`, from this device's part of it.

    For use inside shard_map, where `x` is what the weight multiplies. The gradient of
    the part has the part's own dtype. It is the sum over all devices along which the
    part or `x` differs. Over axes along which the weight is whole, that is an
    all-reduce of the part.
    """
    # Before the gather, so that the all-reduce is of parts.
    part, _ = varying_alike(part, x)
    return _gather(part, rest, part.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(part: Array, rest: Rest, part_dtype) -> Array:
    """Cast and gather; `part_dtype` is what the backward pass returns."""
    part = part.astype(rest.dtype or part.dtype)
    if not rest.along:
        return part
    return jax.lax.all_gather(part, rest.along, axis=rest.dim, tiled=True)


def _gather_forward(part, rest, part_dtype):
    return _gather(part, rest, part_dtype), None


def _gather_backward(rest, part_dtype, _, grad):
    return (_sum_parts(grad, rest).astype(part_dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def _sum_parts(grad: Array, rest: Rest) -> Array:
    """Return the sum of all devices' gradients for this device's part."""
    travel = jnp.promote_types(grad.dtype, rest.reduce_dtype)
    if not rest.along:
        return grad
    if travel.itemsize >= 4:
        return jax.lax.psum_scatter(
            grad.astype(travel), rest.along, scatter_dimension=rest.dim, tiled=True
        )
    dim, num_axes = rest.dim, len(rest.along)
    sizes = [jax.lax.axis_size(axis) for axis in rest.along]
    split = (*grad.shape[:dim], *sizes, -1, *grad.shape[dim + 1 :])
    # Leading dims: receivers along the axes, the innermost axis first.
    outer_first = range(dim, dim + num_axes)
    grad = jnp.moveaxis(grad.reshape(split), outer_first, range(num_axes)[::-1])
    for axis in reversed(rest.along):
        sent = grad.astype(travel)
        arrived = jax.lax.all_to_all(
            sent, axis, split_axis=0, concat_axis=0, tiled=True
        )
        grad = jnp.sum(arrived, axis=0, dtype=jnp.float32)
    return grad
