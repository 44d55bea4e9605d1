"""The permutations with backward passes that gather too: XLA scatters row by row.

A dispatch is known from both sides: each buffer row names where it comes from
(source_m, assignment_m), each choice of a token where it went (positions_nk). One side
serves the forward pass, the other the backward pass. Here n = 2, k = 2, m = 4:

    positions_nk = [[2, 0], [-1, 1]]    assignment_m = [1, 3, 0, -1]    n * 2 + k
                                            source_m = [0, 1, 0, -1]    assignment // 2
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.kernels import varying_alike


def gather_rows(
    x_nd: Float[Array, "n d"],
    source_m: Int[Array, " m"],
    positions_nk: Int[Array, "n k"],
) -> Float[Array, "m d"]:
    """Row j is x_nd[source_m[j]], or 0 where source_m[j] is -1;
    differentiable in x_nd.

    positions_nk names the buffer row of choice k of token n, or -1 when it has none.
    The backward pass sums over k in float32.
    """
    return _gather_rows(*varying_alike(x_nd, source_m, positions_nk))


def combine_rows(
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"],
    positions_nk: Int[Array, "n k"],
    assignment_m: Int[Array, " m"],
) -> Float[Array, "n d"]:
    """Row n is the sum over k of gate_nk[n, k] * y_md[positions_nk[n, k]], without the
    choices whose position is -1; differentiable in y_md and gate_nk.

    Sums are taken in float32, the result has y_md's dtype. assignment_m is n * K + k
    for the buffer row of choice k of token n, -1 for an empty row. Buffer rows that no
    position names are not looked at.
    """
    return _combine_rows(*varying_alike(y_md, gate_nk, positions_nk, assignment_m))


@jax.custom_vjp
def _gather_rows(x_nd: Array, source_m: Array, positions_nk: Array) -> Array:
    return _take(x_nd, source_m)


def _gather_rows_fwd(x_nd: Array, source_m: Array, positions_nk: Array):
    return _take(x_nd, source_m), positions_nk


def _gather_rows_bwd(positions_nk: Array, dout_md: Array):
    ones_nk = jnp.ones(positions_nk.shape, jnp.float32)
    return _weighted_sum(dout_md, ones_nk, positions_nk), None, None


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


@jax.custom_vjp
def _combine_rows(
    y_md: Array, gate_nk: Array, positions_nk: Array, assignment_m: Array
) -> Array:
    return _weighted_sum(y_md, gate_nk, positions_nk)


def _combine_rows_fwd(
    y_md: Array, gate_nk: Array, positions_nk: Array, assignment_m: Array
):
    out_nd = _weighted_sum(y_md, gate_nk, positions_nk)
    return out_nd, (y_md, gate_nk, positions_nk, assignment_m)


def _combine_rows_bwd(saved: tuple[Array, Array, Array, Array], dout_nd: Array):
    y_md, gate_nk, positions_nk, assignment_m = saved
    num_choices = gate_nk.shape[1]
    # Floor division keeps -1 at -1.
    dout_md = _take(dout_nd, assignment_m // num_choices).astype(jnp.float32)
    gate_m = _take(gate_nk.reshape(-1), assignment_m)
    dy_md = (gate_m[:, None] * dout_md).astype(y_md.dtype)
    dgate_k = [
        jnp.sum(
            dout_nd.astype(jnp.float32)
            * _take(y_md, positions_nk[:, k]).astype(jnp.float32),
            axis=1,
        )
        for k in range(num_choices)
    ]
    return dy_md, jnp.stack(dgate_k, 1).astype(gate_nk.dtype), None, None


_combine_rows.defvjp(_combine_rows_fwd, _combine_rows_bwd)


def _weighted_sum(y_md: Array, gate_nk: Array, positions_nk: Array) -> Array:
    """One fused pass: an array of n * k rows is never made."""
    out_nd = 0.0
    for k in range(positions_nk.shape[1]):
        position_n = positions_nk[:, k]
        gate_n1 = jnp.where(position_n >= 0, gate_nk[:, k], 0)[:, None]
        out_nd += gate_n1 * _take(y_md, position_n).astype(jnp.float32)
    return out_nd.astype(y_md.dtype)


def _take(x: Array, index: Array) -> Array:
    """x[index], zero where the index is -1."""
    is_here = (index >= 0).reshape((-1,) + (1,) * (x.ndim - 1))
    rows = x.at[jnp.maximum(index, 0)].get(mode="promise_in_bounds")
    return jnp.where(is_here, rows, 0)
