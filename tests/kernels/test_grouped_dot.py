"""grouped_dot and grouped_swiglu with their gradients against definitions, in sizes
that no block divides. test_cases.py compares the passes of all kernels with float64,
padding of NaN included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax.kernels.grouped_dot import (
    grouped_dot,
    grouped_swiglu,
    portable,
    reference,
)
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


def swiglu_operands(seed=0):
    """Return x_md, into_gdh, down_gfd and a cotangent dy_md."""
    random = np.random.default_rng(seed)
    shapes = (NUM_ROWS, D), (NUM_GROUPS, D, 2 * F), (NUM_GROUPS, F, D), (NUM_ROWS, D)
    return [jnp.float32(random.standard_normal(shape) / 4) for shape in shapes]


def swiglu_and_grads(x_md, into_gdh, down_gfd, dy_md, rows_g, implementation="blocked"):
    """Return y_md, and the gradients of the three operands for the cotangent dy_md."""

    def ffn(*floats):
        return grouped_swiglu(*floats, rows_g, implementation=implementation)

    y_md, vjp = jax.vjp(ffn, x_md, into_gdh, down_gfd)
    return y_md, *vjp(dy_md)


@jax.jit
def swiglu_by_definition(x_md, into_gdh, down_gfd, dy_md, rows_g):
    """Return the same results from the reference product, differentiated by JAX."""

    def ffn(x_md, into_gdh, down_gfd):
        into_mh = reference.grouped_dot(x_md, into_gdh, rows_g)
        h_mf = jax.nn.silu(into_mh[:, :F]) * into_mh[:, F:]
        return reference.grouped_dot(h_mf, down_gfd, rows_g)

    y_md, vjp = jax.vjp(ffn, x_md, into_gdh, down_gfd)
    return y_md, *vjp(dy_md)


swiglu_and_grads_jit = jax.jit(swiglu_and_grads, static_argnames="implementation")


@pytest.mark.parametrize("implementation", ["reference", "xla", "blocked"])
def test_swiglu_equals_the_definition(implementation):
    """NaN in padding reaches nothing."""
    x_md, *weights, dy_md = swiglu_operands()
    for skew in SKEWS:
        for num_owned in (0, NUM_OWNED, NUM_ROWS):
            rows_g = make_rows(skew, num_owned, NUM_GROUPS, seed=1)
            dirty = [a.at[num_owned:].set(jnp.nan) for a in (x_md, dy_md)]
            args = dirty[0], *weights, dirty[1], rows_g
            actual = swiglu_and_grads_jit(*args, implementation=implementation)
            assert_close(actual, swiglu_by_definition(x_md, *weights, dy_md, rows_g))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_experts_have_the_bits_of_their_products(dtype):
    x_md, into_gdh, down_gfd, dy_md = (a.astype(dtype) for a in swiglu_operands())
    x_md, dy_md = (a.at[NUM_OWNED:].set(jnp.nan) for a in (x_md, dy_md))
    rows_g = jnp.asarray(make_rows("zipf", NUM_OWNED, NUM_GROUPS, seed=3))
    p = portable.products(BLOCK_ROWS)

    @jax.jit
    def one_by_one():
        h_mf, into_mh = p.swiglu(x_md, into_gdh, rows_g)
        dinto_mh, h_again_mf = p.swiglu_dgrad(dy_md, down_gfd, into_mh, rows_g)
        dx_md = p.dgrad(dinto_mh, into_gdh, rows_g)
        dinto_gdh = p.wgrad(x_md, dinto_mh, rows_g)
        ddown_gfd = p.wgrad(h_again_mf, dy_md, rows_g)
        y_md = p.forward(h_mf, down_gfd, rows_g)
        return y_md, into_mh, dx_md, dinto_gdh, ddown_gfd

    @jax.jit
    def whole():
        weights = into_gdh, down_gfd, rows_g
        y_md, into_mh = p.experts.forward(x_md, *weights)
        return y_md, into_mh, *p.experts.backward(dy_md, x_md, into_mh, *weights)

    for expected, actual in zip(one_by_one(), whole(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_inside_shard_map():
    """Each of 8 devices has its own rows_g, with check_vma. The shared weight gets
    summed gradients, and the other weight gets its own."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("expert",), axis_types=(AxisType.Auto,))
    pieces = [swiglu_operands(seed=i) for i in range(NUM_DEVICES)]
    shared_gdh = pieces[0][1]
    pieces = [(x_md, shared_gdh, *others) for x_md, _, *others in pieces]
    rows = [
        make_rows(SKEWS[i % 4], NUM_OWNED - 9 * i, NUM_GROUPS, i)
        for i in range(NUM_DEVICES)
    ]
    expected = [swiglu_by_definition(*a, r) for a, r in zip(pieces, rows, strict=True)]
    split = P("expert")
    body = jax.shard_map(
        swiglu_and_grads,
        mesh=mesh,
        in_specs=(split, P(), split, split, split),
        out_specs=(split, split, P(), split),
    )
    x_md, _, *others = map(jnp.concatenate, zip(*pieces, strict=True))
    actual = jax.jit(body)(x_md, shared_gdh, *others, jnp.concatenate(rows))
    y, dx, dinto, ddown = zip(*expected, strict=True)
    joined = (*map(jnp.concatenate, (y, dx)), sum(dinto), jnp.concatenate(ddown))
    assert_close(actual, joined)


def call(function, wrong, **options):
    """Call a grouped product with one operand made wrong: `wrong` is its name and what
    changes it."""
    x_md, into_gdh, down_gfd, _ = swiglu_operands()
    arrays = {"x_md": x_md, "into_gdh": into_gdh, "down_gfd": down_gfd}
    arrays["rows_g"] = make_rows("uniform", NUM_OWNED, NUM_GROUPS, seed=0)
    name, change = wrong or ("x_md", lambda x_md: x_md)
    arrays[name] = change(arrays[name])
    if function is grouped_dot:
        del arrays["down_gfd"]
    return function(*arrays.values(), **options)


def narrow(array):
    return array.astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("function", "wrong", "options", "rule"),
    [
        (grouped_dot, ("x_md", narrow), {}, "x_md is bfloat16 and w_gdf is float32"),
        (grouped_dot, None, {"implementation": "dense"},
         "'dense' is not one of auto, reference"),
        (grouped_dot, None, {"align_rows": 64}, "align_rows=64 must divide the 200 "),
        (grouped_swiglu, ("into_gdh", narrow), {},
         "float32 and into_gdh is bfloat16: cast"),
        (grouped_swiglu, ("down_gfd", narrow), {},
         "float32 and down_gfd is bfloat16: cast"),
        (grouped_swiglu, ("into_gdh", lambda x: x[:, 1:]), {},
         "into_gdh has shape .* and must have"),
        (grouped_swiglu, ("down_gfd", lambda x: x[:, 1:]), {},
         "into_gdh has shape .* and must have"),
        (grouped_swiglu, ("down_gfd", lambda x: x[:, :, 1:]), {},
         "down_gfd has shape .* and must have"),
        (grouped_swiglu, ("rows_g", lambda x: x[1:]), {},
         "rows_g has shape .* has 6 groups"),
        (grouped_swiglu, None, {"implementation": "dense"},
         "'dense' is not one of auto, reference"),
    ],
)  # fmt: skip
def test_bad_arguments(function, wrong, options, rule):
    with pytest.raises(ValueError, match=rule):
        call(function, wrong, **options)


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
