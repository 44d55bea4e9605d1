"""Test the definitions of the doctor: periodic ones against products of whole arrays,
and attention and 8-bit values against the references of the kernels."""

import jax
import ml_dtypes
import numpy as np
import pytest

from moejax.kernels.attention import attention
from moejax.kernels.grouped_dot.fp8 import GRADIENT_DTYPES, round_rows
from tests.support.close import assert_close
from train.doctor import definitions
from train.doctor.products import group_sizes

RNG = np.random.default_rng(0)


def test_a_periodic_product_is_that_of_the_whole_arrays():
    x_rp, w_gpq = RNG.normal(size=(5, 7)), RNG.normal(size=(2, 7, 3))
    group_r, d = np.array([0, 1, 1, 0, 1]), 17
    whole = np.arange(d) % 7
    expected = np.stack([x[whole] @ w_gpq[g][whole] for x, g in zip(x_rp, group_r)])
    assert_close(definitions.dot(x_rp, w_gpq, group_r, d), expected)
    narrow = np.arange(4)
    expected = np.stack(
        [x[narrow] @ w_gpq[g][narrow] for x, g in zip(x_rp[:, :4], group_r)]
    )
    assert_close(definitions.dot(x_rp[:, :4], w_gpq[:, :4], group_r, 4), expected)


def test_outer_products_are_summed_by_group():
    x_rp, dy_rq = RNG.normal(size=(4, 3)), RNG.normal(size=(4, 2))
    group_r = np.array([0, 0, 2, 2])
    found = definitions.outer(x_rp, dy_rq, group_r, 3)
    assert_close(found[0], x_rp[:2].T @ dy_rq[:2])
    assert_close(found[1], np.zeros((3, 2)))
    assert_close(found[2], x_rp[2:].T @ dy_rq[2:])


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_rounding_is_that_of_the_kernels(fp8):
    values = RNG.normal(size=(4, 256)).astype(ml_dtypes.bfloat16)
    expected = jax.jit(round_rows, static_argnums=1)(values, GRADIENT_DTYPES[fp8])
    found = definitions.rounded(values.astype(np.float64), fp8)
    error = np.abs(found - np.asarray(expected, np.float64)).max()
    assert error < 1e-4, "only tiny values of a block may differ"
    assert np.array_equal(definitions.rounded(values, "none"), values)


def test_the_gradient_of_swiglu():
    gate, up, dh = RNG.normal(size=(3, 5)).astype(np.float32)
    expected = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)[1](dh)
    assert_close(definitions.swiglu_gradient(dh, gate, up), expected, dtype=np.float32)
    assert_close(definitions.swiglu(gate, up), jax.nn.silu(gate) * up, dtype=np.float32)


def test_attention_within_documents():
    shapes = [(2, 12, 4, 3), (2, 12, 2, 3), (2, 12, 2, 3)]
    qkv = [RNG.normal(size=shape).astype(np.float32) for shape in shapes]
    dout = RNG.normal(size=shapes[0]).astype(np.float32)
    first_bt = np.int32([[0] * 12, [0] * 5 + [5] + [6] * 6])

    @jax.jit
    def reference(*qkv):
        def call(*qkv):
            return attention(*qkv, first_bt, implementation="reference")

        out, back = jax.vjp(call, *qkv)
        return out, *back(dout)

    found = definitions.attention(*qkv, first_bt, dout)
    assert_close(found, reference(*qkv), dtype=np.float32)


@pytest.mark.parametrize(
    ("num_groups", "num_rows", "align_rows", "expected"),
    [
        (1, 512, 1, [[65], [0], [1], [7]]),
        (4, 512, 1, [[65, 0, 1, 7]]),
        (6, 512, 1, [[65, 0, 1, 7, 0, 9]]),
        (4, 66, 1, [[65, 0, 1, 0]]),
        (2, 8, 1, [[8, 0], [1, 7]]),
        (6, 512, 64, [[128, 0, 64, 64, 0, 64]]),
        (4, 256, 128, [[128, 0, 128, 0]]),
    ],
)
def test_groups_have_all_sizes_that_fit(num_groups, num_rows, align_rows, expected):
    found = group_sizes(num_groups, num_rows, align_rows)
    assert [rows_g.tolist() for rows_g in found] == expected
