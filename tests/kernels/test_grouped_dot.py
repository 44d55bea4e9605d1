"""The portable grouped products against their definition, in sizes that no block
divides. test_cases.py compares the passes of all kernels with float64, padding of NaN
included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax.kernels.grouped_dot import grouped_dot, portable
from moejax.kernels.shapes import SKEWS, make_rows
from tests.support.close import assert_close

NUM_DEVICES, NUM_ROWS, D, F, NUM_GROUPS = 8, 200, 16, 24, 6
NUM_OWNED = 170
"""Number of rows that belong to groups; the other thirty are padding."""
BLOCK_ROWS = 32
"""Small compared with NUM_ROWS, so that whole blocks, tails and clamping occur."""


def operands(dtype=jnp.float32, num_rows=NUM_ROWS, seed=0):
    """Return x_md, w_gdf and a cotangent dy_mf."""
    random = np.random.default_rng(seed)
    shapes = (num_rows, D), (NUM_GROUPS, D, F), (num_rows, F)
    return [jnp.asarray(random.standard_normal(s), dtype) for s in shapes]


def value_and_grads(x_md, w_gdf, rows_g, dy_mf, **options):
    """Return y_mf, and dx_md and dw_gdf for the cotangent dy_mf."""

    def product(x_md, w_gdf):
        return grouped_dot(x_md, w_gdf, rows_g, **options)

    y_mf, vjp = jax.vjp(product, x_md, w_gdf)
    return {"y": y_mf, **dict(zip(("dx", "dw"), vjp(dy_mf), strict=True))}


value_and_grads_jit = jax.jit(
    value_and_grads, static_argnames=("implementation", "block_rows")
)


def by_hand(x_md, w_gdf, rows_g, dy_mf):
    """Compute the definition in the docstring of grouped_dot, in NumPy with float64:
    rows of padding and weights of empty groups give zeros."""
    x_md, w_gdf, dy_mf = (np.asarray(a, np.float64) for a in (x_md, w_gdf, dy_mf))
    y_mf, dx_md = np.zeros_like(dy_mf), np.zeros_like(x_md)
    dw_gdf = np.zeros_like(w_gdf)
    owner_m = np.repeat(np.arange(len(rows_g)), rows_g)
    for j, i in enumerate(owner_m):
        y_mf[j] = x_md[j] @ w_gdf[i]
        dx_md[j] = dy_mf[j] @ w_gdf[i].T
        dw_gdf[i] += np.outer(x_md[j], dy_mf[j])
    return {"y": y_mf, "dx": dx_md, "dw": dw_gdf}


@pytest.mark.parametrize("implementation", ["reference", "blocked", "xla"])
def test_equals_the_definition(implementation):
    """NaN in padding reaches nothing."""
    x_md, w_gdf, dy_mf = operands()
    for seed, skew in enumerate(SKEWS):
        for num_owned in (0, 1, NUM_OWNED, NUM_ROWS):
            rows_g = make_rows(skew, num_owned, NUM_GROUPS, seed)
            dirty_md, dirty_mf = (a.at[num_owned:].set(jnp.nan) for a in (x_md, dy_mf))
            options = {"implementation": implementation, "block_rows": BLOCK_ROWS}
            actual = value_and_grads_jit(dirty_md, w_gdf, rows_g, dirty_mf, **options)
            assert_close(actual, by_hand(x_md, w_gdf, rows_g, dy_mf), dtype="float32")


@pytest.mark.parametrize("block_rows", [7, 1000])
def test_any_block_size(block_rows):
    x_md, w_gdf, dy_mf = operands()
    rows_g = make_rows("zipf", NUM_OWNED, NUM_GROUPS, seed=3)
    actual = value_and_grads_jit(x_md, w_gdf, rows_g, dy_mf, block_rows=block_rows)
    assert_close(actual, by_hand(x_md, w_gdf, rows_g, dy_mf), dtype="float32")


@pytest.mark.slow
def test_blocks_of_two_sizes_and_a_tail():
    """Groups end after a whole block, after half a block, and in tails."""
    rows_g = np.array([940, 90, 0, 768, 513, 257], np.int32)
    x_md, w_gdf, dy_mf = operands(num_rows=2600)
    actual = value_and_grads_jit(
        x_md, w_gdf, rows_g, dy_mf, implementation="blocked", block_rows=512
    )
    assert_close(actual, by_hand(x_md, w_gdf, rows_g, dy_mf), dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["blocked", "xla"])
def test_half_precision_accumulates_in_float32(implementation):
    """Against float64, the only error is one rounding of the result."""
    x_md, w_gdf, dy_mf = operands(jnp.bfloat16)
    rows_g = make_rows("one_hot", NUM_OWNED, NUM_GROUPS, seed=4)
    actual = value_and_grads_jit(
        x_md, w_gdf, rows_g, dy_mf, implementation=implementation, block_rows=BLOCK_ROWS
    )
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(actual))
    assert_close(
        actual,
        by_hand(x_md, w_gdf, rows_g, dy_mf),
        factor=0.2,
        reason="a single rounding is a fifth of what the table grants half precision",
    )


def test_a_group_sees_its_own_rows_only():
    """NaN in the rows of a group stays in the group, although blocks cross its
    border."""
    x_md, w_gdf, dy_mf = operands()
    rows_g = np.array([40, 45, 0, 30, 25, 30], np.int32)
    poisoned = x_md.at[40:85].set(jnp.nan)
    actual = value_and_grads_jit(
        poisoned, w_gdf, rows_g, dy_mf, block_rows=BLOCK_ROWS, implementation="blocked"
    )
    clean = by_hand(x_md, w_gdf, rows_g, dy_mf)
    keep_g, keep_m = np.arange(NUM_GROUPS) != 1, np.r_[0:40, 85:NUM_ROWS]
    for name, keep in (("y", keep_m), ("dw", keep_g)):
        assert_close(actual[name][keep], clean[name][keep], dtype="float32")


@pytest.mark.slow
def test_inside_shard_map():
    """Each of 8 devices has its own rows_g; the shared weight gets summed gradients."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("expert",), axis_types=(AxisType.Auto,))
    pieces = [operands(seed=i) for i in range(NUM_DEVICES)]
    w_gdf = pieces[0][1]
    rows = [
        make_rows(SKEWS[i % 4], NUM_OWNED - 9 * i, NUM_GROUPS, i)
        for i in range(NUM_DEVICES)
    ]
    expected = [
        by_hand(x_md, w_gdf, rows_g, dy_mf)
        for (x_md, _, dy_mf), rows_g in zip(pieces, rows, strict=True)
    ]
    split = P("expert")
    body = jax.shard_map(
        lambda *args: value_and_grads(*args, block_rows=BLOCK_ROWS),
        mesh=mesh,
        in_specs=(split, P(), split, split),
        out_specs={"y": split, "dx": split, "dw": P()},
    )
    x_md, _, dy_mf = (jnp.concatenate(a) for a in zip(*pieces, strict=True))
    actual = jax.jit(body)(x_md, w_gdf, jnp.concatenate(rows), dy_mf)
    joined = {name: np.concatenate([e[name] for e in expected]) for name in actual}
    joined["dw"] = sum(e["dw"] for e in expected)
    assert_close(actual, joined, dtype="float32")


