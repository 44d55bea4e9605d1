"""What tools/bench_grouped_dot.py measures: inputs, FLOPs, bytes, and what is right.

    forward  y = x w             dgrad  dx = dy w.T           wgrad  dw = x.T dy
    fused    into_mh = x [gate, up], and h = silu(x gate) * (x up): the first product of
             a feed-forward, with what its backward pass keeps; 2f columns
    grads    y, dx and dw in one program, as training runs them

Right is what NumPy computes in float64 from the same inputs; an error is
||out - ref|| / ||ref||.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moejax.kernels.shapes import Shape, Skew, rows_of

OPERANDS = {
    "forward": ("x_md", "w_gdf"),
    "dgrad": ("dy_mf", "w_gdf"),
    "wgrad": ("x_md", "dy_mf"),
    "fused": ("x_md", "into_gdh"),
    "grads": ("x_md", "w_gdf", "dy_mf"),
}
"""Of each pass, before rows_g."""
PARTS = {"grads": ("forward", "dgrad", "wgrad"), "fused": ("swiglu", "into")}
"""What a pass returns, where it is not one array of its own name."""
OPERANDS_OF_PARTS = OPERANDS | dict.fromkeys(PARTS["fused"], OPERANDS["fused"])
PRODUCTS = {"forward": 1, "dgrad": 1, "wgrad": 1, "fused": 2, "grads": 3}
"""Of 2 * rows * d * f FLOPs."""
MOST_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
MOST_ERROR_TF32 = 1e-3
"""Of float32 on a GPU, whose matrix units round its inputs to 10 bits."""
SEED_OF_ROWS = 0
SAMPLED_ENDS, SAMPLED_WIDTH = 8, 64


class Case(NamedTuple):
    """A pass's inputs, in the order of OPERANDS; rows past rows_g.sum() are padding."""

    operands: tuple[Array, ...]
    rows_g: np.ndarray

    @property
    def num_rows(self) -> int:
        return int(self.rows_g.sum())

    def without_groups(self) -> "Case":
        """What `dense` computes: all rows, padding too, belong to the first matrix."""
        first = tuple(a[:1] if a.ndim == 3 else a for a in self.operands)
        rows = next(a.shape[0] for a in self.operands if a.ndim == 2)
        return Case(first, np.array([rows], np.int32))

    def poisoned(self) -> "Case":
        """NaN in padding."""
        is_padding_m1 = np.arange(self.operands[0].shape[0])[:, None] >= self.num_rows
        return self._replace(
            operands=tuple(
                a if a.ndim == 3 else jnp.where(is_padding_m1, jnp.nan, a)
                for a in self.operands
            )
        )


def operands(which: str, shape: Shape, dtype: str, seed: int) -> tuple[Array, ...]:
    """Fresh normal numbers on the device; matrices so that products have variance 1."""
    rows, d, f, groups = shape.rows, shape.d, shape.f, shape.groups
    dims = {
        "x_md": (rows, d),
        "dy_mf": (rows, f),
        "w_gdf": (groups, d, f),
        "into_gdh": (groups, d, 2 * f),
    }
    keys = jax.random.split(jax.random.key(seed), len(OPERANDS[which]))
    return tuple(
        _normal(key, dims[name], dtype) for key, name in zip(keys, OPERANDS[which])
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, dims: tuple[int, ...], dtype: str) -> Array:
    if len(dims) == 2:
        return jax.random.normal(key, dims, dtype)
    groups, d, _ = dims
    # A matrix at a time: random bits of all would take several times their memory.
    return jax.lax.map(
        lambda key: (
            jax.random.normal(key, dims[1:], dtype) * jnp.asarray(d**-0.5, dtype)
        ),
        jax.random.split(key, groups),
    )


def small(shape: Shape) -> Shape:
    """The case on which an arm is checked whole."""
    least = Shape(rows=600, d=256, f=256, groups=16)
    pairs = (
        (getattr(shape, n), getattr(least, n)) for n in ("rows", "d", "f", "groups")
    )
    return Shape(*(min(pair) for pair in pairs))


def small_case(which: str, shape: Shape, dtype: str, seed: int, skew: Skew) -> Case:
    """Of the same skew, with an eighth of the rows as padding."""
    shape = small(shape)
    num_owned = shape.rows - shape.rows // 8
    rows_g = rows_of(skew, num_owned, shape.groups, SEED_OF_ROWS)
    return Case(operands(which, shape, dtype, seed), rows_g)


def flops(which: str, shape: Shape) -> int:
    return PRODUCTS[which] * 2 * shape.rows * shape.d * shape.f


