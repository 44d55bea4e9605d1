"""The grouped products that an implementation provides, and unfused SwiGLU.

    into_mh = x @ into_gdh, gate in columns [:f] and up in [f:]     h = 2 f
    h_mf    = silu(gate) * up                                       dh_mf = dy @ down.T

Unfused SwiGLU applies the activation in a pass over all rows after the product. An
implementation may compute whole experts in one pass instead (`Experts`).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Product = Callable[[Array, Array, Array], Array]
"""Grouped product (rows, matrices, rows_g) -> rows."""


class Experts(NamedTuple):
    """SwiGLU experts, each of them in one pass over the rows. Rows past sum(rows_g) are
    as in Products."""

    forward: Callable[[Array, Array, Array, Array], tuple[Array, Array]]
    """(x_md, into_gdh, down_gfd, rows_g) -> (y_md, into_mh)."""
    backward: Callable[..., tuple[Array, Array, Array]]
    """(dy_md, x_md, into_mh, into_gdh, down_gfd, rows_g) -> the cotangents of x_md,
    into_gdh and down_gfd."""


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
    experts: Experts | None = None
    """Whole experts in one pass. None: they are made of the products above."""


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
    return activate(into_mh), into_mh


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
    return activation_gradient(dgrad(dy_md, down_gfd, rows_g), into_mh)


def activate(into_mh: Float[Array, "m h"]) -> Float[Array, "m f"]:
    """Return h = silu(gate) * up, computed in float32 or wider, in the dtype of
    into_mh."""
    gate_mf, up_mf = _gate_and_up(into_mh)
    return (jax.nn.silu(gate_mf) * up_mf).astype(into_mh.dtype)


def activation_gradient(
    dh_mf: Float[Array, "m f"], into_mh: Float[Array, "m h"]
) -> tuple[Float[Array, "m h"], Float[Array, "m f"]]:
    """Return the cotangent of into_mh for that of h, and h, computed again, both in the
    dtype of dh_mf."""
    dtype, dh_mf = dh_mf.dtype, _wide(dh_mf)
    gate_mf, up_mf = _gate_and_up(into_mh)
    sigmoid_mf = jax.nn.sigmoid(gate_mf)
    silu_mf = gate_mf * sigmoid_mf
    # The derivative of silu is sigmoid + silu (1 - sigmoid).
    dgate_mf = dh_mf * up_mf * (sigmoid_mf + silu_mf * (1 - sigmoid_mf))
    dinto_mh = jnp.concatenate([dgate_mf, dh_mf * silu_mf], axis=1)
    return dinto_mh.astype(dtype), (silu_mf * up_mf).astype(dtype)


def _gate_and_up(into_mh: Array) -> list[Array]:
    """Split the columns of the fused product into gate and up, in float32 or wider."""
    return jnp.split(_wide(into_mh), 2, axis=1)


def _wide(value: Array) -> Array:
    """Return an array cast to float32 or wider."""
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))
