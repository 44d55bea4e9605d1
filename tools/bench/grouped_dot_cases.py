"""Cases of the kernels' benchmark and of the search for tiles: inputs, FLOPs, bytes,
and the check of results.

    forward  y = x w             dgrad  dx = dy w.T           wgrad  dw = x.T dy
    fused    into_mh = x [gate, up], and h = silu(x gate) * (x up): the first product of
             a feed-forward layer, with the result that its backward pass needs; into
             has 2f columns
    grads    y, dx and dw in one program, as training runs them

These are the passes of tools/bench/grouped_dot.py. tools/tune_kernels.py has the first
three, `swiglu`, which is the same as `fused`, and

    swiglu_dgrad  dinto_mh, the gradient of into_mh where dy is that of h @ down, and h
                  computed again
    fp8_forward   forward on 8-bit values; the reference is the same
    fp8_dgrad     dgrad on 8-bit values; the reference is the same

The reference is computed by NumPy in float64 from the same inputs. An error is
||out - ref|| / ||ref||.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moejax.kernels.shapes import ProductShape, Skew, make_rows

PASSES = ("forward", "dgrad", "wgrad", "fused", "grads")
"""Passes of the benchmark."""
OPERANDS = {
    "forward": ("x_md", "w_gdf"),
    "dgrad": ("dy_mf", "w_gdf"),
    "wgrad": ("x_md", "dy_mf"),
    "fused": ("x_md", "into_gdh"),
    "grads": ("x_md", "w_gdf", "dy_mf"),
    "swiglu": ("x_md", "into_gdh"),
    "swiglu_dgrad": ("dy_md", "down_gfd", "into_mh"),
    "fp8_forward": ("x_md", "w_gdf"),
    "fp8_dgrad": ("dy_mf", "w_gdf"),
}
"""Arguments of each pass before rows_g."""
PARTS = {
    "grads": ("forward", "dgrad", "wgrad"),
    "fused": ("h", "into"),
    "swiglu": ("h", "into"),
    "swiglu_dgrad": ("dinto", "h_again"),
}
"""Names of the arrays that a pass returns, for passes that return several."""
OPERANDS_OF_PARTS = {
    part: OPERANDS[part if part in OPERANDS else which]
    for which in OPERANDS
    for part in PARTS.get(which, (which,))
}
PRODUCTS = {"forward": 1, "dgrad": 1, "wgrad": 1, "fused": 2, "grads": 3}
"""Number of products of 2 * rows * d * f FLOPs in each pass of the benchmark."""
MAX_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
MAX_ERROR_TF32 = 1e-3
"""Maximum error in float32 on a GPU, whose matrix units round inputs to 10 bits."""
MAX_ERROR_FP8 = 2**0.5 * 2**-4
"""Maximum error in fp8, whose values have 3 bits after the leading one.