def least_bytes(which: str, shape: Shape, rows_g: np.ndarray, itemsize: int) -> int:
    """Each input read once, each output written once; of weights, those of groups that
    have rows. All of dw is written: an empty group's is zero."""
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


def most_error(dtype: str, device: str) -> float:
    if (dtype, device) == ("float32", "gpu"):
        return MOST_ERROR_TF32
    return MOST_ERROR[dtype]


def error_of(which: str, results, case: Case, *, has_zero_padding: bool) -> float:
    """The largest error of the results, whole; infinite where one is not finite.
    Padding counts where it must be zero."""
    by_name = dict(zip(OPERANDS[which], case.operands))
    errors = []
    for part, out in _parts(which, results):
        a, b = (_float64(by_name[name]) for name in OPERANDS_OF_PARTS[part])
        has_all = part == "wgrad" or has_zero_padding
        rows = slice(None if has_all else case.num_rows)
        reference = defined(part, a, b, case.rows_g)
        errors.append(relative_error(_float64(out)[rows], reference[rows]))
    return max(errors)


def sampled_error_of(which: str, results, case: Case) -> float:
    """The same for a case of full size, of a few groups: of their first and last rows,
    or of some rows and columns of their gradients. All results must be finite."""
    by_name = dict(zip(OPERANDS[which], case.operands))
    errors = []
    for part, out in _parts(which, results):
        if not _is_finite(out):
            return np.inf
        pair = (by_name[name] for name in OPERANDS_OF_PARTS[part])
        *sampled, rows_g = sample(part, *pair, out, case.rows_g)
        a, b, found = map(_float64, sampled)
        errors.append(relative_error(found, defined(part, a, b, rows_g)))
    return max(errors)


def defined(part: str, a: np.ndarray, b: np.ndarray, rows_g: np.ndarray) -> np.ndarray:
    """The definition, group by group; zero in padding."""
    ends_g = np.cumsum(rows_g)
    spans = [slice(end - rows, end) for rows, end in zip(rows_g, ends_g)]
    if part == "wgrad":
        return np.stack([a[span].T @ b[span] for span in spans])
    width = {"dgrad": b.shape[1], "swiglu": b.shape[2] // 2}.get(part, b.shape[2])
    out = np.zeros((len(a), width))
    for span, matrix in zip(spans, b):
        product = a[span] @ (matrix.T if part == "dgrad" else matrix)
        if part == "swiglu":
            gate, up = np.split(product, 2, axis=1)
            product = gate / (1 + np.exp(-gate)) * up
        out[span] = product
    return out


def sample(part: str, a: Array, b: Array, out: Array, rows_g: np.ndarray) -> tuple:
    """A case of fewer groups, and rows or columns, with the results that belong to it:
    the fullest group, the first and last that have rows, and an empty one."""
    full = np.flatnonzero(rows_g)
    empty = np.flatnonzero(rows_g == 0)[:1]
    chosen = np.unique([*full[[0, -1]], rows_g.argmax(), *empty])
    first_g = np.cumsum(rows_g) - rows_g
    if part != "wgrad":
        near = [_ends_of(first_g[i], rows_g[i]) for i in chosen]
        rows = np.concatenate(near)
        return a[rows], b[chosen], out[rows], np.array([len(r) for r in near])
    random = np.random.default_rng(0)
    from_a, from_b = (
        np.sort(random.permutation(width.shape[1])[:SAMPLED_WIDTH]) for width in (a, b)
    )
    rows = np.concatenate([first_g[i] + np.arange(rows_g[i]) for i in chosen])
    a, b = a[:, from_a][rows], b[:, from_b][rows]
    return a, b, out[chosen][:, from_a][:, :, from_b], rows_g[chosen]


def _ends_of(first: int, count: int) -> np.ndarray:
    row = np.arange(count)
    return first + row[(row < SAMPLED_ENDS) | (row >= count - SAMPLED_ENDS)]


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """Frobenius norms; infinite for what is not finite."""
    norm = np.linalg.norm(reference)
    error = np.linalg.norm(out - reference) / (norm if norm > 0 else 1)
    return float(error) if np.isfinite(error) else np.inf


def _parts(which: str, results) -> Sequence[tuple[str, Array]]:
    if which in PARTS:
        return tuple(zip(PARTS[which], results, strict=True))
    return ((which, results),)


def _float64(array: Array) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a peer's padding may hold NaN
        return np.asarray(jax.device_get(array)).astype(np.float64)


@jax.jit
def _is_finite(array: Array) -> Array:
    return jnp.isfinite(array).all()
