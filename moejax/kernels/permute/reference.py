"""Definition of the row permutations, with gradients derived by JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def gather_rows(
    x_nd: Float[Array, "n d"],
    source_m: Int[Array, " m"],
    positions_nk: Int[Array, "n k"],
) -> Float[Array, "m d"]:
    """Return the buffer whose row j is x_nd[source_m[j]], or 0 where source_m[j] is -1.

    positions_nk is the same table seen from the tokens. Only fast backward passes need
    it.
    """
    del positions_nk
    return jnp.where((source_m >= 0)[:, None], x_nd[source_m], 0)


def sum_rows(
    y_md: Float[Array, "m d"],
    positions_nk: Int[Array, "n k"],
    source_m: Int[Array, " m"],
) -> Float[Array, "n d"]:
    """Return, for each token n, the sum over k of y_md[positions_nk[n, k]], without the
    choices whose position is -1.

    source_m is the same table seen from the buffer. Only fast backward passes need it.
    """
    del source_m
    return combine_rows(y_md, jnp.ones(positions_nk.shape), positions_nk, None)


def combine_rows(
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"],
    positions_nk: Int[Array, "n k"],
    assignment_m: Int[Array, " m"],
) -> Float[Array, "n d"]:
    """Return, for each token n, the sum over k of
    gate_nk[n, k] * y_md[positions_nk[n, k]], without the choices whose position is -1.

    assignment_m is the same table seen from the buffer. Only fast backward passes need
    it.
    """
    del assignment_m
    is_here_nk = positions_nk >= 0
    y_nkd = jnp.where(is_here_nk[:, :, None], y_md[positions_nk], 0)
    gate_nk = jnp.where(is_here_nk, gate_nk, 0)
    dtype = jnp.promote_types(y_md.dtype, jnp.float32)
    out_nd = jnp.einsum("nk,nkd->nd", gate_nk, y_nkd.astype(dtype))
    return out_nd.astype(y_md.dtype)
