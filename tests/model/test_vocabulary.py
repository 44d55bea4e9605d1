"""Compare the embedding on meshes of every shape with a lookup in the whole table."""

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


@pytest.mark.parametrize(
    ("topology", "v"),
    [(Topology(data=2, expert=2, tensor=2), 37), (Topology(dc=2, data=2, expert=2), 5)],
    ids=["tensor", "dc"],
)
def test_rows_and_gradient_are_those_of_the_whole_table(topology, v):
    """Rows are equal bit for bit, in bfloat16 too. v = 37 and 5 leave padding."""
    mesh = axes.make_mesh(topology)
    random = np.random.default_rng(v)
    tokens_bt = random.integers(0, v, (B, T)).astype(np.int32)
    tokens_bt = jax.device_put(tokens_bt, axes.sharding(mesh, axes.BATCH_AXES))

    def loss(table_vd):
        x_btd = embed(table_vd, tokens_bt, Slices(mesh, v), jnp.float64)
        return jnp.sum(jnp.sin(x_btd * jnp.arange(D))), x_btd

    table_vd = random.standard_normal((v, D))
    with jax.enable_x64(True):
        placed_vd = jax.device_put(table_vd, axes.sharding(mesh))
        run = jax.jit(jax.grad(loss, has_aux=True))
        grad_vd, x_btd = jax.device_get(run(placed_vd))
    expected_btd = table_vd[tokens_bt]
    np.testing.assert_array_equal(x_btd, expected_btd)
    expected_vd = np.zeros((v, D))
    slope_btd = np.cos(expected_btd * np.arange(D)) * np.arange(D)
    np.add.at(expected_vd, np.asarray(tokens_bt), slope_btd)
    assert_close(grad_vd, expected_vd)
    rounded_btd = embed(
        jnp.asarray(table_vd, jnp.float32), tokens_bt, Slices(mesh, v), jnp.bfloat16
    )
    np.testing.assert_array_equal(
        rounded_btd, jnp.asarray(table_vd, jnp.float32).astype(jnp.bfloat16)[tokens_bt]
    )


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
