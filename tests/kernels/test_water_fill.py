"""The fused kernel gives the same bits as the plain sweeps, interpreted, and lowers for
CUDA. test_water_filling.py compares the plain sweeps with the definition."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.water_fill import water_fill
from moejax.plan.water_filling import MAX_SWEEPS
from tests.support.close import assert_close

KINDS = ("zipf", "equal", "hot", "sparse", "nothing", "none")


def instance(seed, kind, num_items, num_colors, num_bins):
    """Return items on up to 4 random bins each, first-fit colored, with even shares.

    Items with one bin are fixed; the kind 'none' has only such items.
    """
    rng = np.random.default_rng(seed)
    rank = 1 + rng.permutation(num_items)
    loads = {
        "zipf": 10_000 * rank ** -rng.uniform(0.4, 2.0),
        "equal": np.full(num_items, 17),
        "hot": np.where(rank == 1, 9_999, 0),
        "sparse": np.where(rank % 3 == 0, rank, 0),
        "nothing": np.zeros(num_items),
        "none": rank,
    }[kind].astype(np.int32)
    item_cw = np.full((num_colors, num_bins), -1, np.int32)
    amount_cw = np.zeros((num_colors, num_bins), np.int32)
    fixed_w = np.zeros(num_bins, np.int32)
    for item, load in enumerate(loads):
        spread = 1 if kind == "none" else min(num_bins, rng.integers(1, 5))
        bins = np.sort(rng.choice(num_bins, spread, replace=False))
        if spread == 1:
            fixed_w[bins] += load
            continue
        c = np.argmax((item_cw[:, bins] < 0).all(axis=1))
        assert (item_cw[c, bins] < 0).all(), "no color left"
        item_cw[c, bins] = item
        amount_cw[c, bins] = load // spread + (np.arange(spread) < load % spread)
    colors = np.int32((item_cw >= 0).any(axis=1).sum())
    return item_cw, amount_cw, fixed_w, colors, np.int32(seed % 2 * 5)


def solve_in_scan(fused: bool, arrays):
    """Solve the instances in a scan, as a model's scan over layers would."""
    options = {"fused": True, "interpret": True} if fused else {}
    solve = functools.partial(water_fill, max_sweeps=3, **options)
    return jax.jit(
        lambda *arrays: jax.lax.scan(lambda _, a: (None, solve(*a)), None, arrays)[1]
    )(*arrays)


@pytest.mark.slow
def test_fused_gives_the_same_bits():
    """Two blocks of bins need several sweeps."""
    each = [instance(i, kind, 40, 24, 40) for i, kind in enumerate(KINDS)]
    arrays = tuple(np.stack(arrays) for arrays in zip(*each, strict=True))
    plain, fused = (solve_in_scan(fused, arrays) for fused in (False, True))
    assert_close(fused, plain)
    assert plain.sweeps.min() == 0
    assert plain.sweeps.max() >= 2


def lower_to_text(num_colors, num_bins):
    table = jax.ShapeDtypeStruct((num_colors, num_bins), jnp.int32)
    line, number = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((num_bins,), ()))
    solve = jax.jit(functools.partial(water_fill, max_sweeps=MAX_SWEEPS, fused=True))
    traced = solve.trace(table, table, line, number, number)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_is_one_kernel_for_cuda():
    text = lower_to_text(432, 128)
    assert re.findall(r"custom_call @(\w+)", text) == ["mosaic_gpu_v2"]
    assert "stablehlo.while" not in text


@pytest.mark.parametrize(
    ("num_colors", "num_bins", "sizes"),
    [(8, 129, "8 colors of 129 bins"), (433, 128, "433 colors of 128 bins")],
)
def test_declines_what_does_not_fit(num_colors, num_bins, sizes):
    with pytest.raises(NotImplementedError, match=f"{sizes} .*: use fused=False"):
        lower_to_text(num_colors, num_bins)
