"""Choice of the implementation of the grouped product, by device, dtype and shape."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moejax.choice import Choice
from moejax.kernels import zeros_varying_as
from moejax.kernels.device import hopper_or, why_not_hopper
from moejax.kernels.grouped_dot import portable, reference
from moejax.kernels.grouped_dot.fp8 import GRADIENT_DTYPES, round_matrices, round_rows
from moejax.kernels.grouped_dot.products import Products, compose_products

Implementation = Literal["auto", "reference", "blocked", "xla", "hopper"]


def choose_grouped_dot(
    dtype: jax.typing.DTypeLike,
    align_rows: int,
    *widths: int,
    is_fp8: bool = False,
) -> Choice[str]:
    """Return the implementation for products on the current device: 'hopper' or
    'blocked'.

    `align_rows` divides the rows of every group, and `widths` are the widths of rows
    and results.
    """
    if why := why_not_hopper():
        return Choice("blocked", why)
    # Importing Pallas takes half a second, and only Hopper GPUs need it.
    from moejax.kernels.grouped_dot.hopper.kernels import declines

    declined = declines(jnp.dtype(dtype), align_rows, *widths, is_fp8=is_fp8)
    return hopper_or("blocked", declined)


@functools.cache
def products(
    implementation: str,
    block_rows: int | None = None,
    fp8: str = "none",
    align_rows: int = 1,
) -> Products:
    """Return the products of an implementation. Only 'blocked' uses `block_rows`, and
    only 'hopper' uses `align_rows`, which divides the rows of every group.

    With fp8, forward and dgrad multiply rounded arrays (fp8.py): x and w in e4m3, and
    dy in the format that `fp8` names. wgrad multiplies x and dy without rounding. Only
    'hopper' multiplies 8-bit values. The other implementations multiply wider values
    that were rounded to 8 bits, and so have the accuracy of fp8 without its speed.

    Equal arguments give the same object, because it is part of the key under which JAX
    caches a trace.
    """
    if implementation == "hopper":
        # Importing Pallas takes half a second, and only this path needs it.
        from moejax.kernels.grouped_dot.hopper import kernels

        return kernels.products(fp8=fp8, align_rows=align_rows)
    if implementation == "blocked":
        own = portable.products(block_rows)
    else:
        own = _derive_products(DERIVED[implementation])
    return own if fp8 == "none" else _round_operands(own, fp8)


def ragged_dot(x_md: Array, w_gdf: Array, rows_g: Array) -> Array:
    """Return the grouped product by jax.lax.ragged_dot, with sums in float32 or wider
    and the dtype of x_md."""
    accumulate = jnp.promote_types(x_md.dtype, jnp.float32)
    y_mf = jax.lax.ragged_dot(x_md, w_gdf, rows_g, preferred_element_type=accumulate)
    return y_mf.astype(x_md.dtype)


DERIVED = {"reference": reference.grouped_dot, "xla": ragged_dot}
"""Forward products whose gradients JAX derives, by implementation."""


def _round_operands(own: Products, fp8: str) -> Products:
    """Return products that round the operands of `own`'s forward and dgrad to the
    values of 8-bit formats. `fp8` names the format of dy."""

    def forward(x_md: Array, w_gdf: Array, rows_g: Array) -> Array:
        arrays = round_rows(x_md), round_matrices(w_gdf)
        return own.forward(*arrays, rows_g).astype(x_md.dtype)

    def dgrad(dy_mf: Array, w_gdf: Array, rows_g: Array) -> Array:
        arrays = round_rows(dy_mf, GRADIENT_DTYPES[fp8]), round_matrices(w_gdf)
        return own.dgrad(*arrays, rows_g).astype(dy_mf.dtype)

    return compose_products(forward, dgrad, own.wgrad)


def _derive_products(dot: Callable) -> Products:
    """Return the products of a forward product, with gradients derived by JAX."""

    def dgrad(dy_mf: Array, w_gdf: Array, rows_g: Array) -> Array:
        shape = (dy_mf.shape[0], w_gdf.shape[1])
        zeros_md = zeros_varying_as(dy_mf, shape, dy_mf.dtype)
        return jax.vjp(lambda x_md: dot(x_md, w_gdf, rows_g), zeros_md)[1](dy_mf)[0]

    def wgrad(x_md: Array, dy_mf: Array, rows_g: Array) -> Array:
        shape = (rows_g.shape[0], x_md.shape[1], dy_mf.shape[1])
        zeros_gdf = zeros_varying_as(dy_mf, shape, dy_mf.dtype)
        return jax.vjp(lambda w_gdf: dot(x_md, w_gdf, rows_g), zeros_gdf)[1](dy_mf)[0]

    return compose_products(dot, dgrad, wgrad)
