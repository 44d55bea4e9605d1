"""The work of tools/bench/grouped_dot.py: each implementation of a pass is checked, and
those that are right are timed in turns."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.kernels import tuning
from moejax.kernels.cases import FP8_TOLERANCE
from moejax.kernels.device import device_here
from moejax.kernels.shapes import ProductShape, Skew, make_rows
from tools.bench import grouped_dot_cases as cases
from tools.bench import grouped_dot_peers as peers
from tools.bench.timer import median_sec

NUM_PRODUCTS = {"swiglu": 2, "grads": 3}
"""Number of products of 2 rows d f FLOPs in a pass, where it is not 1."""
SMALL_ROWS = np.array((64, 0, 200, 1, 191), np.int32)
"""Rows of each group of the small case, whose widths are SMALL_WIDTH."""
SMALL_WIDTH = 256
SEED_OF_ROWS = 0
ROTATED_BYTES = 256 * 2**20
"""Bytes of the input sets that calls on a GPU cycle through: more than four times the
L2 of a Hopper GPU."""
MAX_SETS = 8
SAMPLE_SEC = 0.02
"""Intended duration of the calls of one turn on a GPU, together. The limits on the
number of calls take precedence."""
MIN_CALLS, MAX_CALLS = 3, 50


class WrongResult(Exception):
    """Error raised when an implementation computes wrong values."""


class Settings(NamedTuple):
    """Settings of a run, beside its shapes and passes."""

    device: str
    dtype: str
    skews: Sequence[Skew]
    impls: Sequence[str]
    repeats: int
    seed: int


class Inputs(NamedTuple):
    """Arrays of a pass before rows_g, through whose sets calls cycle, and samples of
    the results of the first set."""

    sets: list[tuple]
    rows_g: np.ndarray
    samples: list[cases.Sample]


def measure(settings: Settings, shape: ProductShape, which: str) -> list[dict]:
    """Check and time the implementations of a pass, and return a row for each skew and
    implementation. Without a time, its `declined` or `failed` has the reason."""
    sizes = SMALL_ROWS.sum(), SMALL_WIDTH, SMALL_WIDTH, len(SMALL_ROWS)
    few = cases.draw(which, ProductShape(*sizes), settings.dtype, settings.seed)
    samples = cases.make_samples(which, few, SMALL_ROWS, max_rows=SMALL_ROWS.max())
    small = Inputs([few], SMALL_ROWS, samples)
    sets = draw_sets(settings, shape, which)
    rows = []
    for skew in settings.skews:
        rows_g = make_rows(skew, shape.rows, shape.groups, SEED_OF_ROWS)
        case = Inputs(sets, rows_g, cases.make_samples(which, sets[0], rows_g))
        calls, found = {}, {}
        for impl in settings.impls:
            try:
                calls[impl], found[impl] = prepare(impl, which, shape, small, case)
            except Exception as error:
                # A peer may decline by any exception; ours do so by one kind only.
                is_refusal = isinstance(error, NotImplementedError | ImportError)
                is_peer = impl not in peers.OURS and not isinstance(error, WrongResult)
                text = " ".join(str(error).split()) or type(error).__name__
                outcome = "declined" if is_refusal or is_peer else "failed"
                found[impl] = {outcome: text[:300]}
        sec = time_calls(calls, settings)
        flops = NUM_PRODUCTS.get(which, 1) * 2 * shape.rows * shape.d * shape.f
        for impl, about in found.items():
            row = {"skew": skew, "impl": impl, "msec": None} | about
            if impl in sec:
                row["msec"] = 1e3 * sec[impl]
                row["tflops"] = flops / sec[impl] / 1e12
                row["share_of_dense"] = (
                    sec["dense"] / sec[impl] if "dense" in sec else None
                )
                row["gb_per_sec"] = row["min_bytes"] / sec[impl] / 1e9
            rows.append(row | dataclasses.asdict(shape))
    return rows


def draw_sets(settings: Settings, shape: ProductShape, which: str) -> list[tuple]:
    """Return one set of inputs on a CPU, and several on a GPU, so that they do not come
    from its L2 cache."""
    first = cases.draw(which, shape, settings.dtype, settings.seed)
    if settings.device == "cpu":
        return [first]
    num_sets = -(-ROTATED_BYTES // sum(array.nbytes for array in first))
    seeds = range(settings.seed + 1, settings.seed + min(MAX_SETS, max(2, num_sets)))
    return [first, *(cases.draw(which, shape, settings.dtype, seed) for seed in seeds)]


def prepare(
    impl: str, which: str, shape: ProductShape, small: Inputs, case: Inputs
) -> tuple[Callable[[], Any], dict]:
    """Return a call of an implementation's fastest variant, and its tiles, error and
    bytes. Raises WrongResult if it computes wrong values."""
    if impl == "dense":
        small, case = without_groups(which, small), without_groups(which, case)
    align_rows = 1
    if impl in peers.ALIGNED:
        align_rows = tuning.align_rows_for(shape.rows, shape.groups)
    variants = peers.variants(impl, which, align_rows)
    arguments = [
        cases.aligned_arguments(operands, case.rows_g, align_rows)
        for operands in case.sets
    ]
    tiles = fastest(variants, arguments[0])
    run, errors = variants[tiles], []
    for inputs in (small, case):
        own = cases.aligned_arguments(inputs.sets[0], inputs.rows_g, align_rows)
        results = peers.as_jax(run(*own))
        results = cases.without_gaps(results, inputs.rows_g, align_rows)
        by_part = results if which == "grads" else [results]
        for sample, result in zip(inputs.samples, by_part, strict=True):
            limit = FP8_TOLERANCE if impl == "hopper_fp8" else sample.case.tolerance
            errors.append(sample.error(result))
            if not errors[-1] <= limit:
                raise WrongResult(
                    f"{sample.case.kernel} of {inputs.rows_g.sum()} rows computes "
                    f"something else: error {errors[-1]:.2g}, at most {limit:.2g}"
                )
    if impl in peers.ALIGNED:
        padded = dataclasses.replace(shape, rows=len(arguments[0][0]))
        dtype = arguments[0][0].dtype.name
        tiles = describe_tiles(impl, which, padded, dtype, align_rows)
    share = np.mean(case.rows_g > 0)
    num_bytes = sum(a.nbytes * (share if a.ndim == 3 else 1) for a in case.sets[0])
    num_bytes += sum(array.nbytes for array in jax.tree.leaves(results))
    sets = itertools.cycle(arguments)
    about = {"error": max(errors), "tiles": tiles, "min_bytes": round(num_bytes)}
    return lambda: run(*next(sets)), about


def without_groups(which: str, inputs: Inputs) -> Inputs:
    """Return the inputs of `dense`: all rows belong to the first matrix."""
    sets = [tuple(a[:1] if a.ndim == 3 else a for a in one) for one in inputs.sets]
    rows_g = np.array([inputs.rows_g.sum()], np.int32)
    return Inputs(sets, rows_g, cases.make_samples(which, sets[0], rows_g))


def fastest(variants: dict[str, Callable], arguments: tuple) -> str:
    """Return the tiles of the fastest variant. Variants that raise are left out; if all
    do, the last error is raised."""
    if len(variants) == 1:
        return next(iter(variants))
    sec, last = {}, None
    for tiles, run in variants.items():
        try:
            sec |= median_sec({tiles: partial(run, *arguments)}, 1, MIN_CALLS)
        except Exception as error:
            last = error
    if not sec:
        raise last
    return min(sec, key=sec.get)


def describe_tiles(
    impl: str, which: str, shape: ProductShape, dtype: str, align_rows: int
) -> str:
    """Return the tiles of our kernels for a pass on a shape, padding included, and
    whether they were measured."""
    names = ["forward", "dgrad", "wgrad"] if which == "grads" else [which]
    if impl == "hopper_fp8":
        if which == "swiglu":
            names, shape = ["forward"], dataclasses.replace(shape, f=2 * shape.f)
        names = [name if name == "wgrad" else f"fp8_{name}" for name in names]
    texts, where = [], (dtype, device_here().device_kind)
    for name in names:
        tiles = tuning.tiles_for(name, shape, *where, align_rows)
        is_measured = tiles == tuning.measured_tiles(name, shape, *where)
        source = "measured" if is_measured else "default"
        texts.append(f"{name} {source} {dataclasses.astuple(tiles)}")
    return "; ".join(texts)


def time_calls(calls: dict[str, Callable], settings: Settings) -> dict[str, float]:
    """Return the median seconds of each call. On a GPU there are as many calls between
    two waits as last SAMPLE_SEC."""
    if settings.device == "cpu":
        return median_sec(calls, settings.repeats)
    numbers = {
        impl: min(MAX_CALLS, max(MIN_CALLS, round(SAMPLE_SEC / sec)))
        for impl, sec in median_sec(calls, 1, MIN_CALLS, peers.wait).items()
    }
    return median_sec(calls, settings.repeats, numbers, peers.wait)
