"""The grouped products that an implementation provides, and unfused SwiGLU.

    into_mh = x @ into_gdh, gate in columns [:f] and up in [f:]     h = 2 f
    h_mf    = silu(gate) * up                                       dh_mf = dy @ down.T

Unfused SwiGLU applies the activation in a pass over all rows after the product. Fusing
it into the loop over blocks, while a block is in cache, gained nothing on CPUs: see
docs/log.md.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Product = Callable[[Array, Array, Array], Array]
"""Grouped product (rows, matrices, rows_g) -> rows."""


class Products(NamedTuple):
    """The grouped products of one implementation.

    The values of rows past sum(rows_g) have no effect, and such rows are zero in
    results. Sums are taken in float32 or wider. The columns of gate come before
    those of up in `into`.
    """

    forward: Callable[[Array, Array, Array], Array]
    """(x_md, w_gdf, rows_g) -> y_mf = x @ w."""
    dgrad: Callable[[Array, Array, Array], Array]
    """(dy_mf, w_gdf, rows_g) -> dx_md = dy @ w.T."""
    wgrad: Callable[[Array, Array, Array], Array]
    """(x_md, dy_mf, rows_g) -> dw_gdf = x.T @ dy over the rows of each group."""
    swiglu: Callable[[Array, Array, Array], tuple[Array, Array]]
    """(x_md, into_gdh, rows_g) -> (h_mf, into_mh): into_mh = [gate, up] = x @ into_gdh,
    and h = silu(gate) * up."""
    swiglu_dgrad: Callable[[Array, Array, Array, Array], tuple[Array, Array]]
    """(dy_md, down_gfd, into_mh, rows_g) -> (dinto_mh, h_mf): the cotangent of into_mh
    for the cotangent dy of h @ down, and h, computed again."""


def compose_products(forward: Callable, dgrad: Callable, wgrad: Callable) -> Products:
    """Return the products of an implementation without fused SwiGLU: the activation
    and its gradient are separate passes after the given products."""
    passes = partial(_swiglu, forward), partial(_swiglu_dgrad, dgrad)
    return Products(forward, dgrad, wgrad, *passes)


def _swiglu(
    forward: Product,
    x_md: Float[Array, "m d"],
    into_gdh: Float[Array, "g d h"],
    rows_g: Int[Array, " g"],
) -> tuple[Float[Array, "m f"], Float[Array, "m h"]]:
    """Return h = silu(gate) * up, and into = [gate, up] = x @ into_gdh.

    Both results are zero in rows past sum(rows_g), and have the dtype of x_md. The
    activation is computed in float32 or wider. _swiglu_dgrad needs into_mh.
    """
    into_mh = forward(x_md, into_gdh, rows_g)
    gate_mf, up_mf = _gate_and_up(into_mh)
    return (jax.nn.silu(gate_mf) * up_mf).astype(x_md.dtype), into_mh


def _swiglu_dgrad(
    dgrad: Product,
    dy_md: Float[Array, "m d"],
    down_gfd: Float[Array, "g f d"],
    into_mh: Float[Array, "m h"],
    rows_g: Int[Array, " g"],
) -> tuple[Float[Array, "m h"], Float[Array, "m f"]]:
    """Return the cotangent of into_mh for the cotangent dy_md of y = h @ down, and h,
    computed again. Both have the dtype of dy_md.

    into_mh comes from _swiglu and is zero in rows past sum(rows_g), and so are both
    results. h_mf is computed again for the gradient of down, so that the forward pass
    need not save it.
    """
    dh_mf = _wide(dgrad(dy_md, down_gfd, rows_g))
    gate_mf, up_mf = _gate_and_up(into_mh)
    sigmoid_mf = jax.nn.sigmoid(gate_mf)
    silu_mf = gate_mf * sigmoid_mf
    # The derivative of silu is sigmoid + silu (1 - sigmoid).
    dgate_mf = dh_mf * up_mf * (sigmoid_mf + silu_mf * (1 - sigmoid_mf))
    dinto_mh = jnp.concatenate([dgate_mf, dh_mf * silu_mf], axis=1)
    return dinto_mh.astype(dy_md.dtype), (silu_mf * up_mf).astype(dy_md.dtype)


def _gate_and_up(into_mh: Array) -> list[Array]:
    """Split the columns of the fused product into gate and up, in float32 or wider."""
    return jnp.split(_wide(into_mh), 2, axis=1)


def _wide(value: Array) -> Array:
    """Return an array cast to float32 or wider."""
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))
