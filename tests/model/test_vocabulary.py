"""Compare the embedding on meshes of every shape with a lookup in the whole table."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import axes
from moejax.model.vocabulary import BLOCK, COLUMNS, Slices, embed, sum_rows
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.primitives import equations

B, T, D = 8, 20, 16
WIDE = 2 * COLUMNS + 65
"""A width that COLUMNS does not divide, and whose parts need padding."""
MESHES = {
    "one device": Topology(),
    "tensor": Topology(data=2, expert=2, tensor=2),
    "dc": Topology(dc=2, data=2, expert=2),
}


def value_and_grad(lookup, table_vd, tokens_bt):
    """Return the rows of the tokens, and the gradient of a function of them."""

    def function(table_vd):
        x_btd = lookup(table_vd, tokens_bt)
        return jnp.sum(jnp.sin(x_btd * jnp.arange(D)).astype(table_vd.dtype)), x_btd

    (_, x_btd), grad_vd = jax.value_and_grad(function, has_aux=True)(table_vd)
    return x_btd, grad_vd


@pytest.mark.parametrize(
    ("name", "v"),
    [("one device", 37), ("tensor", 37), ("dc", 5)],
)
def test_rows_and_gradient_are_those_of_the_whole_table(name, v):
    """Rows are equal bit for bit, in bfloat16 too. v = 37 and 5 leave padding."""
    topology = MESHES[name]
    mesh = axes.make_mesh(topology, jax.devices()[: topology.num_devices])
    random = np.random.default_rng(v)
    tokens_bt = random.integers(0, v, (B, T)).astype(np.int32)
    tokens_bt = jax.device_put(tokens_bt, axes.sharding(mesh, axes.BATCH_AXES))

    def split(dtype):
        return lambda table_vd, *args: embed(table_vd, *args, Slices(mesh, v), dtype)

    def plain(table_vd, tokens_bt):
        return table_vd[tokens_bt]

    with jax.enable_x64(True):
        table_vd = jax.device_put(random.standard_normal((v, D)), axes.sharding(mesh))
        args = table_vd, tokens_bt
        actual = jax.jit(partial(value_and_grad, split(jnp.float64)))(*args)
        expected = jax.jit(partial(value_and_grad, plain))(*args)
        np.testing.assert_array_equal(actual[0], expected[0])
        assert_close(actual, expected)
    few_btd = jax.jit(split(jnp.bfloat16))(table_vd.astype(jnp.float32), tokens_bt)
    expected_btd = jnp.asarray(table_vd, jnp.bfloat16)[tokens_bt]
    np.testing.assert_array_equal(few_btd, expected_btd)


@pytest.mark.parametrize(
    "rows",
    [
        [3] * 31 + [4] + [5] * 97,
        [2] * 32 + [1] * 32 + [6] * 64,
        [5],
        np.random.default_rng(0).zipf(1.5, 333) % 8 - 1,
    ],
    ids=["a row at the end of a block", "whole blocks", "one", "random"],
)
def test_sum_rows_is_a_sum(rows):
    """Rows that fill blocks, span several, or have no x have the sums of the
    definition."""
    row_m = np.asarray(rows, np.int32)
    x_md = np.random.default_rng(1).standard_normal((len(row_m), WIDE))
    x_md = x_md.astype(np.float32)
    expected_vd = np.stack([x_md[row_m == v].sum(axis=0) for v in range(7)])
    assert_close(jax.jit(sum_rows, static_argnums=2)(x_md, row_m, 7), expected_vd)


def test_many_rows_are_summed_in_larger_blocks():
    """So that the product of blocks with blocks stays as small as that in a block."""
    m = 120_000
    random = np.random.default_rng(2)
    row_m = (random.zipf(1.3, m) % 500 - 1).astype(np.int32)
    x_md = random.integers(-8, 9, (m, 3)).astype(np.float32)  # sums are exact
    expected_vd = np.stack([x_md[row_m == v].sum(axis=0) for v in range(499)])
    traced = jax.jit(sum_rows, static_argnums=2).trace(x_md, row_m, 499)
    largest = max(
        variable.aval.size
        for eqn, _ in equations(traced.jaxpr)
        for variable in eqn.outvars
    )
    assert largest <= 2 * BLOCK * (m + 2 * BLOCK)
    sums_vd = traced.lower().compile()(x_md, row_m)
    np.testing.assert_array_equal(sums_vd, expected_vd)


def test_the_memory_of_a_sum_does_not_depend_on_divisors_of_the_width():
    """A width that COLUMNS does not divide takes no more than the next one that it
    does."""

    def temporaries(d):
        args = jax.ShapeDtypeStruct((4096, d), jnp.float32), jnp.zeros(4096, jnp.int32)
        compiled = jax.jit(sum_rows, static_argnums=2).lower(*args, 32).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2 * COLUMNS + 64) <= temporaries(3 * COLUMNS)
