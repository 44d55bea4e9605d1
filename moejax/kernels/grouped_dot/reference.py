"""Definitions of the grouped product, which takes g times the necessary FLOPs, and of
SwiGLU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_dot(
    x_md: Float[Array, "m d"], w_gdf: Float[Array, "g d f"], rows_g: Int[Array, " g"]
) -> Float[Array, "m f"]:
    """Return the rows x_md[j] @ w_gdf[i], where i is the group that owns row j.

    Group 0 owns the first rows_g[0] rows, group 1 the next rows_g[1] rows, and so on. A
    row that no group owns is zero in the result, and the values of it and of its
    cotangent have no effect.
    """
    num_groups = w_gdf.shape[0]
    ends_g = jnp.cumsum(rows_g)
    owner_m = jnp.searchsorted(ends_g, jnp.arange(x_md.shape[0]), side="right")
    accumulate = jnp.promote_types(x_md.dtype, jnp.float32)
    y_mf = jnp.zeros((x_md.shape[0], w_gdf.shape[2]), accumulate)
    for i in range(num_groups):
        owned_m1 = (owner_m == i)[:, None]
        x_owned_md = jnp.where(owned_m1, x_md, 0)
        product_mf = jnp.dot(x_owned_md, w_gdf[i], preferred_element_type=accumulate)
        # This second mask is for the backward pass: its transpose keeps the cotangents
        # of other groups' rows out of the gradient of w.
        y_mf += jnp.where(owned_m1, product_mf, 0)
    return y_mf.astype(x_md.dtype)


def swiglu(into_mh: Float[Array, "m 2f"]) -> Float[Array, "m f"]:
    """Return silu(gate) * up, where gate are the first f columns and up the others."""
    gate_mf, up_mf = jnp.split(into_mh, 2, axis=-1)
    return jax.nn.silu(gate_mf) * up_mf
