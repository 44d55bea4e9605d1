"""The kernels whose machine code tools/kernel_code.py reads: grouped products by shape
and pass, and the kernels of the other operations, each at one size."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.kernels.cases import operand_dims
from moejax.kernels.shapes import MODEL_SHAPES
from moejax.kernels.tuning import Pass, Tiles, align_rows_for, default_tiles
from moejax.plan.layout import max_aligned_rows

PRODUCTS: tuple[Pass, ...] = ("swiglu", "forward", "swiglu_dgrad", "dgrad", "wgrad")
"""Passes of an expert layer in 2-byte dtypes, in the order in which training runs
them."""
OTHERS = ("permute", "water_fill")
"""Kernels of the other operations: rows of OLMoE, eight bins."""


class KernelCase(NamedTuple):
    """A program of kernels to compile."""

    tiles: Tiles | None
    """Tiles of a product; None for other operations."""
    function: Callable
    arguments: tuple
    """Shapes of the arguments."""


def product(
    shape: str, which: Pass, fields: Mapping[str, Any], dtype: str
) -> KernelCase:
    """Return the case of one grouped product, with its default tiles but for some
    fields. Raises ValueError where such tiles do not exist."""
    from moejax.kernels.grouped_dot.hopper import kernels

    sizes = MODEL_SHAPES[shape]
    align_rows = align_rows_for(sizes.rows, sizes.groups)
    num_rows = max_aligned_rows(sizes.rows, sizes.groups, align_rows)
    sizes = dataclasses.replace(sizes, rows=num_rows)
    tiles = dataclasses.replace(default_tiles(which, sizes, align_rows), **fields)
    dims = operand_dims(which, num_rows, sizes.d, sizes.f, sizes.groups)
    arguments = tuple(jax.ShapeDtypeStruct(own, dtype) for own in dims)
    rows_g = jax.ShapeDtypeStruct((sizes.groups,), jnp.int32)
    function = functools.partial(getattr(kernels, which), tiles=tiles)
    return KernelCase(tiles, function, (*arguments, rows_g))


def other(name: str) -> KernelCase:
    """Return the case of one of OTHERS."""
    function, arguments = {"permute": _permute, "water_fill": _water_fill}[name]()
    return KernelCase(None, function, arguments)


def _permute() -> tuple[Callable, tuple]:
    from moejax.kernels.permute import hopper

    def all_moves(x_nd, y_md, gate_nk, positions_nk, assignment_m):
        return (
            hopper.take(x_nd, assignment_m),
            hopper.weighted_sum(y_md, gate_nk, positions_nk),
            hopper.combine_backward(x_nd, y_md, gate_nk, positions_nk, assignment_m),
        )

    n, k, d = 4096, 8, 2048
    x_nd, y_md = (jax.ShapeDtypeStruct((rows, d), jnp.bfloat16) for rows in (n, n * k))
    gate_nk = jax.ShapeDtypeStruct((n, k), jnp.float32)
    positions_nk = jax.ShapeDtypeStruct((n, k), jnp.int32)
    assignment_m = jax.ShapeDtypeStruct((n * k,), jnp.int32)
    return all_moves, (x_nd, y_md, gate_nk, positions_nk, assignment_m)


def _water_fill() -> tuple[Callable, tuple]:
    from moejax.kernels.water_fill import hopper

    table_cw = jax.ShapeDtypeStruct((64, 8), jnp.int32)
    line_w, number = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((8,), ()))
    function = functools.partial(hopper.water_fill, max_sweeps=8)
    return function, (table_cw, table_cw, line_w, number, number)
