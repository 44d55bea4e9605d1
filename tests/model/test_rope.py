"""Test the scaling of RoPE's frequencies, and partial rotation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Rope
from moejax.model.rope import rope, rotation, scaled_frequencies
from tests.support.close import assert_close

DIM, THETA, LENGTH = 64, 10_000.0, 4096
PLAIN_J = THETA ** (-np.arange(0, DIM, 2) / DIM)
ROTATIONS_J = LENGTH * PLAIN_J / (2 * np.pi)
"""Rotations of each pair within the original length."""


def test_linear_scaling_compresses_positions():
    scaling = Rope(scaling="linear", factor=4.0)
    position_bt = jnp.arange(12)[None]
    scaled = rotation(4 * position_bt, DIM, THETA, scaling)
    assert_close(scaled, rotation(position_bt, DIM, THETA, Rope()))


@pytest.mark.parametrize("kind", ["yarn", "yarn, not truncated", "llama3"])
def test_high_frequencies_are_kept_and_low_ones_divided(kind):
    """Pairs that rotate more than 32 times within the original length are kept, and
    those that rotate less than once are divided by 8. Between, YaRN's ramp is linear in
    the pair, from ends that are rounded outwards, and Llama-3's in the rotations."""
    scaling, pair_j = Rope(scaling="yarn", factor=8.0), np.arange(DIM // 2)
    ends = np.interp([-np.log(32), 0], -np.log(ROTATIONS_J), pair_j)
    if kind == "yarn":
        ends = np.floor(ends[0]), np.ceil(ends[1])
    expected_j = np.interp(pair_j, ends, [1, 1 / 8])
    if kind == "yarn, not truncated":
        scaling = dataclasses.replace(scaling, truncate=False)
    if kind == "llama3":
        scaling = Rope(
            scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=32.0
        )
        expected_j = np.interp(ROTATIONS_J, [1, 32], [1 / 8, 1])
    share_j = scaled_frequencies(DIM, THETA, scaling) / PLAIN_J
    np.testing.assert_allclose(share_j, expected_j)


@pytest.mark.parametrize(
    "scaling",
    [
        Rope(scaling="yarn", factor=8.0, beta_fast=1.0, beta_slow=1.0),
        Rope(scaling="yarn", factor=8.0, beta_fast=1.0, beta_slow=1.0, truncate=False),
        Rope(scaling="llama3", factor=8.0, high_freq_factor=1.0),
    ],
    ids=["yarn, as Kimi-K2", "yarn, not truncated", "llama3, as Llama-4 Scout"],
)
def test_nothing_is_interpolated_between_equal_ends(scaling):
    """Where both ends are one rotation, pairs that rotate more often are kept, and the
    others are divided."""
    share_j = scaled_frequencies(DIM, THETA, scaling) / PLAIN_J
    np.testing.assert_allclose(share_j, np.where(ROTATIONS_J > 1, 1, 1 / 8))


def test_factors_of_yarn():
    """m(s) = 0.1 s ln(factor) + 1 by hand, for factor = e**10."""
    factor = float(np.exp(10))
    plain = Rope(scaling="yarn", factor=factor)
    assert plain.attention_factor() == pytest.approx(2)
    assert plain.softmax_factor() == 1
    both = Rope(scaling="yarn", factor=factor, mscale=1.0, mscale_all_dim=0.5)
    assert both.attention_factor() == pytest.approx(2 / 1.5)
    assert both.softmax_factor() == pytest.approx(1.5**2)
    assert Rope().attention_factor() == Rope().softmax_factor() == 1


def test_the_rest_of_a_head_is_not_rotated():
    x_bthi = np.random.default_rng(0).standard_normal((2, 5, 3, 12)).astype(np.float32)
    angles = rotation(jnp.arange(5)[None], 8, 100.0, Rope())
    turned_bthi = rope(x_bthi, angles)
    np.testing.assert_array_equal(turned_bthi[..., 8:], x_bthi[..., 8:])
    np.testing.assert_array_equal(turned_bthi[..., :8], rope(x_bthi[..., :8], angles))
    assert rope(jnp.asarray(x_bthi, jnp.bfloat16), angles).dtype == jnp.bfloat16
