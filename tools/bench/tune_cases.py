"""The search of one bucket of tools/tune_kernels.py: inputs, checks, times on a GPU.

The tiles of the rule come first. Their results must equal the definition in float64 on
a sample of groups. All results of every other candidate must equal those of the rule.
Before each check an array of NaN is written and freed: the outputs most likely take its
memory, so that elements which a kernel does not write are seen.
"""

import concurrent.futures
import dataclasses
import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moejax.kernels.shapes import ProductShape, Skew, make_rows
from moejax.kernels.tuning import FP8, Pass, Tiles, default_tiles
from tools.bench import grouped_dot_cases as cases
from tools.bench import grouped_dot_jobs as jobs
from tools.bench import tune_search

REPEATS = 5
MAX_REASON = 200

Product = Callable[[Pass, Tiles], Callable]
"""A function (pass, tiles) -> kernel, where kernel is (*operands, rows_g) -> one array
or two."""
Timer = Callable[[Tiles, Callable[[], object]], float]
"""A function (tiles, call) -> milliseconds of a call of the kernel with these tiles."""


class WrongKernel(Exception):
    """Error raised when the kernel computes wrong values with the default tiles."""


@dataclasses.dataclass
class TuneCase:
    """Inputs of a bucket, and the checked results for each skew."""

    which: Pass
    dtype: str
    operands: tuple[Array, ...]
    rows: list[Array]
    """rows_g of each skew."""
    compiled: dict[Tiles, Callable]
    """Program with the default tiles."""
    expected: list
    """Results of each skew."""

    def call(self, tiles: Tiles, skew: int = 0):
        """Run the program of these tiles on the rows of a skew, by its index."""
        return self.compiled[tiles](*self.operands, self.rows[skew])


def search_bucket(
    bucket: tune_search.Bucket,
    settings: tune_search.Settings,
    product: Product,
    timer: Timer,
    is_over: Callable[[], bool],
) -> dict:
    """Search for the fastest tiles of one bucket of shapes, and return them with the
    figures of the search.

    Raises WrongKernel if the kernel computes wrong values with the default tiles.
    """
    name, which, shape = bucket
    itemsize = jnp.dtype(settings.dtype).itemsize
    case = prepare(which, shape, settings.dtype, settings.skews, settings.seed, product)
    rule, *others = (
        dataclasses.replace(tiles, spared=settings.spared)
        for tiles in tune_search.candidates(which, shape, itemsize, settings.forms)
    )
    result = tune_search.search(
        [rule, *others],
        lambda tiles: tune_search.neighbours(which, tiles, itemsize, settings.forms),
        make_measure(case, product, timer),
        is_over,
    )
    if rule not in result.msec:
        raise RuntimeError(
            f"the rule's {rule} could not be timed: {result.skipped[rule]}"
        )
    for tiles, why in result.skipped.items():
        print(f"  skipped {tiles}: {why}")
    best, best_msec = result.best, result.msec[result.best]
    print(
        f"{which} of {name}, {shape.d} -> {shape.f}: {best_msec:.3f} ms by {best}; "
        f"{result.msec[rule]:.3f} ms by the rule; {len(result.msec)} timed, "
        f"{len(result.skipped)} skipped" + ("" if result.is_whole else ", cut off"),
        flush=True,
    )
    return {
        "bucket": bucket.key(settings.dtype),
        "shape": name,
        "tiles": dataclasses.asdict(best),
        "msec": best_msec,
        "rule_msec": result.msec[rule],
        "skews": settings.skews,
        "num_timed": len(result.msec),
        "num_skipped": len(result.skipped),
        "is_whole": result.is_whole,
    }


