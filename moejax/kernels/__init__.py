"""Kernels on ragged rows: grouped matrix products, row permutations, water-filling.

Each operation has a folder with its definition, a portable implementation, a Hopper
implementation, and public functions that choose between them. Kernels do not know
layouts and plans: callers pass in the arrays and sizes that a kernel needs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def varying_alike(*arrays: Array) -> tuple[Array, ...]:
    """Return the arrays, each cast to vary over every mesh axis that any of them varies
    over.

    Inside shard_map, a custom_vjp must return cotangents that vary over the same axes
    as its inputs, and a loop must keep the type of its carry. Giving all arrays the
    same type satisfies both. The transpose of the cast is a psum, which is what the
    gradient of an input shared by devices needs, so gradients stay exact. Outside
    shard_map the arrays are returned as they are.
    """
    axes = frozenset().union(*(_varying_axes(array) for array in arrays))

    def cast(array: Array) -> Array:
        missing = tuple(sorted(axes - _varying_axes(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return tuple(cast(array) for array in arrays)


def zeros_varying_as(array: Array, shape: tuple[int, ...], dtype) -> Array:
    """Return zeros that vary over the same mesh axes as `array`, for a loop's carry."""
    zeros, _ = varying_alike(jnp.zeros(shape, dtype), array)
    return zeros


def _varying_axes(array: Array) -> frozenset[str]:
    """Return the mesh axes over which an array is typed as varying."""
    return jax.typeof(array).manual_axis_type.varying