def test_bad_arguments():
    x_md, w_gdf, _ = operands()
    rows_g = make_rows("uniform", NUM_OWNED, NUM_GROUPS, seed=0)
    with pytest.raises(ValueError, match="x_md is bfloat16 and w_gdf is float32"):
        grouped_dot(x_md.astype(jnp.bfloat16), w_gdf, rows_g)
    with pytest.raises(ValueError, match="'dense' is not one of auto, reference"):
        grouped_dot(x_md, w_gdf, rows_g, implementation="dense")


@pytest.mark.parametrize("skew", SKEWS)
def test_rows_of(skew):
    for num_groups in (1, 7, 64):
        rows_g = make_rows(skew, 1000, num_groups, seed=7)
        assert (rows_g.dtype, rows_g.shape) == (np.int32, (num_groups,))
        assert (rows_g.sum(), rows_g.min() >= 0) == (1000, True)
        num_empty = {"one_hot": num_groups - 1, "with_empty": num_groups // 2}
        assert np.sum(rows_g == 0) == num_empty.get(skew, 0)
        assert skew != "uniform" or np.ptp(rows_g) <= 1
        if skew == "zipf" and num_groups > 1:
            largest, second = np.sort(rows_g)[:-3:-1]
            assert largest / second == pytest.approx(2, rel=0.02)


def test_default_block_rows():
    assert portable.default_block_rows(4096, 16) == 512
    assert portable.default_block_rows(640, 8) == 128
    assert portable.default_block_rows(8, 64) == 128
    assert portable.default_block_rows(10**6, 8) == 512
