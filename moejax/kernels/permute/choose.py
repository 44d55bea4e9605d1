"""Which implementation of the permutations a device and a width get, and its moves."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moejax.kernels.device import KernelChoice, hopper_or, why_not_hopper
from moejax.kernels.permute import portable

Implementation = Literal["auto", "reference", "xla", "hopper"]


class Moves(NamedTuple):
    """What both permutations and their gradients are made of, in one implementation.
    Rows that no table names are not looked at, and zero in results; sums are taken in
    float32, and results have their rows' dtype."""

    take: Callable[[Array, Array], Array]
    """(x_nd, source_m) -> x_md"""
    weighted_sum: Callable[[Array, Array | None, Array], Array]
    """(y_md, gate_nk, positions_nk) -> out_nd; without gates the plain sum"""
    combine_backward: Callable[..., tuple[Array, Array]]
    """(dout_nd, y_md, gate_nk, positions_nk, assignment_m) -> dy_md, dgate_nk"""


def choose_permute(dtype: jax.typing.DTypeLike, d: int) -> KernelChoice:
    """Return the choice for gathers and weighted sums of rows of this width."""
    if why := why_not_hopper():
        return KernelChoice("xla", why)
    # Pallas takes half a second to import, and only Hopper GPUs need it.
    from moejax.kernels.permute.hopper import declines

    return hopper_or("xla", declines(jnp.dtype(dtype), d))


@functools.cache
def make_moves(implementation: Literal["xla", "hopper"], interpret: bool) -> Moves:
    """Return the moves of an implementation: always the same object, for it is part of
    what a trace is cached by."""
    if implementation == "xla":
        return Moves(portable.take, portable.weighted_sum, portable.combine_backward)
    if implementation != "hopper":
        known = ", ".join(get_args(Implementation))
        raise ValueError(f"implementation={implementation!r} is not one of {known}")
    # Pallas takes half a second to import, and only this needs it.
    from moejax.kernels.permute import hopper

    moves = hopper.take, hopper.weighted_sum, hopper.combine_backward
    return Moves(*(functools.partial(move, interpret=interpret) for move in moves))
