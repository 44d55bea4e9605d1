"""Tokens one by one, with a cache, are what they are all at once; how one is drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.decoding import CFG, LENGTHS, TOTAL, one_by_one, tokens
from tests.support.plain_model import network
from train.eval.decoding import Sampling, sample_tokens


def all_at_once(cfg):
    """The same hidden states from one pass over all tokens, without a cache."""
    ours = network(cfg)
    hidden_btd = jax.jit(ours.apply)(ours.params, tokens())[0]
    at_bt = LENGTHS[:, None] - 1 + np.arange(TOTAL - max(LENGTHS) + 1)
    return jnp.take_along_axis(hidden_btd, at_bt[..., None], axis=1)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Topology(), marks=pytest.mark.long, id="one device"),
        pytest.param(Topology(data=2, expert=4), id="eight devices"),
    ],
)
def test_one_by_one_is_all_at_once(mesh):
    """Prompts of different lengths in one batch, a dense prefix, cycles of two, and
    more tokens than a training window has."""
    assert_close(
        one_by_one(dataclasses.replace(CFG, mesh=mesh)),
        all_at_once(CFG),
        factor=3,
        reason="five layers, each summed in another order",
    )


def draw(logits_bv, position_b, **how):
    return np.asarray(jax.jit(sample_tokens)(logits_bv, position_b, Sampling(**how)))


def test_a_draw_follows_the_shares_of_the_likeliest():
    """Over many positions; and of those that add up to top_p, no other is drawn."""
    share_v = np.array([0.05, 0.5, 0.15, 0.3])
    num = 20_000
    logits_bv = np.tile(np.log(share_v), (num, 1)).astype(np.float32)
    position_b = np.arange(num)
    for top_p, is_in_v in (
        (1.0, [1, 1, 1, 1]),
        (0.7, [0, 1, 0, 1]),
        (0.5, [0, 1, 0, 0]),
    ):
        kept_v = share_v * is_in_v / (share_v * is_in_v).sum()
        token_b = draw(logits_bv, position_b, temperature=1.0, top_p=top_p)
        found_v = np.bincount(token_b, minlength=4) / num
        assert (found_v[kept_v == 0] == 0).all()
        # Four standard deviations of the mean of 20,000 draws are below 0.015.
        assert np.abs(found_v - kept_v).max() < 0.015


def test_a_temperature_divides_logits_and_zero_takes_the_likeliest():
    random = np.random.default_rng(0)
    logits_bv = random.standard_normal((50, 16)).astype(np.float32)
    position_b = np.arange(50)
    warm = draw(logits_bv, position_b, temperature=0.5)
    np.testing.assert_array_equal(
        warm, draw(2 * logits_bv, position_b, temperature=1.0)
    )
    assert (warm != logits_bv.argmax(axis=1)).any()
    for how in (
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 1.0, "top_p": 1e-9},
    ):
        found = draw(logits_bv, position_b, **how)
        np.testing.assert_array_equal(found, logits_bv.argmax(axis=1))


def test_a_draw_knows_its_own_row_its_position_and_the_seed():
    random = np.random.default_rng(0)
    logits_bv = random.standard_normal((8, 64)).astype(np.float32)
    position_b = np.array([3, 9, 1, 3, 4, 5, 6, 7])
    how = {"temperature": 1.0, "top_p": 0.95}
    together = draw(logits_bv, position_b, **how)
    alone = [
        draw(logits_bv[i : i + 1], position_b[i : i + 1], **how)[0] for i in range(8)
    ]
    np.testing.assert_array_equal(together, alone)
    assert (together != draw(logits_bv, position_b + 1, **how)).any()
    assert (together != draw(logits_bv, position_b, seed=1, **how)).any()
