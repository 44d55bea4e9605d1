"""Choice of the implementation of the row permutations, by device and row width."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moejax.choice import Choice
from moejax.kernels.device import hopper_or, why_not_hopper
from moejax.kernels.permute import portable

Implementation = Literal["auto", "reference", "xla", "hopper"]


class Moves(NamedTuple):
    """Three functions, in one implementation, of which both permutations and their
    gradients are made.

    Rows that no table names are not read, and result rows that have no source are zero.
    Sums are taken in float32, and results have the dtype of their rows.
    """

    take: Callable[[Array, Array], Array]
    """(x_nd, source_m) -> x_md: row j is row source_m[j] of x_nd."""
    weighted_sum: Callable[[Array, Array | None, Array], Array]
    """(y_md, gate_nk, positions_nk) -> out_nd: for each token, the sum of its k rows
    times their gates, or the plain sum for gates of None."""
    combine_backward: Callable[..., tuple[Array, Array]]
    """(dout_nd, y_md, gate_nk, positions_nk, assignment_m) -> (dy_md, dgate_nk): the
    gradients of weighted_sum."""


def choose_permute(dtype: jax.typing.DTypeLike, d: int) -> Choice[str]:
    """Return the implementation for rows of d values on the current device."""
    if why := why_not_hopper():
        return Choice("xla", why)
    # Importing Pallas takes half a second, and only Hopper GPUs need it.
    from moejax.kernels.permute.hopper import declines

    return hopper_or("xla", declines(jnp.dtype(dtype), d))


@functools.cache
def make_moves(implementation: Literal["xla", "hopper"], interpret: bool) -> Moves:
    """Return the moves of an implementation. Equal arguments give the same object,
    because it is part of the key under which JAX caches a trace."""
    if implementation == "xla":
        return Moves(portable.take, portable.weighted_sum, portable.combine_backward)
    if implementation != "hopper":
        known = ", ".join(get_args(Implementation))
        raise ValueError(f"implementation={implementation!r} is not one of {known}")
    # Importing Pallas takes half a second, and only this path needs it.
    from moejax.kernels.permute import hopper

    moves = hopper.take, hopper.weighted_sum, hopper.combine_backward
    return Moves(*(functools.partial(move, interpret=interpret) for move in moves))
