"""The fused kernel gives the same bits as the plain sweeps, interpreted, and lowers for
CUDA. test_water_filling.py compares the plain sweeps with the definition."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax.kernels.water_fill import water_fill
from moejax.plan.water_filling import MAX_SWEEPS
from tests.support.close import assert_close

KINDS = ("zipf", "equal", "hot", "sparse", "nothing", "none")
PLAIN = functools.partial(water_fill, max_sweeps=MAX_SWEEPS)
FUSED = functools.partial(PLAIN, fused=True, interpret=True)


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


def stack_instances(count, *sizes):
    """Stack the arrays of many instances, of all kinds in turn, along a first dim."""
    each = [instance(i, KINDS[i % len(KINDS)], *sizes) for i in range(count)]
    return tuple(np.stack(arrays) for arrays in zip(*each, strict=True))


def solve_in_scan(solve, arrays):
    """Solve the instances in a scan, as a model's scan over layers would."""
    return jax.jit(
        lambda *arrays: jax.lax.scan(lambda _, a: (None, solve(*a)), None, arrays)[1]
    )(*arrays)


@pytest.mark.parametrize(
    ("sizes", "count", "max_sweeps"),
    [
        pytest.param((40, 24, 40), 6, 3, id="two blocks"),
        pytest.param(
            (50, 256, 70), 3, 2, id="items outside shared memory",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_fused_gives_the_same_bits(sizes, count, max_sweeps):
    arrays = stack_instances(count, *sizes)
    expected = solve_in_scan(functools.partial(PLAIN, max_sweeps=max_sweeps), arrays)
    fused = solve_in_scan(functools.partial(FUSED, max_sweeps=max_sweeps), arrays)
    assert_close(fused, expected)
    num_bins = sizes[-1]
    assert expected.sweeps.min() == 0
    assert expected.sweeps.max() >= min(num_bins - 1, 2)


@pytest.mark.slow
def test_every_device_solves_its_own_in_shard_map():
    """Inputs that vary over the mesh give outputs whose types vary over it."""
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    arrays = stack_instances(8, 16, 24, 8)

    def solve(*arrays):
        filled = FUSED(*(array[0] for array in arrays))
        for output in filled:
            assert jax.typeof(output).manual_axis_type.varying == {"expert"}
        return jax.tree.map(lambda output: output[None], filled)

    on_devices = jax.shard_map(
        solve, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
    )
    assert_close(jax.jit(on_devices)(*arrays), solve_in_scan(PLAIN, arrays))


def test_example_of_the_docstring():
    item_cw = jnp.array([[0, 0, -1], [-1, 1, 1]])
    amount_cw = jnp.array([[3, 3, 0], [0, 2, 2]])
    filled = PLAIN(item_cw, amount_cw, jnp.zeros(3, int), 2, 0)
    assert filled.amount_cw.tolist() == [[4, 2, 0], [0, 1, 3]]
    assert filled.level_w.tolist() == [4, 3, 3]
    assert (filled.bound, filled.sweeps) == (4, 1)


def lower_to_text(num_colors, num_bins):
    table = jax.ShapeDtypeStruct((num_colors, num_bins), jnp.int32)
    line, number = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((num_bins,), ()))
    solve = jax.jit(functools.partial(PLAIN, fused=True))
    traced = solve.trace(table, table, line, number, number)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("num_colors", "num_bins"),
    [
        (16, 8),
        (432, 128),
    ],
)
def test_is_one_kernel_for_cuda(num_colors, num_bins):
    text = lower_to_text(num_colors, num_bins)
    assert re.findall(r"custom_call @(\w+)", text) == ["mosaic_gpu_v2"]
    assert "stablehlo.while" not in text


@pytest.mark.parametrize(
    ("num_colors", "num_bins", "sizes"),
    [(8, 129, "8 colors of 129 bins"), (433, 128, "433 colors of 128 bins")],
)
def test_declines_what_does_not_fit(num_colors, num_bins, sizes):
    with pytest.raises(NotImplementedError, match=f"{sizes} .*: use fused=False"):
        lower_to_text(num_colors, num_bins)