Each value is off by at most 1/16 of itself, independently in both operands. The average
error is half of that."""
SEED_OF_ROWS = 0
SAMPLED_ENDS, SAMPLED_WIDTH = 8, 64
SAMPLED_COLUMNS = 512
"""Number of columns that are sampled in a row: one in 28 of a width of 14336, so that
every chunk of 32 columns has one."""


class ProductCase(NamedTuple):
    """Inputs of a pass, in the order of OPERANDS. Rows after the first rows_g.sum() are
    padding."""

    operands: tuple[Array, ...]
    rows_g: np.ndarray

    @property
    def num_rows(self) -> int:
        """Number of rows without padding."""
        return int(self.rows_g.sum())

    def without_groups(self) -> "ProductCase":
        """Return the case that `dense` computes: all rows, padding included, belong to
        the first matrix."""
        first = tuple(a[:1] if a.ndim == 3 else a for a in self.operands)
        rows = next(a.shape[0] for a in self.operands if a.ndim == 2)
        return ProductCase(first, np.array([rows], np.int32))

    def poisoned(self) -> "ProductCase":
        """Return the case with NaN in its padding."""
        is_padding_m1 = np.arange(self.operands[0].shape[0])[:, None] >= self.num_rows
        return self._replace(
            operands=tuple(
                a if a.ndim == 3 else jnp.where(is_padding_m1, jnp.nan, a)
                for a in self.operands
            )
        )


def operands(
    which: str, shape: ProductShape, dtype: str, seed: int
) -> tuple[Array, ...]:
    """Return normal random numbers on the device as the operands of a pass. Matrices
    are divided by the root of their height, so that x @ w has variance 1."""
    rows, d, f, groups = shape.rows, shape.d, shape.f, shape.groups
    dims = {
        "x_md": (rows, d),
        "dy_md": (rows, d),
        "dy_mf": (rows, f),
        "into_mh": (rows, 2 * f),
        "w_gdf": (groups, d, f),
        "into_gdh": (groups, d, 2 * f),
        "down_gfd": (groups, f, d),
    }
    keys = jax.random.split(jax.random.key(seed), len(OPERANDS[which]))
    return tuple(
        _normal(key, dims[name], dtype) for key, name in zip(keys, OPERANDS[which])
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, dims: tuple[int, ...], dtype: str) -> Array:
    if len(dims) == 2:
        return jax.random.normal(key, dims, dtype)
    groups, height, _ = dims
    # One matrix at a time: random bits of all would take several times their memory.
    return jax.lax.map(
        lambda key: (
            jax.random.normal(key, dims[1:], dtype) * jnp.asarray(height**-0.5, dtype)
        ),
        jax.random.split(key, groups),
    )


def small(shape: ProductShape) -> ProductShape:
    """Return the shape on which all results of an implementation are checked: at most
    600 rows, widths of 256 and 16 groups."""
    limit = ProductShape(rows=600, d=256, f=256, groups=16)
    pairs = (
        (getattr(shape, n), getattr(limit, n)) for n in ("rows", "d", "f", "groups")
    )
    return ProductShape(*(min(pair) for pair in pairs))


def small_case(
    which: str, shape: ProductShape, dtype: str, seed: int, skew: Skew
) -> ProductCase:
    """Return a case of the small shape and of this skew, an eighth of whose rows are
    padding."""
    shape = small(shape)
    num_owned = shape.rows - shape.rows // 8
    rows_g = make_rows(skew, num_owned, shape.groups, SEED_OF_ROWS)
    return ProductCase(operands(which, shape, dtype, seed), rows_g)


def flops(which: str, shape: ProductShape) -> int:
    """Return the FLOPs of a pass of the benchmark."""
    return PRODUCTS[which] * 2 * shape.rows * shape.d * shape.f


def min_bytes(
    which: str, shape: ProductShape, rows_g: np.ndarray, itemsize: int
) -> int:
    """Return the bytes of a pass that reads each input and writes each output once.

    Weights are read only for groups that have rows. All of dw is written: that of an
    empty group is zero.
    """
    x, dy, matrix = shape.rows * shape.d, shape.rows * shape.f, shape.d * shape.f
    read, written = int((rows_g > 0).sum()) * matrix, shape.groups * matrix
    counts = {
        "forward": x + read + dy,
        "dgrad": dy + read + x,
        "wgrad": x + dy + written,
        "fused": x + 2 * read + dy + 2 * dy,
        "grads": (x + read + dy) + (dy + x + written),
    }
    return counts[which] * itemsize


def max_error(dtype: str, device: str, which: str = "", *, is_fp8=False) -> float:
    """Return the maximum error of a right result."""
    if is_fp8:  # in `fused`, h is a product of two results
        return MAX_ERROR_FP8 * (2 if which == "fused" else 1)
    if (dtype, device) == ("float32", "gpu"):
        return MAX_ERROR_TF32
    return MAX_ERROR[dtype]


def largest_error(
    which: str, results, case: ProductCase, *, has_zero_padding: bool
) -> float:
    """Return the largest error of a pass's results, all of whose elements are compared;
    infinite if one is not finite. Padding counts only if it must be zero."""
    errors = []
    for part, arrays, out in pass_parts(which, case, results):
        has_all = part == "wgrad" or has_zero_padding
        rows = slice(None if has_all else case.num_rows)
        reference = compute_reference(part, [*map(_float64, arrays)], case.rows_g)
        errors.append(relative_error(_float64(out)[rows], reference[rows]))
    return max(errors)


def sampled_error(which: str, results, case: ProductCase) -> float:
    """Return the largest error over a sample of groups, for a case of full size.

    Compared are some columns of the groups' first and last rows, or some rows and
    columns of their gradients. The error is infinite if any result is not finite.
    """
    errors = []
    for part, arrays, out in pass_parts(which, case, results):
        if not _is_finite(out):
            return np.inf
        sampled, results_g, rows_g = sample(part, arrays, out, case.rows_g)
        reference = compute_reference(part, sampled, rows_g)
        ends_g = range(1, len(rows_g)) if part == "wgrad" else np.cumsum(rows_g)[:-1]
        by_group = (np.split(whole, ends_g) for whole in (results_g, reference))
        errors += map(relative_error, *by_group)
    return max(errors)


def pass_parts(which: str, case: ProductCase, results) -> Iterator[tuple]:
    """Yield the name, the operands and the computed value of each array that a pass
    returns."""
    which = which.removeprefix("fp8_")
    by_name = dict(zip(OPERANDS[which], case.operands, strict=True))
    parts = PARTS.get(which, (which,))
    outs = results if which in PARTS else (results,)
    for part, out in zip(parts, outs, strict=True):
        yield part, [by_name[name] for name in OPERANDS_OF_PARTS[part]], out


def compute_reference(
    part: str, arrays: Sequence[np.ndarray], rows_g: np.ndarray
) -> np.ndarray:
    """Compute one array of a pass by its definition, group by group; padding is
    zero."""
    ends_g = np.cumsum(rows_g)
    spans = [slice(end - rows, end) for rows, end in zip(rows_g, ends_g)]
    x, other, *more = arrays
    if part == "wgrad":
        return np.stack([x[span].T @ other[span] for span in spans])
    results = [
        _compute_group(part, x[span], matrix, *(a[span] for a in more))
        for span, matrix in zip(spans, other)
    ]
    padding = np.zeros((len(x) - ends_g[-1], results[0].shape[1]))
    return np.concatenate([*results, padding])


def _compute_group(part: str, x, matrix, into=None) -> np.ndarray:
    if part in ("forward", "into"):
        return x @ matrix
    if part == "dgrad":
        return x @ matrix.T
    gate, up = np.split(x @ matrix if part == "h" else into, 2, axis=1)
    sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    if part != "dinto":
        return silu * up
    dh = x @ matrix.T
    dgate = dh * up * (sigmoid + silu * (1 - sigmoid))
    return np.concatenate([dgate, dh * silu], axis=1)


def sample(part: str, arrays: Sequence[Array], out: Array, rows_g: np.ndarray) -> tuple:
    """Return a smaller case in float64, the results that belong to it, and its rows_g.

    Its groups are the fullest one, the first and the last that have rows, and an empty
    one.
    """
    full = np.flatnonzero(rows_g)
    empty = np.flatnonzero(rows_g == 0)[:1]
    chosen = np.unique([*full[[0, -1]], rows_g.argmax(), *empty])
    first_g = np.cumsum(rows_g) - rows_g
    if part == "wgrad":
        from_x, from_dy = (_spread(a.shape[1], SAMPLED_WIDTH) for a in arrays)
        rows = np.concatenate([first_g[i] + np.arange(rows_g[i]) for i in chosen])
        x, dy = (a[:, own][rows] for a, own in zip(arrays, (from_x, from_dy)))
        out = out[chosen][:, from_x][:, :, from_dy]
        return [_float64(x), _float64(dy)], _float64(out), rows_g[chosen]
    near = [_sample_ends(first_g[i], rows_g[i]) for i in chosen]
    rows = np.concatenate(near)
    width = out.shape[1] // (2 if part in ("into", "dinto") else 1)
    x, matrix, *more = arrays
    axis = 1 if part in ("dgrad", *PARTS["swiglu_dgrad"]) else 2
    matrix = _columns(matrix[chosen], width, axis)
    more = (_columns(a[rows], width) for a in more)
    sampled = [_float64(a) for a in (x[rows], matrix, *more)]
    counts = np.array([len(r) for r in near])
    return sampled, _float64(_columns(out[rows], width)), counts


def _sample_ends(first: int, count: int) -> np.ndarray:
    row = np.arange(count)
    return first + row[(row < SAMPLED_ENDS) | (row >= count - SAMPLED_ENDS)]


def _spread(width: int, count: int) -> np.ndarray:
    """Return the numbers of `count` columns, spread evenly from the first to the last
    of `width` columns; or all numbers if there are fewer columns."""
    return np.unique(np.linspace(0, width - 1, count).astype(int))


def _columns(array: Array, width: int, axis: int = 1) -> Array:
    """Sample columns of an array, the same ones in each block of `width` columns.

    A fused array has two blocks, gate and up, side by side.
    """
    first = np.arange(0, array.shape[axis], width)[:, None]
    return jnp.take(array, (first + _spread(width, SAMPLED_COLUMNS)).ravel(), axis)


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """Return ||out - reference|| / ||reference|| in Frobenius norms; infinite if it is
    not finite."""
    norm = np.linalg.norm(reference)
    error = np.linalg.norm(out - reference) / (norm if norm > 0 else 1)
    return float(error) if np.isfinite(error) else np.inf


def _float64(array: Array) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a peer's padding may hold NaN
        return np.asarray(jax.device_get(array)).astype(np.float64)


@jax.jit
def _is_finite(array: Array) -> Array:
    return jnp.isfinite(array).all()
