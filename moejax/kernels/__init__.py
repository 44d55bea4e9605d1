"""Kernels on ragged rows. Each room holds its definition (`reference.py`), what is fast
and on what, and one public function that chooses between them. Layouts and plans are
not known here: what a kernel needs of them is passed in.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def varying_alike(*arrays: Array) -> tuple[Array, ...]:
    """The same arrays, each typed as varying over every mesh axis that any varies on.

    Inside shard_map a custom_vjp must return cotangents that vary as its inputs do, and
    a loop must keep the type of its carry: with one type for all, both hold by
    themselves. The transpose of the cast is the psum that an input shared by devices
    needs, so gradients stay exact. Outside shard_map nothing changes.
    """
    axes = frozenset().union(*(_varying_axes(array) for array in arrays))

    def cast(array: Array) -> Array:
        missing = tuple(sorted(axes - _varying_axes(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return tuple(cast(array) for array in arrays)


def zeros_varying_as(array: Array, shape: tuple[int, ...], dtype) -> Array:
    """Zeros of a loop's carry, varying over the mesh axes that `array` varies on."""
    zeros, _ = varying_alike(jnp.zeros(shape, dtype), array)
    return zeros


def _varying_axes(array: Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying
