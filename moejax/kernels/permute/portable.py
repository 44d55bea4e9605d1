"""The moves of the row permutations in plain XLA operations, for any device.

They use gathers and no scatters, because XLA scatters one row after the other.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def take(x: Float[Array, "n ..."], index_m: Int[Array, " m"]) -> Float[Array, "m ..."]:
    """Return x[index_m], with zeros where the index is -1."""
    is_here = (index_m >= 0).reshape((-1,) + (1,) * (x.ndim - 1))
    rows = x.at[jnp.maximum(index_m, 0)].get(mode="promise_in_bounds")
    return jnp.where(is_here, rows, 0)


def weighted_sum(
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"] | None,
    positions_nk: Int[Array, "n k"],
) -> Float[Array, "n d"]:
    """Return, for each token n, the sum over k of
    gate_nk[n, k] * y_md[positions_nk[n, k]].

    Choices whose position is -1 are left out. Gates of None count as 1. Sums are taken
    in float32, and the result has y_md's dtype. XLA fuses the loop over k into one
    pass, so that an array of n * k rows is never made.
    """
    out_nd = 0.0
    for k in range(positions_nk.shape[1]):
        position_n = positions_nk[:, k]
        row_nd = take(y_md, position_n).astype(jnp.float32)
        if gate_nk is not None:
            row_nd *= jnp.where(position_n >= 0, gate_nk[:, k], 0)[:, None]
        out_nd += row_nd
    return out_nd.astype(y_md.dtype)


def combine_backward(
    dout_nd: Float[Array, "n d"],
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"],
    positions_nk: Int[Array, "n k"],
    assignment_m: Int[Array, " m"],
) -> tuple[Float[Array, "m d"], Float[Array, "n k"]]:
    """Return the cotangents of y_md and of gate_nk for the cotangent dout_nd of
    weighted_sum(y_md, gate_nk, positions_nk).

    The first has y_md's dtype and zeros in rows without an assignment. The second is
    float32, with zeros for choices without a position.
    """
    num_choices = gate_nk.shape[1]
    # Floor division keeps -1 at -1.
    dout_md = take(dout_nd, assignment_m // num_choices).astype(jnp.float32)
    gate_m = take(gate_nk.reshape(-1), assignment_m)
    dy_md = (gate_m[:, None] * dout_md).astype(y_md.dtype)
    # Rows of the buffer are fewer than choices, most of which may have none.
    is_used_m = (assignment_m >= 0)[:, None]
    dgate_m = jnp.sum(dout_md * jnp.where(is_used_m, y_md, 0).astype(jnp.float32), 1)
    return dy_md, take(dgate_m, positions_nk.reshape(-1)).reshape(positions_nk.shape)
