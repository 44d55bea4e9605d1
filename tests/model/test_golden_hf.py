"""Tiny models of published architectures compute what transformers computes."""

import jax
import numpy as np
import pytest

from moejax.model.cache import Cache
from moejax.moe import route as routing
from tests.support.golden_hf import case
from tests.support.plain_model import network
from tests.support.resolved import make_run

NAMES = [
    "mixtral", "olmoe", "qwen3_moe", "ernie4_5_moe",
    "granitemoe", "olmoe_clip", "glm4_moe",
    "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "moonlight",
    "qwen2_moe", "gpt_oss", "llama4_text",
]  # fmt: skip
CACHED = [pytest.param(name, marks=pytest.mark.long) for name in NAMES]
pytestmark = pytest.mark.golden


@pytest.mark.parametrize("name", NAMES)
def test_logits_routes_and_loss(name, monkeypatch):
    """In float32, logits agree within 1e-5, expert ids are equal, and the loss agrees
    within 1e-6."""
    cfg, params, bias, expected = case(name)
    chosen, choose = [], routing.choose_experts

    def recorded(*args):
        expert_nk = choose(*args)
        jax.debug.callback(lambda ids: chosen.append(np.asarray(ids)), expert_nk)
        return expert_nk

    monkeypatch.setattr(routing, "choose_experts", recorded)
    ours = network(cfg)
    run = jax.jit(lambda *args: ours.apply(*args, bias=bias))
    hidden_btd, _, head_vd = run(params, expected["input_ids"])
    jax.effects_barrier()
    logits_btv = hidden_btd @ head_vd.T
    assert np.abs(logits_btv - expected["logits"]).max() < 1e-5
    # A correction bias orders choices, and the stored ones are ordered by their gates.
    np.testing.assert_array_equal(np.sort(chosen), np.sort(expected["expert_ids"]))
    assert (
        abs(mean_nats(logits_btv, expected["input_ids"]) / expected["ce_loss"] - 1)
        < 1e-6
    )


def mean_nats(logits_btv, tokens_bt) -> float:
    """Return the mean loss of the next tokens, in float64."""
    logits_btv = np.asarray(logits_btv, np.float64)[:, :-1]
    of_targets_bt1 = np.take_along_axis(logits_btv, tokens_bt[:, 1:, None], axis=2)
    return np.mean(np.log(np.exp(logits_btv).sum(-1)) - of_targets_bt1[..., 0])


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_gives_the_same_logits(name):
    """A prompt of 20 tokens, and then one token at a time, give the logits of the whole
    window within 1e-5."""
    cfg, params, bias, expected = case(name)
    ours, tokens_bt = network(cfg), expected["input_ids"]
    b, t = tokens_bt.shape

    @jax.jit
    def extend(params, token_bt, position_bt, cache):
        layout = make_run(cfg).exact_layout(*token_bt.shape)
        args = params, token_bt, position_bt, cache, layout
        return ours.extend(*args, bias=bias)

    cache, hidden = Cache.empty(cfg.network, b, t), []
    for start, end in [(0, 20), *((i, i + 1) for i in range(20, t))]:
        position_bt = np.tile(np.arange(start, end, dtype=np.int32), (b, 1))
        new_btd, cache = extend(params, tokens_bt[:, start:end], position_bt, cache)
        hidden.append(new_btd)
    head_vd = params["embed_vd" if cfg.model.tie_embeddings else "head_vd"]
    logits_btv = np.concatenate(hidden, axis=1) @ head_vd.T
    assert np.abs(logits_btv - expected["logits"]).max() < 1e-5
