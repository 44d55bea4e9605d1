"""Inputs of grouped products of any size, and the check of a sample of their results.

moejax/kernels/cases.py defines the products and has the tolerances. Its cases are
small; here a sample of the groups, rows and columns of a large product is compared with
the definition in float64.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moejax.kernels.cases import Case, operand_dims, product_case
from moejax.kernels.shapes import ProductShape
from moejax.plan.layout import max_aligned_rows

MAX_GROUPS = 4
"""Number of groups in a sample, beside the fullest and an empty one."""
MAX_ROWS, MAX_COLUMNS = 32, 512
"""Number of rows of each group, and of columns, in the sample of a product of rows. One
of 28 columns is in it for a width of 14336, so that every chunk of 32 has one."""
WGRAD_COLUMNS = 64
"""Number of rows, and of columns, of each matrix in the sample of a wgrad."""


def draw(which: str, shape: ProductShape, dtype: str, seed: int) -> tuple[Array, ...]:
    """Return normal random numbers on the device as the arrays that a pass takes before
    rows_g. Matrices are divided by the root of their height, so that x @ w has variance
    1. The pass `grads` takes x_md, w_gdf and dy_mf."""
    sizes = shape.rows, shape.d, shape.f, shape.groups
    dims = operand_dims("forward" if which == "grads" else which, *sizes)
    if which == "grads":
        dims.append((shape.rows, shape.f))
    keys = jax.random.split(jax.random.key(seed), len(dims))
    return tuple(_normal(key, own, dtype) for key, own in zip(keys, dims))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, dims: tuple[int, ...], dtype: str) -> Array:
    *groups, height, width = dims
    if not groups:
        return jax.random.normal(key, dims, dtype)
    # One matrix at a time: random bits of all would take several times their memory.
    return jax.lax.map(
        lambda key: height**-0.5 * jax.random.normal(key, (height, width), dtype),
        jax.random.split(key, *groups),
    )


def aligned_arguments(
    operands: Sequence[Array], rows_g: np.ndarray, align_rows: int
) -> tuple[Array, ...]:
    """Return the arguments of a pass, with zero rows behind each group that make its
    rows a multiple of `align_rows`, and rows of NaN behind the last group."""
    if align_rows == 1:
        return *operands, jnp.asarray(rows_g)
    position_m, aligned_g = _align(rows_g, align_rows)
    num_rows = max_aligned_rows(len(position_m), len(rows_g), align_rows)

    def spread(array):
        zeros = jnp.zeros((num_rows, array.shape[1]), array.dtype)
        return zeros.at[aligned_g.sum() :].set(jnp.nan).at[position_m].set(array)

    arrays = (array if array.ndim == 3 else spread(array) for array in operands)
    return *arrays, jnp.asarray(aligned_g)


def without_gaps(results: Any, rows_g: np.ndarray, align_rows: int) -> Any:
    """Return the results of aligned_arguments with the groups' rows end to end."""
    if align_rows == 1:
        return results
    position_m, _ = _align(rows_g, align_rows)
    return jax.tree.map(lambda a: a if a.ndim == 3 else a[position_m], results)


def _align(rows_g: np.ndarray, align_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of each row where the rows of groups are multiples of
    `align_rows`, and these multiples."""
    aligned_g = -(-rows_g // align_rows) * align_rows
    gaps_g = aligned_g - rows_g
    moved_m = np.repeat(np.cumsum(gaps_g) - gaps_g, rows_g)
    return np.arange(len(moved_m)) + moved_m, aligned_g


class Sample(NamedTuple):
    """A sample of the results of one pass."""

    take: Callable[[Any], Any]
    """Function that returns the sampled part of the pass's results."""
    expected: Any
    """Values by the definition, computed in float64."""
    case: Case
    """Case of the pass, with its tolerance."""

    def error(self, results: Any) -> float:
        """Return the error of the results; infinite if any value is not finite."""
        if not all(jax.tree.leaves(jax.tree.map(_is_finite, results))):
            return np.inf
        return self.case.error(jax.device_get(self.take(results)), self.expected)


def make_samples(
    which: str, operands: Sequence[Array], rows_g: np.ndarray, max_rows: int = MAX_ROWS
) -> list[Sample]:
    """Return a sample for each product of a pass, three for `grads`, with at most
    `max_rows` rows of a group. All rows belong to groups."""
    parts = {which: operands}
    if which == "grads":
        x_md, w_gdf, dy_mf = operands
        parts = {"forward": (x_md, w_gdf), "dgrad": (dy_mf, w_gdf)}
        parts["wgrad"] = x_md, dy_mf
    return [_make_sample(part, own, rows_g, max_rows) for part, own in parts.items()]


def _make_sample(
    which: str, arrays: Sequence[Array], rows_g: np.ndarray, max_rows: int
) -> Sample:
    case = product_case(which, arrays[0].dtype.name, 128, 128, (128,), align_rows=128)
    full, empty = np.flatnonzero(rows_g), np.flatnonzero(rows_g == 0)
    some = full[_spread(len(full), MAX_GROUPS)]
    chosen = np.unique([*some, rows_g.argmax(), *empty[:1]])
    max_rows = rows_g.max() if which == "wgrad" else max_rows
    first_g = np.cumsum(rows_g) - rows_g
    by_group = [first_g[i] + _spread(rows_g[i], max_rows) for i in chosen]
    rows, counts = np.concatenate(by_group), np.array([len(r) for r in by_group])
    if which == "wgrad":
        of_x, of_dy = (_spread(a.shape[1], WGRAD_COLUMNS) for a in arrays)
        sampled = [a[:, own][rows] for a, own in zip(arrays, (of_x, of_dy))]

        def take(dw_gdf):
            return dw_gdf[chosen][:, of_x][:, :, of_dy]

    else:
        x, matrix, *others = arrays
        axis = 1 if which.endswith("dgrad") else 2
        width = matrix.shape[axis] // (2 if which == "swiglu" else 1)

        def columns(array, axis=1):
            # Gate and up are side by side, and have the same columns in the sample.
            blocks = np.arange(0, array.shape[axis], width)[:, None]
            return jnp.take(array, (blocks + _spread(width, MAX_COLUMNS)).ravel(), axis)

        def take(results):
            return jax.tree.map(lambda out: columns(out[rows]), results)

        others = (columns(array[rows]) for array in others)
        sampled = [x[rows], columns(matrix[chosen], axis), *others]
    arguments = (*jax.device_get(sampled), counts.astype(np.int32))
    return Sample(take, case.expected(arguments), case)


def _spread(size: int, count: int) -> np.ndarray:
    """Return `count` numbers spread evenly from 0 to size - 1, or all if there are
    fewer."""
    return np.unique(np.linspace(0, size - 1, min(size, count)).astype(int))


@jax.jit
def _is_finite(array: Array) -> Array:
    return jnp.isfinite(array).all()
