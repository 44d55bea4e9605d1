"""Jobs of tools/bench/grouped_dot.py: an implementation on a case, which is checked
first and then timed in turns with others."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.kernels.shapes import ProductShape, Skew, make_rows
from tools.bench import grouped_dot_cases as cases
from tools.bench import grouped_dot_peers as peers
from tools.bench.grouped_dot_cases import ProductCase
from tools.bench.turns import in_turns

BATCHED_GIB = {"cpu": 4, "gpu": 24}
"""Maximum size of the padded arrays of `batched`, by device. Larger cases are
declined."""
ROTATED_BYTES = 256 * 2**20
"""Bytes of the input sets that calls on a GPU cycle through: more than four times the
L2 of a Hopper GPU."""
MAX_SETS = 8
SAMPLE_MSEC = 20
"""Intended duration of the calls between two waits for a GPU, together. The limits on
the number of calls take precedence."""
MIN_CALLS, MAX_CALLS = 3, 50


class WrongResult(Exception):
    """Error raised when an implementation computes wrong values."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run, beside its shapes and passes."""

    device: str
    dtype: str
    skews: Sequence[Skew]
    impls: Sequence[str]
    repeats: int
    seed: int


@dataclasses.dataclass
class BenchJob:
    """An implementation on one case."""

    variant: peers.Variant
    arguments: list[tuple]
    """Arguments of a call for each set of inputs. Calls cycle through the sets."""
    error: float = 0.0
    min_bytes: int = 0
    num_calls: int = 1
    msec: list[float] = dataclasses.field(default_factory=list)

    def call_msec(self, num_calls: int) -> float:
        """Return the milliseconds of one call: the mean over `num_calls` calls between
        two waits."""

        def call(i: int):
            return self.variant.run(*self.arguments[i % len(self.arguments)])

        return mean_msec(call, num_calls, self.variant.wait)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass on a shape, with its sets of inputs."""

    settings: Settings
    shape: ProductShape
    which: str
    sets: list[tuple]


class Trial(NamedTuple):
    """A job, and the results of its implementation on a small case and on the job's own
    case."""

    job: BenchJob
    small: ProductCase
    small_results: Any
    whole: ProductCase
    whole_results: Any


def measure(settings: Settings, shape: ProductShape, which: str) -> list[dict]:
    """Measure all skews and implementations of a pass in turns, and return a row for
    each. Raises WrongResult if an implementation computes wrong values."""
    own = Pass(settings, shape, which, input_sets(settings, shape, which))
    jobs, declined = make_jobs(own)
    take_turns(list(jobs.values()), settings)
    rows = []
    for skew in settings.skews:
        dense = jobs.get((skew, "dense"))
        for impl in settings.impls:
            row = {"skew": skew, "pass": which, "impl": impl, "msec": None}
            row |= {"tflops": None} | dataclasses.asdict(shape)
            if (skew, impl) in jobs:
                row |= figures(jobs[skew, impl], dense, cases.flops(which, shape))
            else:
                row["declined"] = declined[skew, impl]
            rows.append(row)
    return rows


def input_sets(settings: Settings, shape: ProductShape, which: str) -> list[tuple]:
    """Return one set of inputs on a CPU, and several on a GPU, so that they do not come
    from its L2 cache."""
    first = cases.operands(which, shape, settings.dtype, settings.seed)
    if settings.device == "cpu":
        return [first]
    num_sets = -(-ROTATED_BYTES // sum(a.nbytes for a in first))
    seeds = range(settings.seed + 1, settings.seed + min(MAX_SETS, max(2, num_sets)))
    return [first, *(cases.operands(which, shape, settings.dtype, s) for s in seeds)]


def make_jobs(own: Pass) -> tuple[dict, dict]:
    """Return a job to measure for each (skew, implementation), its results checked, and
    the reason for each (skew, implementation) that cannot be run."""
    jobs, declined = {}, {}
    for impl in own.settings.impls:
        # A peer may decline a case by any exception; ours do so by one kind only.
        refusals = NotImplementedError if impl in peers.OURS else Exception
        tiles = None
        for skew in own.settings.skews:
            try:
                trial = attempt(own, impl, skew, tiles)
            except refusals as error:
                text = " ".join(str(error).split()) or type(error).__name__
                declined[skew, impl] = text[:300]
                continue
            judge(own, impl, skew, trial)
            tiles = trial.job.variant.tiles  # the fastest on the first skew serves all
            jobs[skew, impl] = trial.job
    return jobs, declined


def attempt(own: Pass, impl: str, skew: Skew, tiles: str | None) -> Trial:
    """Run an implementation on the small case and once on its own case.

    The variant is that of `tiles`, or without `tiles` the fastest. Our implementations
    get NaN in the padding of the small case. Raises whatever the implementation raises.
    """
    settings, which = own.settings, own.which
    small = cases.small_case(which, own.shape, settings.dtype, settings.seed, skew)
    rows_g = make_rows(skew, own.shape.rows, own.shape.groups, cases.SEED_OF_ROWS)
    fullest, small_fullest = 0, 0
    if impl == "batched":
        require_room(own, rows_g)
        fullest, small_fullest = int(rows_g.max()), int(small.rows_g.max())
    candidates = [
        BenchJob(
            variant, [variant.arguments(ops, jnp.asarray(rows_g)) for ops in own.sets]
        )
        for variant in peers.variants(impl, which, fullest)
        if tiles in (None, variant.tiles)
    ]
    job = candidates[0] if len(candidates) == 1 else fastest(candidates)
    whole_results = job.variant.run_results(job.arguments[0])
    by_tiles = {
        variant.tiles: variant for variant in peers.variants(impl, which, small_fullest)
    }
    inputs = small.poisoned() if impl in peers.OURS else small
    variant = by_tiles[job.variant.tiles]
    arguments = variant.arguments(inputs.operands, jnp.asarray(inputs.rows_g))
    whole = ProductCase(own.sets[0], rows_g)
    return Trial(job, small, variant.run_results(arguments), whole, whole_results)


def require_room(own: Pass, rows_g: np.ndarray) -> None:
    """Raise NotImplementedError if the padded arrays of `batched` would be too
    large."""
    width = own.shape.d + own.shape.f * (2 if own.which == "fused" else 1)
    num_rows = own.shape.groups * int(rows_g.max())
    num_bytes = num_rows * width * jnp.dtype(own.settings.dtype).itemsize
    max_gib = BATCHED_GIB[own.settings.device]
    if num_bytes > max_gib * 2**30:
        raise NotImplementedError(
            f"padding takes {num_bytes / 2**30:.0f} GiB, but at most {max_gib} are used"
        )


def fastest(jobs: list[BenchJob]) -> BenchJob:
    """Return the fastest job. Jobs that raise are left out; if all do, the last error
    is raised."""
    timed, last = [], None
    for job in jobs:
        try:
            job.call_msec(1)
            timed.append((job.call_msec(MIN_CALLS), job))
        except Exception as error:
            last = error
    if not timed:
        raise last
    return min(timed, key=lambda pair: pair[0])[1]


def judge(own: Pass, impl: str, skew: Skew, trial: Trial) -> None:
    """Compare a trial's results with the reference, and set its job's error and bytes.
    Raises WrongResult if they differ by more than the limit.

    All results of the small case are compared, and a sample of those of the job's own.
    """
    settings, which, shape = own.settings, own.which, own.shape
    job, small, small_results, whole, whole_results = trial
    if impl == "dense":
        small, whole = small.without_groups(), whole.without_groups()
        shape = dataclasses.replace(shape, groups=1)
    is_ours = impl in peers.OURS
    job.error = max(
        cases.largest_error(which, small_results, small, has_zero_padding=is_ours),
        cases.sampled_error(which, whole_results, whole),
    )
    is_fp8 = impl in peers.IN_FP8
    max_error = cases.max_error(settings.dtype, settings.device, which, is_fp8=is_fp8)
    if job.error > max_error:
        raise WrongResult(
            f"{impl} {job.variant.tiles} computes something else: {which}, {skew}, "
            f"{shape} in {settings.dtype}: ||out - ref|| / ||ref|| is {job.error:.2g} "
            f"but may be at most {max_error:.1g}; leave it out with --impls to measure "
            "the others"
        )
    itemsize = jnp.dtype(settings.dtype).itemsize
    job.min_bytes = cases.min_bytes(which, shape, whole.rows_g, itemsize)


def take_turns(jobs: list[BenchJob], settings: Settings) -> None:
    """Time the jobs in turns. All have run before, so no turn warms up."""
    for job in jobs if settings.device == "gpu" else ():
        job.num_calls = num_calls(job.call_msec(MIN_CALLS))
    for _, job in in_turns(jobs, settings.repeats, num_warm_ups=0):
        job.msec.append(job.call_msec(job.num_calls))


def mean_msec(
    call: Callable[[int], Any], num_calls: int, wait: Callable = jax.block_until_ready
) -> float:
    """Return the milliseconds of call(i): the mean over calls back to back, followed by
    one wait."""
    begin = time.perf_counter()
    for i in range(num_calls):
        out = call(i)
    wait(out)
    return 1e3 * (time.perf_counter() - begin) / num_calls


def num_calls(msec: float) -> int:
    """Return the number of calls to make between two waits for a GPU, when each call
    takes `msec` milliseconds."""
    return min(MAX_CALLS, max(MIN_CALLS, round(SAMPLE_MSEC / msec)))


def figures(job: BenchJob, dense: BenchJob | None, num_flops: int) -> dict:
    """Return the times and rates of a measured job. `share_of_dense` is its rate over
    that of `dense` on the same rows."""
    msec = statistics.median(job.msec)
    share = statistics.median(dense.msec) / msec if dense else None
    return {
        "msec": msec,
        "msec_min": min(job.msec),
        "msec_max": max(job.msec),
        "num_calls": job.num_calls,
        "tflops": num_flops / msec / 1e9,
        "share_of_dense": share,
        "min_bytes": job.min_bytes,
        "gb_per_sec": job.min_bytes / msec / 1e6,
        "error": job.error,
        "tiles": job.variant.tiles,
    }
