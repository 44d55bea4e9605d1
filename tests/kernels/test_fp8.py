"""8-bit values with scales: laws of rounding, and products on any device against NumPy
in float64. test_hopper.py tests the Hopper kernels."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.kernels.grouped_dot import fp8, grouped_dot, grouped_swiglu
from moejax.kernels.grouped_dot.choose import products
from moejax.kernels.shapes import make_rows
from tests.support import fp8_definition as definition
from tests.support.close import assert_close

FORMATS = ("e4m3", "e5m2")
ROWS, OWNED, GROUPS, D, F = 100, 90, 5, 160, 136
"""D and F are not multiples of the block size."""


def some_rows(dtype="float32", shape=(6, 300)):
    """Return rows whose blocks differ in size, from 1e-4 to 1e3."""
    random = np.random.default_rng(0)
    size = 10 ** random.uniform(-4, 3, (shape[0], -(-shape[1] // 64)))
    values = random.standard_normal(shape)
    return jnp.asarray(values * np.repeat(size, 64, axis=1)[:, : shape[1]], dtype)


round_rows = jax.jit(fp8.round_rows, static_argnums=1)
quantize = jax.jit(fp8.quantize, static_argnums=(1, 2))


@pytest.mark.parametrize(
    ("name", "dtype", "block"),
    [
        ("e4m3", "float32", fp8.ROW_BLOCK),
        ("e5m2", "float32", fp8.MATRIX_BLOCK),
        ("e4m3", "bfloat16", fp8.MATRIX_BLOCK),
        ("e5m2", "float16", fp8.ROW_BLOCK),
    ],
)
def test_values_and_scales_are_those_of_the_definition(name, dtype, block):
    """Compiled results agree bit for bit: a compiler could drop a cast and its
    inverse. Rounding once more changes nothing, and bfloat16 holds all values."""
    round_to_fp8 = functools.partial(
        fp8.round_to_fp8, dtype=fp8.GRADIENT_DTYPES[name], block=block
    )

    @jax.jit
    def twice(x_md):
        once = round_to_fp8(x_md)
        return once, round_to_fp8(once)

    once, again = twice(some_rows(dtype))
    expected = definition.rounded(some_rows(dtype), name, block)
    np.testing.assert_array_equal(np.asarray(once, np.float64), expected)
    np.testing.assert_array_equal(again, once)
    np.testing.assert_array_equal(once.astype(jnp.bfloat16).astype(once.dtype), once)


def test_a_barrier_keeps_compilers_from_dropping_the_rounding():
    """XLA dropped the rounding in a program compiled for a GPU, but not for a CPU."""
    equations = jax.make_jaxpr(fp8.round_rows)(some_rows()).eqns
    inputs = [e.invars for e in equations if e.primitive.name == "optimization_barrier"]
    assert [var.aval.dtype for vars_ in inputs for var in vars_] == [fp8.FORWARD_DTYPE]


@pytest.mark.parametrize("name", FORMATS)
def test_a_largest_value_at_the_edge_of_the_format(name):
    """The scale doubles where the largest value exceeds the largest of the format."""
    edge = float(ml_dtypes.finfo(definition.FORMATS[name]).max)
    largest = np.float32([edge, np.nextafter(np.float32(edge), np.float32(np.inf))])
    _, scale = quantize(largest[:, None], fp8.GRADIENT_DTYPES[name], fp8.ROW_BLOCK)
    np.testing.assert_array_equal(scale[:, 0], [1, 2])


def test_a_matrix_and_its_transpose_have_the_same_values():
    w_gdf = some_rows().reshape(1, 6, 300)
    values, scale = quantize(w_gdf, fp8.FORWARD_DTYPE, fp8.MATRIX_BLOCK)
    turned = quantize(jnp.swapaxes(w_gdf, 1, 2), fp8.FORWARD_DTYPE, fp8.MATRIX_BLOCK)
    same = jax.tree.map(lambda a: jnp.swapaxes(a, 1, 2), fp8.Quantized(values, scale))
    for a, b in zip(turned, same, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), b.astype(np.float32))


def test_zeros_and_what_is_all_but_zero():
    """Zeros stay zero, and a block far below 5e-17 becomes zero."""
    x_md = jnp.tile(jnp.float32([[0.0], [1e-40], [1e-30], [2.0**-80]]), (1, 128))
    values, scale = quantize(x_md, fp8.FORWARD_DTYPE, fp8.ROW_BLOCK)
    assert np.all(scale == 2.0**fp8.MIN_EXPONENT)
    assert np.all(values.astype(jnp.float32) == 0)


@pytest.mark.parametrize(("name", "bad"), [("e4m3", -np.inf), ("e5m2", np.nan)])
def test_what_is_not_finite_is_seen_in_all_of_its_block(name, bad):
    x_md = some_rows().at[2, 130].set(bad)
    result = np.asarray(round_rows(x_md, fp8.GRADIENT_DTYPES[name]))
    is_bad = np.zeros((6, 300), bool)
    is_bad[2, 128:256] = True
    np.testing.assert_array_equal(np.isnan(result), is_bad)
    same = np.asarray(round_rows(some_rows(), fp8.GRADIENT_DTYPES[name]))
    np.testing.assert_array_equal(result[~is_bad], same[~is_bad])


def test_float16_ends_before_the_next_power_of_two():
    """65504 rounds to 65536, which float16 cannot represent, so the result is
    float32."""
    result = round_rows(np.full((1, 4), 65504, np.float16))
    assert result.dtype == jnp.float32
    assert np.all(result == 65536)


def operands(dtype):
    """Return x_md, w_gdf and dy_mf, with rows that differ in size."""
    random = np.random.default_rng(1)
    size_m1 = np.exp(random.standard_normal((ROWS, 1)))
    arrays = (
        size_m1 * random.standard_normal((ROWS, D)),
        random.standard_normal((GROUPS, D, F)) / D**0.5,
        size_m1 * random.standard_normal((ROWS, F)),
    )
    return [jnp.asarray(a, dtype) for a in arrays]


@functools.partial(jax.jit, static_argnames=("implementation", "name"))
def value_and_grads(x_md, w_gdf, dy_mf, rows_g, implementation, name):
    def dot(x_md, w_gdf):
        options = {"implementation": implementation, "fp8": name}
        return grouped_dot(x_md, w_gdf, rows_g, **options)

    y_mf, vjp = jax.vjp(dot, x_md, w_gdf)
    return y_mf, *vjp(dy_mf)


def by_definition(x_md, w_gdf, dy_mf, rows_g, name):
    return (
        definition.forward(x_md, w_gdf, rows_g),
        definition.dgrad(dy_mf, w_gdf, rows_g, name),
        definition.wgrad(x_md, dy_mf, rows_g),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "name", "dtype"),
    [
        ("blocked", "e5m2", "bfloat16"),
        ("xla", "e4m3", "float16"),
        ("reference", "e5m2", "float32"),
    ],
)
def test_products_are_those_of_rounded_arrays(implementation, name, dtype):
    """dx comes from dy rounded to the named format; dw from x and dy as they are. NaN
    in padding reaches nothing."""
    x_md, w_gdf, dy_mf = operands(dtype)
    rows_g = make_rows("with_empty", OWNED, GROUPS, seed=0)
    dirty_md, dirty_mf = (a.at[OWNED:].set(jnp.nan) for a in (x_md, dy_mf))
    args = dirty_md, w_gdf, dirty_mf, rows_g
    result = value_and_grads(*args, implementation, name)
    assert {leaf.dtype for leaf in result} == {jnp.dtype(dtype)}
    assert_close(result, by_definition(x_md, w_gdf, dy_mf, rows_g, name))


def test_a_row_that_is_not_finite_shows_in_its_results_and_gradients():
    """A step must see the value, so that it can skip the update."""
    x_md, w_gdf, dy_mf = operands("float32")
    rows_g = make_rows("uniform", OWNED, GROUPS, seed=0)
    x_md, dy_mf = x_md.at[0, 3].set(np.inf), dy_mf.at[1, 5].set(np.nan)
    y_mf, dx_md, dw_gdf = value_and_grads(x_md, w_gdf, dy_mf, rows_g, "blocked", "e4m3")
    for out, row in ((y_mf, 0), (dx_md, 1)):
        is_bad = ~np.isfinite(out)
        assert is_bad[row].all()
        assert is_bad.sum() == is_bad[row].sum()
    assert not np.isfinite(dw_gdf[0]).all()
    assert np.isfinite(dw_gdf[1:]).all()


def test_swiglu_is_made_of_such_products():
    x_md, into_gdh, _ = operands("bfloat16")
    rows_g = make_rows("zipf", ROWS, GROUPS, seed=1)

    @jax.jit
    def both(x_md, into_gdh):
        down_gfd = jnp.swapaxes(into_gdh[:, :, : F // 2], 1, 2)
        options = {"implementation": "reference", "fp8": "e5m2"}
        p = products("reference", None, "e5m2")
        h_mf, _ = p.swiglu(x_md, into_gdh, rows_g)
        y_md = grouped_swiglu(x_md, into_gdh, down_gfd, rows_g, **options)
        return y_md, p.forward(h_mf, down_gfd, rows_g)

    np.testing.assert_array_equal(*both(x_md, into_gdh))


def test_bad_options():
    x_md, w_gdf, _ = operands("float32")
    rows_g = make_rows("uniform", OWNED, GROUPS, seed=0)
    with pytest.raises(ValueError, match="fp8='e3m4' is not one of none, e4m3, e5m2"):
        grouped_dot(x_md, w_gdf, rows_g, fp8="e3m4")
    x_md, w_gdf = (a.astype(jnp.int32) for a in (x_md, w_gdf))
    with pytest.raises(ValueError, match="rounds arrays of float32, bfloat16, float16"):
        grouped_dot(x_md, w_gdf, rows_g, fp8="e4m3")
