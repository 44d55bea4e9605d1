"""The public functions grouped_dot and grouped_swiglu, with their gradients."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.kernels import varying_alike
from moejax.kernels.grouped_dot.choose import (
    DERIVED,
    Implementation,
    choose_grouped_dot,
    products,
)
from moejax.kernels.grouped_dot.fp8 import check_option
from moejax.kernels.grouped_dot.products import Products


def grouped_dot(
    x_md: Float[Array, "m d"],
    w_gdf: Float[Array, "g d f"],
    rows_g: Int[Array, " g"],
    *,
    implementation: Implementation = "auto",
    block_rows: int | None = None,
    fp8: str = "none",
    align_rows: int = 1,
) -> Float[Array, "m f"]:
    """Multiply each row by the matrix of its group: x_md[j] @ w_gdf[i] for row j of
    group i.

    It is differentiable in x_md and w_gdf. The first rows_g[0] rows of x_md belong to
    group 0, the next rows_g[1] rows to group 1, and so on (int32):

        rows_g = [2, 0, 1], m = 4:  y = [x0 @ w0, x1 @ w0, x2 @ w2, 0]

    Rows past sum(rows_g) <= m are padding. They are zero in the result and in the
    gradient, and their values and cotangents have no effect, even NaN. The gradient of
    an empty group's matrix is zero. Sums are taken in float32 or wider.

    implementation   'auto' takes 'hopper' where the device and the arrays allow it, and
                     'blocked' elsewhere; 'xla' is jax.lax.ragged_dot
    block_rows       number of rows of a block, for 'blocked' only (static)
    fp8              'e4m3' or 'e5m2' rounds operands to 8 bits, except in the gradient
                     of w: x and w to e4m3, dy to the format named (choose.py)
    align_rows       a number that divides rows_g and m, of which the caller is sure: it
                     is not checked, and results are wrong where it does not (static).
                     'hopper' needs 64 or a multiple of it

    Raises ValueError if dtypes or sizes do not fit, and NotImplementedError if 'hopper'
    cannot take the arrays.
    """
    (_, d), (num_groups, _, f) = x_md.shape, w_gdf.shape
    _check(x_md, rows_g, w_gdf=(w_gdf, (num_groups, d, f)))
    check_option(fp8, x_md.dtype)
    _check_alignment(x_md, align_rows)
    x_md, w_gdf, rows_g = varying_alike(x_md, w_gdf, rows_g)
    if implementation in DERIVED and fp8 == "none":
        return DERIVED[implementation](x_md, w_gdf, rows_g)
    options = {"fp8": fp8, "align_rows": align_rows, "block_rows": block_rows}
    p = _find_products(implementation, x_md, (d, f), **options)
    return _dot(x_md, w_gdf, rows_g, p)


def grouped_swiglu(
    x_md: Float[Array, "m d"],
    into_gdh: Float[Array, "g d 2f"],
    down_gfd: Float[Array, "g f d"],
    rows_g: Int[Array, " g"],
    *,
    implementation: Implementation = "auto",
    fp8: str = "none",
    align_rows: int = 1,
) -> Float[Array, "m d"]:
    """Apply the SwiGLU expert of its group to each row: return
    (silu(x @ gate) * (x @ up)) @ down.

    into_gdh holds gate in its first f columns and up in the others. The result is
    differentiable in x_md and both weights. Groups, padding, errors and the options are
    as in grouped_dot.

    The activation is part of the first product, and its gradient is part of the second
    product's gradient. The forward pass saves x and x @ into, and the backward pass
    computes silu(gate) * up again.
    """
    (_, d), (num_groups, f, _) = x_md.shape, down_gfd.shape
    into, down = (into_gdh, (num_groups, d, 2 * f)), (down_gfd, (num_groups, f, d))
    _check(x_md, rows_g, into_gdh=into, down_gfd=down)
    check_option(fp8, x_md.dtype)
    _check_alignment(x_md, align_rows)
    arrays = varying_alike(x_md, into_gdh, down_gfd, rows_g)
    if implementation in DERIVED and fp8 == "none":
        x_md, into_gdh, down_gfd, rows_g = arrays
        dot = partial(DERIVED[implementation], rows_g=rows_g)
        gate_mf, up_mf = jnp.split(dot(x_md, into_gdh), 2, axis=-1)
        return dot(jax.nn.silu(gate_mf) * up_mf, down_gfd)
    p = _find_products(implementation, x_md, (d, f), fp8=fp8, align_rows=align_rows)
    return _swiglu(*arrays, p)


def _find_products(
    implementation: str,
    x_md: Array,
    widths: tuple[int, int],
    fp8: str,
    align_rows: int,
    block_rows: int | None = None,
) -> Products:
    """Return the products of an implementation, which for 'auto' depends on the device
    and the arrays. Raises ValueError for an unknown name."""
    if implementation not in get_args(Implementation):
        known = ", ".join(get_args(Implementation))
        raise ValueError(f"implementation={implementation!r} is not one of {known}")
    if implementation != "auto":
        return products(implementation, block_rows, fp8, align_rows)
    choice = choose_grouped_dot(x_md.dtype, align_rows, *widths, is_fp8=fp8 != "none")
    return products(choice.value, block_rows, fp8, align_rows)


def _check(x_md: Array, rows_g: Array, **matrices: tuple[Array, tuple[int, ...]]):
    """Raise ValueError unless every matrix has x's dtype and the shape given with it,
    and rows_g has one number for each group."""
    for name, (w_gdf, shape) in matrices.items():
        if x_md.dtype != w_gdf.dtype:
            raise ValueError(
                f"x_md is {x_md.dtype} and {name} is {w_gdf.dtype}: cast one to the "
                "dtype of the other"
            )
        if w_gdf.shape != shape:
            raise ValueError(
                f"{name} has shape {w_gdf.shape}, and must have shape {shape} for x_md "
                f"of shape {x_md.shape}"
            )
        if rows_g.shape != shape[:1]:
            raise ValueError(
                f"rows_g has shape {rows_g.shape}, and {name} has {shape[0]} groups: "
                "give one number of rows for each group"
            )


def _check_alignment(x_md: Array, align_rows: int) -> None:
    """Raise ValueError unless `align_rows` divides the number of rows."""
    if align_rows < 1 or len(x_md) % align_rows:
        raise ValueError(
            f"align_rows={align_rows} must divide the {len(x_md)} rows of x_md, and "
            "each number in rows_g: add rows of zeros, or use align_rows=1"
        )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dot(x_md: Array, w_gdf: Array, rows_g: Array, p: Products) -> Array:
    return p.forward(x_md, w_gdf, rows_g)


def _dot_fwd(x_md: Array, w_gdf: Array, rows_g: Array, p: Products):
    return p.forward(x_md, w_gdf, rows_g), (x_md, w_gdf, rows_g)


def _dot_bwd(p: Products, saved: tuple[Array, ...], dy_mf: Array):
    x_md, w_gdf, rows_g = saved
    dx_md = p.dgrad(dy_mf, w_gdf, rows_g)
    return dx_md, p.wgrad(x_md, dy_mf, rows_g), None


_dot.defvjp(_dot_fwd, _dot_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _swiglu(x_md, into_gdh, down_gfd, rows_g, p: Products) -> Array:
    return _swiglu_fwd(x_md, into_gdh, down_gfd, rows_g, p)[0]


def _swiglu_fwd(x_md, into_gdh, down_gfd, rows_g, p: Products):
    if p.experts is not None:
        y_md, into_mh = p.experts.forward(x_md, into_gdh, down_gfd, rows_g)
    else:
        h_mf, into_mh = p.swiglu(x_md, into_gdh, rows_g)
        y_md = p.forward(h_mf, down_gfd, rows_g)
    return y_md, (x_md, into_gdh, down_gfd, rows_g, into_mh)


def _swiglu_bwd(p: Products, saved: tuple[Array, ...], dy_md: Array):
    x_md, into_gdh, down_gfd, rows_g, into_mh = saved
    if p.experts is not None:
        arrays = dy_md, x_md, into_mh, into_gdh, down_gfd, rows_g
        return *p.experts.backward(*arrays), None
    dinto_mh, h_mf = p.swiglu_dgrad(dy_md, down_gfd, into_mh, rows_g)
    dx_md = p.dgrad(dinto_mh, into_gdh, rows_g)
    dinto_gdh = p.wgrad(x_md, dinto_mh, rows_g)
    return dx_md, dinto_gdh, p.wgrad(h_mf, dy_md, rows_g), None


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)
