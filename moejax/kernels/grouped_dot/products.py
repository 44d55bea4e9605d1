"""The grouped products of each implementation, without their gradients."""

import functools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moejax.kernels import zeros_varying_as
from moejax.kernels.grouped_dot import portable, reference, swiglu
from moejax.kernels.grouped_dot.fp8 import GRADIENTS, rounded_matrices, rounded_rows
from moejax.plan.layout import Fp8


class Products(NamedTuple):
    """Of one implementation. Rows past sum(rows_g) are not looked at, and zero in
    results; sums are taken in float32 at least. `into` has gate's columns first."""

    forward: Callable[[Array, Array, Array], Array]
    """(x_md, w_gdf, rows_g) -> y_mf"""
    dgrad: Callable[[Array, Array, Array], Array]
    """(dy_mf, w_gdf, rows_g) -> dx_md"""
    wgrad: Callable[[Array, Array, Array], Array]
    """(x_md, dy_mf, rows_g) -> dw_gdf"""
    swiglu: Callable[[Array, Array, Array], tuple[Array, Array]]
    """(x_md, into_gdh, rows_g) -> (h_mf, into_mh): [gate, up] = into = x @ w, and
    h = silu(gate) * up"""
    swiglu_dgrad: Callable[[Array, Array, Array, Array], tuple[Array, Array]]
    """(dy_md, down_gfd, into_mh, rows_g) -> (dinto_mh, h_mf): the gradient of into
    where dy is that of h @ down, and h once more"""


@functools.cache
def products(
    implementation: str, block_rows: int | None = None, fp8: Fp8 = "none"
) -> Products:
    """Of 'blocked' (`block_rows` is of this one), 'hopper', 'reference' and 'xla'.

    With fp8, forward and dgrad are those of rounded arrays (fp8.py): x and w in e4m3,
    dy as `fp8` says; wgrad is of x and dy as they are. Only 'hopper' multiplies 8-bit
    values: the others multiply what they stand for, and have the accuracy without the
    speed.
    """
    if implementation == "hopper":
        # Pallas takes half a second to import, and only this needs it.
        from moejax.kernels.grouped_dot.hopper import kernels

        return kernels.products(fp8=fp8)
    if implementation == "blocked":
        own = _blocked(block_rows)
    else:
        own = _derived(DERIVED[implementation])
    return own if fp8 == "none" else _of_rounded(own, fp8)


def composed(forward: Callable, dgrad: Callable, wgrad: Callable) -> Products:
    """With the halves of SwiGLU as passes after the products."""
    fused = partial(swiglu.swiglu, forward), partial(swiglu.swiglu_dgrad, dgrad)
    return Products(forward, dgrad, wgrad, *fused)


def ragged_dot(x_md: Array, w_gdf: Array, rows_g: Array) -> Array:
    accumulate = jnp.promote_types(x_md.dtype, jnp.float32)
    y_mf = jax.lax.ragged_dot(x_md, w_gdf, rows_g, preferred_element_type=accumulate)
    return y_mf.astype(x_md.dtype)


DERIVED = {"reference": reference.grouped_dot, "xla": ragged_dot}
"""Products whose gradients JAX derives."""


def _of_rounded(own: Products, fp8: Fp8) -> Products:
    def forward(x_md: Array, w_gdf: Array, rows_g: Array) -> Array:
        arrays = rounded_rows(x_md), rounded_matrices(w_gdf)
        return own.forward(*arrays, rows_g).astype(x_md.dtype)

    def dgrad(dy_mf: Array, w_gdf: Array, rows_g: Array) -> Array:
        arrays = rounded_rows(dy_mf, GRADIENTS[fp8]), rounded_matrices(w_gdf)
        return own.dgrad(*arrays, rows_g).astype(dy_mf.dtype)

    return composed(forward, dgrad, own.wgrad)


def _derived(dot: Callable) -> Products:
    def dgrad(dy_mf: Array, w_gdf: Array, rows_g: Array) -> Array:
        shape = (dy_mf.shape[0], w_gdf.shape[1])
        zeros_md = zeros_varying_as(dy_mf, shape, dy_mf.dtype)
        return jax.vjp(lambda x_md: dot(x_md, w_gdf, rows_g), zeros_md)[1](dy_mf)[0]

    def wgrad(x_md: Array, dy_mf: Array, rows_g: Array) -> Array:
        shape = (rows_g.shape[0], x_md.shape[1], dy_mf.shape[1])
        zeros_gdf = zeros_varying_as(dy_mf, shape, dy_mf.dtype)
        return jax.vjp(lambda w_gdf: dot(x_md, w_gdf, rows_g), zeros_gdf)[1](dy_mf)[0]

    return composed(dot, dgrad, wgrad)


def _blocked(block_rows: int | None) -> Products:
    def of(product):
        def bound(*arrays):
            num_rows, num_groups = arrays[0].shape[0], arrays[-1].shape[0]
            rows = block_rows or portable.default_block_rows(num_rows, num_groups)
            return product(*arrays, min(rows, num_rows))

        return bound

    return composed(*map(of, (portable.forward, portable.dgrad, portable.wgrad)))
