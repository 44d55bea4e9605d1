"""The public functions gather_rows, sum_rows and combine_rows, with their gradients.

The assignment of tokens to buffer rows is given from both sides: each buffer row names
its source (source_m, assignment_m), and each choice of a token names its buffer row
(positions_nk). One side serves the forward pass and the other the backward pass. For
example, with n = 2 tokens, k = 2 choices and m = 4 buffer rows:

    positions_nk = [[2, 0], [-1, 1]]    assignment_m = [1, 3, 0, -1]    n * 2 + k
                                            source_m = [0, 1, 0, -1]    assignment // 2
"""

import functools

import jax
from jaxtyping import Array, Float, Int

from moejax.kernels import varying_alike
from moejax.kernels.permute import reference
from moejax.kernels.permute.choose import (
    Implementation,
    Moves,
    choose_permute,
    make_moves,
)


def gather_rows(
    x_nd: Float[Array, "n d"],
    source_m: Int[Array, " m"],
    positions_nk: Int[Array, "n k"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "m d"]:
    """Return the buffer whose row j is x_nd[source_m[j]], or 0 where source_m[j] is -1.

    It is differentiable in x_nd, and the backward pass sums over k in float32.
    positions_nk is the buffer row of choice k of token n, or -1 where it has none.

    The implementation 'auto' takes 'hopper' where the device and the rows allow it, and
    'xla' elsewhere. 'hopper' runs on Hopper GPUs, and raises NotImplementedError for
    rows that hopper.declines names.
    """
    arrays = varying_alike(x_nd, source_m, positions_nk)
    if implementation == "auto":
        implementation = choose_permute(x_nd.dtype, x_nd.shape[1]).value
    if implementation == "reference":
        return reference.gather_rows(*arrays)
    return _gather_rows(*arrays, make_moves(implementation, interpret=False))


def sum_rows(
    y_md: Float[Array, "m d"],
    positions_nk: Int[Array, "n k"],
    source_m: Int[Array, " m"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "n d"]:
    """Return, for each token n, the sum over k of y_md[positions_nk[n, k]], without the
    choices whose position is -1: the transpose of gather_rows.

    It is differentiable in y_md. Sums are taken in float32. source_m is the token of
    each buffer row, -1 for an empty one. `implementation` is as in gather_rows.
    """
    arrays = varying_alike(y_md, positions_nk, source_m)
    if implementation == "auto":
        implementation = choose_permute(y_md.dtype, y_md.shape[1]).value
    if implementation == "reference":
        return reference.sum_rows(*arrays)
    return _sum_rows(*arrays, make_moves(implementation, interpret=False))


def combine_rows(
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"],
    positions_nk: Int[Array, "n k"],
    assignment_m: Int[Array, " m"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "n d"]:
    """Return, for each token n, the sum over k of
    gate_nk[n, k] * y_md[positions_nk[n, k]], without the choices whose position is -1.

    It is differentiable in y_md and gate_nk. Sums are taken in float32, and the result
    has y_md's dtype. assignment_m is n * K + k for the buffer row of choice k of token
    n, where tokens have K choices, and -1 for an empty row. Buffer rows that no
    position names are not read. `implementation` is as in gather_rows.
    """
    arrays = varying_alike(y_md, gate_nk, positions_nk, assignment_m)
    if implementation == "auto":
        implementation = choose_permute(y_md.dtype, y_md.shape[1]).value
    if implementation == "reference":
        return reference.combine_rows(*arrays)
    return _combine_rows(*arrays, make_moves(implementation, interpret=False))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gather_rows(
    x_nd: Array, source_m: Array, positions_nk: Array, moves: Moves
) -> Array:
    return moves.take(x_nd, source_m)


def _gather_rows_fwd(x_nd: Array, source_m: Array, positions_nk: Array, moves: Moves):
    return moves.take(x_nd, source_m), positions_nk


def _gather_rows_bwd(moves: Moves, positions_nk: Array, dout_md: Array):
    return moves.weighted_sum(dout_md, None, positions_nk), None, None


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sum_rows(y_md: Array, positions_nk: Array, source_m: Array, moves: Moves) -> Array:
    return moves.weighted_sum(y_md, None, positions_nk)


def _sum_rows_fwd(y_md: Array, positions_nk: Array, source_m: Array, moves: Moves):
    return moves.weighted_sum(y_md, None, positions_nk), source_m


def _sum_rows_bwd(moves: Moves, source_m: Array, dout_nd: Array):
    return moves.take(dout_nd, source_m), None, None


_sum_rows.defvjp(_sum_rows_fwd, _sum_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _combine_rows(
    y_md: Array,
    gate_nk: Array,
    positions_nk: Array,
    assignment_m: Array,
    moves: Moves,
) -> Array:
    return moves.weighted_sum(y_md, gate_nk, positions_nk)


def _combine_rows_fwd(
    y_md: Array,
    gate_nk: Array,
    positions_nk: Array,
    assignment_m: Array,
    moves: Moves,
):
    out_nd = moves.weighted_sum(y_md, gate_nk, positions_nk)
    return out_nd, (y_md, gate_nk, positions_nk, assignment_m)


def _combine_rows_bwd(moves: Moves, saved: tuple[Array, ...], dout_nd: Array):
    _, gate_nk, *_ = saved
    dy_md, dgate_nk = moves.combine_backward(dout_nd, *saved)
    return dy_md, dgate_nk.astype(gate_nk.dtype), None, None


_combine_rows.defvjp(_combine_rows_fwd, _combine_rows_bwd)
