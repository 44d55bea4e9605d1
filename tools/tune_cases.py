"""One bucket of tools/tune_kernels.py: its inputs, what is right, and times on a GPU.

The rule's tiles come first. Their results must equal the definition in float64 on a
sample of groups, and every candidate's must equal theirs, whole: outputs lie where NaN
was written just before, so that what a kernel leaves out is seen.
"""

import concurrent.futures
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moejax.kernels.shapes import Shape, Skew, rows_of
from moejax.kernels.tuning import Pass, Tiles, by_rule

MOST_ERROR = {"float16": 2e-3, "bfloat16": 1e-2}
"""||out - ref|| / ||ref||: both are rounded once."""
SEED_OF_ROWS = 0
SAMPLED_ENDS, SAMPLED_WIDTH = 8, 64
SAMPLE_MSEC, MOST_CALLS, QUICK_CALLS = 20, 50, 3
"""Calls between two waits last about so long together."""
REPEATS = 5
LONGEST_REASON = 200

Product = Callable[[Pass, Tiles], Callable]
"""(pass, tiles) -> (*operands, rows_g) -> one array or two"""
Timer = Callable[[Tiles, Callable[[], object]], float]
"""(tiles, call) -> msec of the call, which is of these tiles"""


class WrongKernel(Exception):
    """The rule's tiles compute something else."""


@dataclasses.dataclass
class Case:
    """A bucket's shape with inputs, and results that were checked, a skew each."""

    which: Pass
    dtype: str
    operands: tuple[Array, ...]
    rows: list[Array]
    compiled: dict[Tiles, Callable]
    """Of the rule's tiles."""
    expected: list

    def call(self, tiles: Tiles, skew: int = 0):
        return self.compiled[tiles](*self.operands, self.rows[skew])


def prepare(
    which: Pass,
    shape: Shape,
    dtype: str,
    skews: Sequence[Skew],
    seed: int,
    product: Product,
) -> Case:
    """Raises WrongKernel; whatever the rule's tiles raise is raised as well."""
    rows = [rows_of(skew, shape.rows, shape.groups, SEED_OF_ROWS) for skew in skews]
    arrays = operands(which, shape, dtype, seed)
    case = Case(which, dtype, arrays, [jnp.asarray(r) for r in rows], {}, [])
    tiles = by_rule(which, shape)
    case.compiled[tiles] = _lowered(case, product, tiles).compile()
    for i, (skew, rows_g) in enumerate(zip(skews, rows)):
        out = jax.block_until_ready(case.call(tiles, i))
        error = sampled_error(which, arrays, rows_g, jax.tree.leaves(out))
        if not error <= MOST_ERROR[dtype]:
            raise WrongKernel(
                f"{which} of {shape} in {dtype}, {skew}: {tiles} computes something "
                f"else: ||out - ref|| / ||ref|| is {error:.2g} and may be "
                f"{MOST_ERROR[dtype]}"
            )
        case.expected.append(out)
    return case


def measurer(case: Case, product: Product, timer: Timer) -> Callable:
    """measure(batch) of tune_search.search."""

    def measure(batch: Sequence[Tiles]) -> list[float | str]:
        compiled = _compiled(case, product, batch)
        return [
            made if isinstance(made, str) else _msec(case, tiles, made, timer)
            for tiles, made in zip(batch, compiled)
        ]

    return measure


