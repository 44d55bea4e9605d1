"""Tokens one by one, with a cache, are what they are all at once; how one is drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Config, Data, Model, Moe, Train
from moejax.model.cache import Cache
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.plain_model import network
from train.eval.decoding import Sampling, choose
from train.layouts import exact_layout

B, SEQ_LEN, PROMPT, TOTAL = 8, 6, 4, 9
LENGTHS = np.array([4, 1, 3, 2, 4, 2, 1, 3])
"""Of the prompts; rows end up longer than SEQ_LEN."""
CFG = Config(
    model=Model(
        vocab_size=32, d_model=16, num_layers=5, num_heads=4, num_kv_heads=2,
        head_dim=8, d_ff=24, first_k_dense=1, moe_every=2, qk_norm="full",
        rope_theta=100.0, compute_dtype="float32",
    ),
    moe=Moe(num_experts=4, top_k=2, d_expert=8, num_shared_experts=1),
    data=Data(seq_len=SEQ_LEN),
    train=Train(batch_size=B, loss_chunk=SEQ_LEN),
)  # fmt: skip


def tokens():
    return np.random.default_rng(0).integers(0, 32, (B, TOTAL)).astype(np.int32)


def one_by_one(cfg):
    """Hidden states [b, step, d]: of the last token of a prompt, then of each more."""
    ours = network(cfg)

    def extend(params, token_bt, position_bt, cache):
        layout = exact_layout(cfg, *token_bt.shape)
        return ours.extend(params, token_bt, position_bt, cache, layout)

    run = jax.jit(extend)
    token_bt = np.zeros((B, PROMPT), np.int32)
    position_bt = np.full((B, PROMPT), -1, np.int32)
    for row, length in enumerate(LENGTHS):
        token_bt[row, PROMPT - length :] = tokens()[row, :length]
        position_bt[row, PROMPT - length :] = np.arange(length)
    cache = Cache.empty(cfg.model, B, capacity=16)
    hidden_btd, cache = run(ours.params, token_bt, position_bt, cache)
    found = [hidden_btd[:, -1]]
    for more in range(TOTAL - max(LENGTHS)):
        position_b1 = (LENGTHS + more)[:, None]
        token_b1 = np.take_along_axis(tokens(), position_b1, axis=1)
        hidden_b1d, cache = run(ours.params, token_b1, position_b1, cache)
        found.append(hidden_b1d[:, 0])
    assert cache.num_tokens == PROMPT + TOTAL - max(LENGTHS)
    return jnp.stack(found, axis=1)


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
    return np.asarray(jax.jit(choose)(logits_bv, position_b, Sampling(**how)))


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
