"""One bucket of tools/tune_kernels.py: its inputs, what is right, and times on a GPU.

The rule's tiles come first. Their results must equal the definition in float64 on a
sample of groups, and every candidate's must equal theirs, whole. NaN is written before
each check and freed: most likely outputs lie there, and what a kernel leaves out is
seen.
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
LONGEST_REASON = 200

Product = Callable[[Pass, Tiles], Callable]
"""(pass, tiles) -> (*operands, rows_g) -> one array or two"""
Timer = Callable[[Tiles, Callable[[], object]], float]
"""(tiles, call) -> msec of the call, which is of these tiles"""


class WrongKernel(Exception):
    """The rule's tiles compute something else."""


@dataclasses.dataclass
class TuneCase:
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


def searched(
    bucket: tune_search.Bucket,
    settings: tune_search.Settings,
    product: Product,
    timer: Timer,
    is_over: Callable[[], bool],
) -> dict:
    """The fastest tiles of one bucket, and how they were found."""
    name, which, shape = bucket
    itemsize = jnp.dtype(settings.dtype).itemsize
    case = prepare(which, shape, settings.dtype, settings.skews, settings.seed, product)
    found = tune_search.search(
        tune_search.candidates(which, shape, itemsize),
        lambda tiles: tune_search.neighbours(which, tiles, itemsize),
        measurer(case, product, timer),
        is_over,
    )
    rule = default_tiles(which, shape)
    if rule not in found.msec:
        raise RuntimeError(f"{rule} of the rule has no time: {found.skipped[rule]}")
    for tiles, why in found.skipped.items():
        print(f"  skipped {tiles}: {why}")
    best, best_msec = found.best, found.msec[found.best]
    print(
        f"{which} of {name}, {shape.d} -> {shape.f}: {best_msec:.3f} ms by {best}; "
        f"{found.msec[rule]:.3f} ms by the rule; {len(found.msec)} timed, "
        f"{len(found.skipped)} skipped" + ("" if found.is_whole else ", not whole"),
        flush=True,
    )
    return {
        "bucket": bucket.key(settings.dtype),
        "shape": name,
        "tiles": dataclasses.asdict(best),
        "msec": best_msec,
        "rule_msec": found.msec[rule],
        "skews": settings.skews,
        "num_timed": len(found.msec),
        "num_skipped": len(found.skipped),
        "is_whole": found.is_whole,
    }


def prepare(
    which: Pass,
    shape: ProductShape,
    dtype: str,
    skews: Sequence[Skew],
    seed: int,
    product: Product,
) -> TuneCase:
    """Raises WrongKernel; whatever the rule's tiles raise is raised as well."""
    sizes = shape.rows, shape.groups, cases.SEED_OF_ROWS
    rows = [make_rows(skew, *sizes) for skew in skews]
    arrays = cases.operands(which, shape, dtype, seed)
    case = TuneCase(which, dtype, arrays, [jnp.asarray(r) for r in rows], {}, [])
    tiles = default_tiles(which, shape)
    case.compiled[tiles] = _lowered(case, product, tiles).compile()
    for i, (skew, rows_g) in enumerate(zip(skews, rows)):
        out = jax.block_until_ready(case.call(tiles, i))
        error = cases.sampled_error(which, out, cases.ProductCase(arrays, rows_g))
        most = cases.MAX_ERROR_FP8 if which in FP8 else cases.MAX_ERROR[dtype]
        if not error <= most:
            raise WrongKernel(
                f"{which} of {shape} in {dtype}, {skew}: {tiles} computes something "
                f"else: ||out - ref|| / ||ref|| is {error:.2g} and may be {most:.2g}"
            )
        case.expected.append(out)
    return case


def measurer(case: TuneCase, product: Product, timer: Timer) -> Callable:
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
        return jobs.mean_msec(lambda _: call(), num_calls)

    sample(1)
    num_calls = jobs.num_calls(sample(jobs.FEWEST_CALLS))
    return statistics.median(sample(num_calls) for _ in range(REPEATS))


def _compiled(case: TuneCase, product: Product, batch: Sequence[Tiles]) -> list:
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


def _msec(case: TuneCase, tiles: Tiles, program: Callable, timer: Timer) -> float | str:
    """Mean over skews; a reason where a result is wrong, or the program fails."""
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


def _lowered(case: TuneCase, product: Product, tiles: Tiles):
    program = jax.jit(product(case.which, tiles))
    return program.lower(*case.operands, case.rows[0])


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:LONGEST_REASON]
