"""Test that tokens are drawn with the right probabilities."""

import jax
import numpy as np
import pytest

from train.eval.decoding import Sampling, sample_tokens


def draw(logits_bv, position_b, **sampling):
    """Return the token that each row draws with these fields of Sampling."""
    return np.asarray(
        jax.jit(sample_tokens)(logits_bv, position_b, Sampling(**sampling))
    )


def test_draws_follow_the_probabilities_of_the_likeliest_tokens():
    """Tokens are drawn in proportion to their probabilities; only the likeliest tokens
    that add up to top_p are drawn."""
    share_v = np.array([0.05, 0.5, 0.15, 0.3])
    num = 20_000
    logits_bv = np.tile(np.log(share_v), (num, 1)).astype(np.float32)
    position_b = np.arange(num)
    for top_p, is_in_v in (
        (1.0, [1, 1, 1, 1]),
        (0.7, [0, 1, 0, 1]),
        (0.5, [0, 1, 0, 0]),
    ):
        expected_v = share_v * is_in_v / (share_v * is_in_v).sum()
        token_b = draw(logits_bv, position_b, temperature=1.0, top_p=top_p)
        drawn_v = np.bincount(token_b, minlength=4) / num
        assert (drawn_v[expected_v == 0] == 0).all()
        # Four standard deviations of the mean of 20,000 draws are below 0.015.
        assert np.abs(drawn_v - expected_v).max() < 0.015


def test_a_temperature_divides_logits_and_zero_takes_the_likeliest():
    random = np.random.default_rng(0)
    logits_bv = random.standard_normal((50, 16)).astype(np.float32)
    position_b = np.arange(50)
    warm = draw(logits_bv, position_b, temperature=0.5)
    np.testing.assert_array_equal(
        warm, draw(2 * logits_bv, position_b, temperature=1.0)
    )
    assert (warm != logits_bv.argmax(axis=1)).any()
    for sampling in (
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 1e-10},
        {"temperature": 1e-38},
        {"temperature": 1e-45},
        {"temperature": 1.0, "top_p": 1e-9},
    ):
        token_b = draw(logits_bv, position_b, **sampling)
        np.testing.assert_array_equal(token_b, logits_bv.argmax(axis=1))


def test_low_temperatures_draw_from_the_likeliest_tokens_alone():
    """The limit of the softmax gives equal shares to equal largest logits, and nothing
    to others, whatever the size of the logits."""
    num = 4_000
    logits_v = np.float32([3e4, -3e4, 3e4, 2.9e4])
    logits_bv, position_b = np.tile(logits_v, (num, 1)), np.arange(num)
    for temperature in (1e-3, 1e-10, 1e-37):
        token_b = draw(logits_bv, position_b, temperature=temperature)
        drawn_v = np.bincount(token_b, minlength=4) / num
        assert drawn_v[1] == drawn_v[3] == 0
        assert abs(drawn_v[0] - 0.5) < 0.04  # five standard deviations


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_no_number_draws_none(bad):
    logits_bv = np.zeros((3, 8), np.float32)
    logits_bv[1, 5] = bad
    for temperature in (0.0, 1.0):
        token_b = draw(logits_bv, np.arange(3), temperature=temperature)
        assert (token_b >= 0).tolist() == [True, False, True]


def test_a_draw_depends_on_its_own_row_its_position_and_the_seed():
    random = np.random.default_rng(0)
    logits_bv = random.standard_normal((8, 64)).astype(np.float32)
    position_b = np.array([3, 9, 1, 3, 4, 5, 6, 7])
    sampling = {"temperature": 1.0, "top_p": 0.95}
    together = draw(logits_bv, position_b, **sampling)
    alone = [
        draw(logits_bv[i : i + 1], position_b[i : i + 1], **sampling)[0]
        for i in range(8)
    ]
    np.testing.assert_array_equal(together, alone)
    assert (together != draw(logits_bv, position_b + 1, **sampling)).any()
    assert (together != draw(logits_bv, position_b, seed=1, **sampling)).any()