def time_msec(tiles: Tiles, call: Callable[[], object]) -> float:
    """Median of several samples of several calls between two waits."""

    def sample(num_calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(num_calls):
            out = call()
        jax.block_until_ready(out)
        return 1e3 * (time.perf_counter() - begin) / num_calls

    sample(1)
    calls = round(SAMPLE_MSEC / sample(QUICK_CALLS))
    calls = min(MOST_CALLS, max(QUICK_CALLS, calls))
    return statistics.median(sample(calls) for _ in range(REPEATS))


def operands(which: Pass, shape: Shape, dtype: str, seed: int) -> tuple[Array, ...]:
    """Fresh normal numbers on the device, products of variance 1."""
    m, d, f, g = shape.rows, shape.d, shape.f, shape.groups
    dims = {
        "forward": ((m, d), (g, d, f)),
        "dgrad": ((m, f), (g, d, f)),
        "wgrad": ((m, d), (m, f)),
        "swiglu": ((m, d), (g, d, 2 * f)),
        "swiglu_dgrad": ((m, d), (g, f, d), (m, 2 * f)),
    }[which]
    contracted = f if which == "dgrad" else d
    keys = jax.random.split(jax.random.key(seed), len(dims))
    return tuple(_normal(key, dim, dtype, contracted) for key, dim in zip(keys, dims))


def sampled_error(
    which: Pass, arrays: Sequence[Array], rows_g: np.ndarray, found: Sequence[Array]
) -> float:
    """The largest ||out - ref|| / ||ref|| over outputs, of some columns of the ends of
    the fullest, the first and the last group, or of entries of their matrices."""
    full, first_g = np.flatnonzero(rows_g), np.cumsum(rows_g) - rows_g
    errors = []
    for group in np.unique([full[0], full[-1], rows_g.argmax()]):
        rows = first_g[group] + np.arange(rows_g[group])
        if which == "wgrad":
            high, wide = (_spread(a.shape[1]) for a in arrays)
            x, dy = (np.asarray(a[:, c])[rows] for a, c in zip(arrays, (high, wide)))
            own = [found[0][group][high][:, wide]]
            expected = [_float64(x).T @ _float64(dy)]
        else:
            rows = np.union1d(rows[:SAMPLED_ENDS], rows[-SAMPLED_ENDS:])
            width = min(out.shape[1] for out in found)
            x, matrix, *more = arrays
            own = [_columns(out[rows], width) for out in found]
            is_transposed = which in ("dgrad", "swiglu_dgrad")
            matrix = _columns(matrix[group], width, axis=0 if is_transposed else 1)
            parts = (x[rows], matrix, *(_columns(a[rows], width) for a in more))
            expected = rows_defined(which, *map(_float64, parts))
        errors += [
            np.linalg.norm(_float64(out) - ref) / max(np.linalg.norm(ref), 1e-30)
            for out, ref in zip(own, expected, strict=True)
        ]
    return float(np.max(errors))  # NaN, if there is one


def rows_defined(which: Pass, x, matrix, into=None) -> list[np.ndarray]:
    """What rows of one group give, by the definition."""
    if which == "forward":
        return [x @ matrix]
    if which == "dgrad":
        return [x @ matrix.T]
    into = x @ matrix if which == "swiglu" else into
    gate, up = np.split(into, 2, axis=1)
    sigmoid = 1 / (1 + np.exp(-gate))
    h = gate * sigmoid * up
    if which == "swiglu":
        return [h, into]
    dh = x @ matrix.T
    dgate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
    return [np.concatenate([dgate, dh * gate * sigmoid], axis=1), h]


def _compiled(case: Case, product: Product, batch: Sequence[Tiles]) -> list:
    """Of each, the program or why there is none. Lowering is Python, one at a time."""
    with concurrent.futures.ThreadPoolExecutor(len(batch)) as pool:
        made = []
        for tiles in batch:
            if tiles in case.compiled:
                made.append(pool.submit(lambda tiles=tiles: case.compiled[tiles]))
                continue
            try:
                made.append(pool.submit(_lowered(case, product, tiles).compile))
            except Exception as error:  # whatever a compiler says: it is told
                made.append(_reason(error))
        return [one if isinstance(one, str) else _result(one) for one in made]


def _result(made: concurrent.futures.Future):
    error = made.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return made.result() if error is None else _reason(error)


def _msec(case: Case, tiles: Tiles, program: Callable, timer: Timer) -> float | str:
    """Mean over skews; a reason where a result is wrong, or the program fails."""
    msec = []
    try:
        for rows_g, expected in zip(case.rows, case.expected):

            def call(rows_g=rows_g):
                return program(*case.operands, rows_g)

            jax.block_until_ready(jax.tree.map(_nan_like, expected))
            error = float(_largest_error(call(), expected))
            if not error <= MOST_ERROR[case.dtype]:
                return f"computes something else: error {error:.2g}"
            msec.append(timer(tiles, call))
    except jax.errors.JaxRuntimeError as error:
        # Where the device is lost the rule's program fails too, and ends the search.
        jax.block_until_ready(case.call(next(iter(case.compiled))))
        return _reason(error)
    return statistics.mean(msec)


@jax.jit
def _largest_error(found, expected) -> Array:
    """NaN if there is one."""

    def of(out: Array, reference: Array) -> Array:
        out, reference = (a.astype(jnp.float32) for a in (out, reference))
        square = jnp.sum(jnp.square(out - reference)) / jnp.sum(jnp.square(reference))
        return jnp.sqrt(square)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(of, found, expected))))


def _nan_like(array: Array) -> Array:
    return jnp.full_like(array, jnp.nan)


def _lowered(case: Case, product: Product, tiles: Tiles):
    program = jax.jit(product(case.which, tiles))
    return program.lower(*case.operands, case.rows[0])


def _normal(key: Array, dims: tuple[int, ...], dtype: str, contracted: int) -> Array:
    if len(dims) == 2:
        return jax.random.normal(key, dims, dtype)
    # A matrix at a time: random bits of all would take several times their memory.
    scale = jnp.asarray(contracted**-0.5, dtype)
    return jax.lax.map(
        lambda key: jax.random.normal(key, dims[1:], dtype) * scale,
        jax.random.split(key, dims[0]),
    )


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:LONGEST_REASON]


def _spread(width: int) -> np.ndarray:
    """Some of so many columns, the first and the last among them."""
    return np.unique(np.linspace(0, width - 1, SAMPLED_WIDTH).astype(int))


def _columns(array: Array, width: int, axis: int = 1) -> Array:
    """Some of each part of `width`: gate and up lie side by side."""
    first = np.arange(0, array.shape[axis], width)[:, None]
    return jnp.take(array, (first + _spread(width)).ravel(), axis)


def _float64(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
