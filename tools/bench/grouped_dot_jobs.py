"""Implementations on cases for tools/bench/grouped_dot.py: checked first, then timed in
turns."""

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
"""`batched` is declined where its padded arrays are larger."""
ROTATED_BYTES = 256 * 2**20
"""Inputs that calls on a GPU go through: four times the L2 of a Hopper GPU."""
MAX_SETS = 8
SAMPLE_MSEC = 20
"""Calls between two waits for a GPU last about so long together, where they are not the
fewest or the most."""
FEWEST_CALLS, MAX_CALLS = 3, 50


class WrongResult(Exception):
    """An implementation computes something else."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run is about, beside its shapes and passes."""

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
    """Of each set of inputs; calls go through them in turn."""
    error: float = 0.0
    min_bytes: int = 0
    num_calls: int = 1
    msec: list[float] = dataclasses.field(default_factory=list)

    def call_msec(self, num_calls: int) -> float:
        """Of one call, the mean over so many between two waits."""

        def call(i: int):
            return self.variant.run(*self.arguments[i % len(self.arguments)])

        return mean_msec(call, num_calls, self.variant.wait)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass on a shape, with its inputs."""

    settings: Settings
    shape: ProductShape
    which: str
    sets: list[tuple]


class Trial(NamedTuple):
    """A job, and what its implementation made of a small case and of the job's own."""

    job: BenchJob
    small: ProductCase
    small_results: Any
    whole: ProductCase
    whole_results: Any


def measure(settings: Settings, shape: ProductShape, which: str) -> list[dict]:
    """A row for each skew and implementation of a pass, all measured in turns. Raises
    WrongResult."""
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
    """One on a processor; on a GPU several, so that its L2 does not serve them."""
    first = cases.operands(which, shape, settings.dtype, settings.seed)
    if settings.device == "cpu":
        return [first]
    wanted = -(-ROTATED_BYTES // sum(a.nbytes for a in first))
    seeds = range(settings.seed + 1, settings.seed + min(MAX_SETS, max(2, wanted)))
    return [first, *(cases.operands(which, shape, settings.dtype, s) for s in seeds)]


def make_jobs(own: Pass) -> tuple[dict, dict]:
    """{(skew, implementation): Job} and {(skew, implementation): why there is none}."""
    jobs, declined = {}, {}
    for impl in own.settings.impls:
        # What a peer cannot take it says in its own way; ours decline in one way only.
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
    """All that an implementation runs before it is timed: the small case, ours with NaN
    in padding, and one call on its own case, by the variant of these tiles or else the
    fastest. Raises whatever the implementation does."""
    settings, which = own.settings, own.which
    small = cases.small_case(which, own.shape, settings.dtype, settings.seed, skew)
    rows_g = make_rows(skew, own.shape.rows, own.shape.groups, cases.SEED_OF_ROWS)
    fullest, small_fullest = 0, 0
    if impl == "batched":
        require_room(own, rows_g)
        fullest, small_fullest = int(rows_g.max()), int(small.rows_g.max())
    found = [
        BenchJob(
            variant, [variant.arguments(ops, jnp.asarray(rows_g)) for ops in own.sets]
        )
        for variant in peers.variants(impl, which, fullest)
        if tiles in (None, variant.tiles)
    ]
    job = found[0] if len(found) == 1 else fastest(found)
    whole_results = job.variant.run_results(job.arguments[0])
    by_tiles = {
        variant.tiles: variant for variant in peers.variants(impl, which, small_fullest)
    }
    given = small.poisoned() if impl in peers.OURS else small
    variant = by_tiles[job.variant.tiles]
    arguments = variant.arguments(given.operands, jnp.asarray(given.rows_g))
    whole = ProductCase(own.sets[0], rows_g)
    return Trial(job, small, variant.run_results(arguments), whole, whole_results)


def require_room(own: Pass, rows_g: np.ndarray) -> None:
    """NotImplementedError where padded arrays would not fit."""
    width = own.shape.d + own.shape.f * (2 if own.which == "fused" else 1)
    num_rows = own.shape.groups * int(rows_g.max())
    num_bytes = num_rows * width * jnp.dtype(own.settings.dtype).itemsize
    max_gib = BATCHED_GIB[own.settings.device]
    if num_bytes > max_gib * 2**30:
        raise NotImplementedError(
            f"padding takes {num_bytes / 2**30:.0f} GiB, and {max_gib} may be used"
        )


def fastest(jobs: list[BenchJob]) -> BenchJob:
    """Those that raise are out; where all do, the last one's error is raised."""
    timed, last = [], None
    for job in jobs:
        try:
            job.call_msec(1)
            timed.append((job.call_msec(FEWEST_CALLS), job))
        except Exception as error:
            last = error
    if not timed:
        raise last
    return min(timed, key=lambda pair: pair[0])[1]


def judge(own: Pass, impl: str, skew: Skew, trial: Trial) -> None:
    """WrongResult unless the results are right: of the small case all, of the job's own
    a sample. Fills in the job's error and bytes."""
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
    most = cases.max_error(settings.dtype, settings.device, which, is_fp8=is_fp8)
    if job.error > most:
        raise WrongResult(
            f"{impl} {job.variant.tiles} computes something else: {which}, {skew}, "
            f"{shape} in {settings.dtype}: ||out - ref|| / ||ref|| is {job.error:.2g} "
            f"and may be {most:.1g}; leave it out with --impls to measure the others"
        )
    itemsize = jnp.dtype(settings.dtype).itemsize
    job.min_bytes = cases.min_bytes(which, shape, whole.rows_g, itemsize)


def take_turns(jobs: list[BenchJob], settings: Settings) -> None:
    """All have run before: nothing is compiled here, and no turn warms up."""
    for job in jobs if settings.device == "gpu" else ():
        job.num_calls = num_calls(job.call_msec(FEWEST_CALLS))
    for _, job in in_turns(jobs, settings.repeats, num_warm_ups=0):
        job.msec.append(job.call_msec(job.num_calls))


def mean_msec(
    call: Callable[[int], Any], num_calls: int, wait: Callable = jax.block_until_ready
) -> float:
    """Of call(i), over so many back to back and one wait."""
    begin = time.perf_counter()
    for i in range(num_calls):
        out = call(i)
    wait(out)
    return 1e3 * (time.perf_counter() - begin) / num_calls


def num_calls(msec: float) -> int:
    """Calls of so long each between two waits for a GPU."""
    return min(MAX_CALLS, max(FEWEST_CALLS, round(SAMPLE_MSEC / msec)))


def figures(job: BenchJob, dense: BenchJob | None, num_flops: int) -> dict:
    """`share_of_dense` is of the rate of `dense`, on the same rows."""
    msec = statistics.median(job.msec)
    share = statistics.median(dense.msec) / msec if dense else None
    return {
        "msec": msec,
        "msec_least": min(job.msec),
        "msec_most": max(job.msec),
        "num_calls": job.num_calls,
        "tflops": num_flops / msec / 1e9,
        "share_of_dense": share,
        "min_bytes": job.min_bytes,
        "gb_per_sec": job.min_bytes / msec / 1e6,
        "error": job.error,
        "tiles": job.variant.tiles,
    }
