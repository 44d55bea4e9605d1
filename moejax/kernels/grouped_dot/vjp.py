"""grouped_dot: which implementation, and its gradients."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.kernels import varying_alike
from moejax.kernels.grouped_dot import blocked, reference

Implementation = Literal["reference", "blocked", "xla"]


def grouped_dot(
    x_md: Float[Array, "m d"],
    w_gdf: Float[Array, "g d f"],
    rows_g: Int[Array, " g"],
    *,
    implementation: Implementation = "blocked",
    block_rows: int | None = None,
) -> Float[Array, "m f"]:
    """x_md[j] @ w_gdf[i] for each row j of group i; differentiable in x_md and w_gdf.

    Group i owns the next rows_g[i] (int32) rows of x_md. Rows past sum(rows_g) <= m are
    padding: zero in the result and in the gradient, and whatever they or their
    cotangents hold, NaN too, reaches nothing. The gradient of an empty group's matrix
    is zero. Sums are taken in float32 at least. `block_rows` is static, of `blocked`
    only; `xla` is jax.lax.ragged_dot. Raises ValueError when the dtypes differ.

        rows_g = [2, 0, 1], m = 4:  y = [x0 @ w0, x1 @ w0, x2 @ w2, 0]
    """
    if x_md.dtype != w_gdf.dtype:
        raise ValueError(
            f"x_md is {x_md.dtype} and w_gdf is {w_gdf.dtype}: cast one to the other"
        )
    x_md, w_gdf, rows_g = varying_alike(x_md, w_gdf, rows_g)
    match implementation:
        case "reference":
            return reference.grouped_dot(x_md, w_gdf, rows_g)
        case "xla":
            accumulate = jnp.promote_types(x_md.dtype, jnp.float32)
            y_mf = jax.lax.ragged_dot(
                x_md, w_gdf, rows_g, preferred_element_type=accumulate
            )
            return y_mf.astype(x_md.dtype)
        case "blocked":
            num_rows, num_groups = x_md.shape[0], w_gdf.shape[0]
            block_rows = block_rows or blocked.default_block_rows(num_rows, num_groups)
            return _blocked(x_md, w_gdf, rows_g, min(block_rows, num_rows))
    raise ValueError(
        f"implementation={implementation!r} is not one of reference, blocked, xla"
    )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocked(x_md: Array, w_gdf: Array, rows_g: Array, block_rows: int) -> Array:
    return blocked.forward(x_md, w_gdf, rows_g, block_rows)


def _blocked_fwd(x_md: Array, w_gdf: Array, rows_g: Array, block_rows: int):
    return _blocked(x_md, w_gdf, rows_g, block_rows), (x_md, w_gdf, rows_g)


def _blocked_bwd(block_rows: int, saved: tuple[Array, Array, Array], dy_mf: Array):
    x_md, w_gdf, rows_g = saved
    dx_md = blocked.dgrad(dy_mf, w_gdf, rows_g, block_rows)
    dw_gdf = blocked.wgrad(x_md, dy_mf, rows_g, block_rows)
    return dx_md, dw_gdf, None


_blocked.defvjp(_blocked_fwd, _blocked_bwd)