def prepare(
    which: Pass,
    shape: ProductShape,
    dtype: str,
    skews: Sequence[Skew],
    seed: int,
    product: Product,
) -> TuneCase:
    """Return the inputs of a bucket of shapes, with the results of the default tiles,
    which have been compared with a reference.

    Raises WrongKernel if these results are wrong, and any error of compiling or running
    the kernel with the default tiles.
    """
    sizes = shape.rows, shape.groups, cases.SEED_OF_ROWS
    rows = [make_rows(skew, *sizes) for skew in skews]
    arrays = cases.operands(which, shape, dtype, seed)
    case = TuneCase(which, dtype, arrays, [jnp.asarray(r) for r in rows], {}, [])
    tiles = default_tiles(which, shape)
    case.compiled[tiles] = _lower(case, product, tiles).compile()
    for i, (skew, rows_g) in enumerate(zip(skews, rows)):
        out = jax.block_until_ready(case.call(tiles, i))
        error = cases.sampled_error(which, out, cases.ProductCase(arrays, rows_g))
        max_error = cases.MAX_ERROR_FP8 if which in FP8 else cases.MAX_ERROR[dtype]
        if not error <= max_error:
            raise WrongKernel(
                f"{which} of {shape} in {dtype}, {skew}: {tiles} computes something "
                f"else: ||out - ref|| / ||ref|| is {error:.2g}, but may be at most "
                f"{max_error:.2g}"
            )
        case.expected.append(out)
    return case


def make_measure(case: TuneCase, product: Product, timer: Timer) -> Callable:
    """Return a function that measures a batch of tiles, for tune_search.search."""

    def measure(batch: Sequence[Tiles]) -> list[float | str]:
        compiled = _compile_batch(case, product, batch)
        return [
            program if isinstance(program, str) else _msec(case, tiles, program, timer)
            for tiles, program in zip(batch, compiled)
        ]

    return measure


def time_msec(tiles: Tiles, call: Callable[[], object]) -> float:
    """Return the milliseconds of a call: the median of REPEATS samples, each of several
    calls between two waits."""

    def sample(num_calls: int) -> float:
        return jobs.mean_msec(lambda _: call(), num_calls)

    sample(1)
    num_calls = jobs.num_calls(sample(jobs.MIN_CALLS))
    return statistics.median(sample(num_calls) for _ in range(REPEATS))


def _compile_batch(case: TuneCase, product: Product, batch: Sequence[Tiles]) -> list:
    """Return, for each candidate of the batch, its program or the reason why there is
    none.

    Programs are compiled in threads. They are lowered one at a time, since lowering is
    Python.
    """
    with concurrent.futures.ThreadPoolExecutor(len(batch)) as pool:
        futures = []
        for tiles in batch:
            if tiles in case.compiled:
                futures.append(pool.submit(lambda tiles=tiles: case.compiled[tiles]))
                continue
            try:
                futures.append(pool.submit(_lower(case, product, tiles).compile))
            except Exception as error:  # a compiler may raise anything: it is reported
                futures.append(_reason(error))
        return [one if isinstance(one, str) else _result(one) for one in futures]


def _result(future: concurrent.futures.Future):
    """Return the result of a future, or the reason why it failed."""
    error = future.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return future.result() if error is None else _reason(error)


def _msec(case: TuneCase, tiles: Tiles, program: Callable, timer: Timer) -> float | str:
    """Return the mean time over skews, or the reason why there is none: a result is
    wrong, or the program fails."""
    msec = []
    try:
        for rows_g, expected in zip(case.rows, case.expected):

            def call(rows_g=rows_g):
                return program(*case.operands, rows_g)

            jax.block_until_ready(jax.tree.map(_nan_like, expected))
            error = float(_largest_error(call(), expected))
            if not error <= cases.MAX_ERROR[case.dtype]:
                return f"computes something else: error {error:.2g}"
            msec.append(timer(tiles, call))
    except jax.errors.JaxRuntimeError as error:
        # If the device is lost, the default tiles fail too, and end the search.
        jax.block_until_ready(case.call(next(iter(case.compiled))))
        return _reason(error)
    return statistics.mean(msec)


@jax.jit
def _largest_error(results, expected) -> Array:
    """Return the largest relative error of the results; NaN if one holds NaN."""

    def error(out: Array, reference: Array) -> Array:
        out, reference = (a.astype(jnp.float32) for a in (out, reference))
        square = jnp.sum(jnp.square(out - reference)) / jnp.sum(jnp.square(reference))
        return jnp.sqrt(square)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(error, results, expected))))


def _nan_like(array: Array) -> Array:
    return jnp.full_like(array, jnp.nan)


def _lower(case: TuneCase, product: Product, tiles: Tiles):
    program = jax.jit(product(case.which, tiles))
    return program.lower(*case.operands, case.rows[0])


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:MAX_REASON]
