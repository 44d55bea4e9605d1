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
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

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
class Fsdp:
    """Fully sharded data parallelism of weights: how they rest in parts, how they are
    gathered, and how their gradients travel."""

    along: Axes
    """Mesh axes over which they are split, the outermost first. Empty: all are
    whole."""
    dtype: str | None
    """Dtype in which they are gathered and used. None: that in which they rest."""
    reduce_dtype: str
    """Dtype in which gradients travel (Model.gradient_reduce_dtype), unless `dtype` is
    wider."""

    def spec(self, dim: int | None) -> P:
        """Return the PartitionSpec of a weight that is split along `dim`, or whole
        (None); without the tensor axis."""
        return P() if dim is None else P(*(None,) * dim, self.along)


def gather(
    parts: tuple[Array, ...], dims: tuple[int | None, ...], x: Array, fsdp: Fsdp
) -> tuple[Array, ...]:
    """Return whole weights in `fsdp.dtype`, from this device's parts of them.

    For use inside shard_map, where `x` is what the weights multiply. Each weight is
    split along its dim of `dims`, or whole (None). All have one dtype, and one
    collective carries all parts.
    The gradient of a part has the part's own dtype. It is the sum over all devices
    along which the part or `x` differs. Over axes along which the weight is whole, that
    is an all-reduce of the part.
    """
    # Before the gather, so that the all-reduce is of parts.
    *parts, _ = varying_alike(*parts, x)
    dims = dims if fsdp.along else (None,) * len(parts)
    return _gather(tuple(parts), dims, fsdp, parts[0].dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(parts, dims, fsdp: Fsdp, part_dtype):
    """Cast and gather; `part_dtype` is what the backward pass returns."""
    parts = [part.astype(fsdp.dtype or part_dtype) for part in parts]

    def send(flat_x):
        return jax.lax.all_gather(flat_x, fsdp.along)

    def unpack(part_wx, part, dim):
        by_device = jnp.moveaxis(part_wx.reshape(-1, *part.shape), 0, dim)
        return by_device.reshape(*part.shape[:dim], -1, *part.shape[dim + 1 :])

    flat = [None if d is None else p.reshape(-1) for p, d in zip(parts, dims)]
    part_wx = _together(send, flat)
    return tuple(
        part if dim is None else unpack(flat_wx, part, dim)
        for flat_wx, part, dim in zip(part_wx, parts, dims)
    )


def _gather_forward(parts, dims, fsdp, part_dtype):
    return _gather(parts, dims, fsdp, part_dtype), None


def _gather_backward(dims, fsdp, part_dtype, _, grads):
    def by_device(grad, dim):
        w = jax.lax.axis_size(fsdp.along)
        split = (*grad.shape[:dim], w, -1, *grad.shape[dim + 1 :])
        return jnp.moveaxis(grad.reshape(split), dim, 0)

    grads = [g if d is None else by_device(g, d) for g, d in zip(grads, dims)]
    flat = [
        None if dim is None else grad.reshape(len(grad), -1)
        for grad, dim in zip(grads, dims)
    ]
    send = partial(sum_own, along=fsdp.along, dtype=fsdp.reduce_dtype)
    sums = _together(send, flat)
    own = [
        grad if dim is None else flat_x.reshape(grad.shape[1:])
        for flat_x, grad, dim in zip(sums, grads, dims)
    ]
    return (tuple(part.astype(part_dtype) for part in own),)


_gather.defvjp(_gather_forward, _gather_backward)


def _together(send: Callable[[Array], Array], arrays: list) -> list:
    """Send arrays, joined along their last dim, and cut what arrives in the same way.
    Those that are None stay so."""
    given = [array for array in arrays if array is not None]
    if not given:
        return arrays
    ends = np.cumsum([array.shape[-1] for array in given])[:-1]
    arrived = iter(jnp.split(send(jnp.concatenate(given, axis=-1)), ends, axis=-1))
    return [None if array is None else next(arrived) for array in arrays]


def sum_own(
    grad_wx: Float[Array, "w x"], along: Axes, dtype: str
) -> Float[Array, " x"]:
    """Return the sum over the devices along mesh axes of what they have for this one.

    grad_wx[i] is what this device has for device i. It travels in `dtype`, or in its
    own if that is wider, as the module says. The sum is in float32 at least.
    """
    travel = jnp.promote_types(grad_wx.dtype, dtype)
    if travel.itemsize >= 4:
        return reduce_scatter(grad_wx.astype(travel), along)
    sizes = [jax.lax.axis_size(axis) for axis in along]
    # Leading dims: receivers along the axes, the innermost axis first.
    grad = grad_wx.reshape(*sizes, -1)
    grad = grad.transpose(*range(len(sizes))[::-1], len(sizes))
    for axis in reversed(along):
        grad = jax.lax.all_to_all(
            grad.astype(travel), axis, split_axis=0, concat_axis=0, tiled=True
        )
        grad = jnp.sum(grad, axis=0, dtype=jnp.float32)
    return grad


def reduce_scatter(x_wx: Array, along: Axes | str) -> Array:
    """Return the sum over the devices along mesh axes of what they have for this one.

    x_wx[i] is what this device has for device i. On CPUs of several processes it is an
    all_to_all and a sum: gloo's reduce-scatter of 64 KiB between eight of them took 23
    ms, its all_to_all 2 ms.
    """
    if jax.process_count() == 1:
        return jax.lax.psum_scatter(x_wx, along)

    def of_cpus(x_wx):
        arrived_wx = jax.lax.all_to_all(x_wx, along, 0, 0, tiled=True)
        return jnp.sum(arrived_wx, axis=0)

    def of_others(x_wx):
        return jax.lax.psum_scatter(x_wx, along)

    return jax.lax.platform_dependent(x_wx, cpu=of_cpus, default=of_others)
