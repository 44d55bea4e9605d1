"""Test the decoder: it equals its formulas, is causal, and has the configured
layers."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import config
from moejax.config import Config, Data, Dispatch, Model, Moe, Router, Train
from moejax.model import routed
from moejax.plan.layout import Topology
from tests.support import plain_model
from tests.support.close import assert_close
from tests.support.plain_model import network

B, T = 8, 6
SMALL = Model(
    vocab_size=32, d_model=16, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8,
    d_ff=24, compute_dtype="float32",
)  # fmt: skip
DATA, TRAIN = Data(seq_len=T), Train(batch_size=B, loss_chunk=T)
MIXED = Config(
    model=dataclasses.replace(
        SMALL, num_layers=5, first_k_dense=1, moe_every=2, num_kv_heads=2,
        qk_norm="full", rope_theta=100.0,
    ),
    moe=Moe(num_experts=4, top_k=2, d_expert=8, num_shared_experts=3),
    data=DATA,
    train=TRAIN,
)  # fmt: skip
SHORTCUT = Config(
    mesh=Topology(data=2, expert=2),
    model=dataclasses.replace(
        SMALL, qk_norm="head", tie_embeddings=False, num_kv_heads=1, block="shortcut",
    ),
    moe=Moe(num_experts=4, top_k=1, d_expert=8, num_shared_experts=1),
    router=Router(kind="sigmoid", gate_scale=2.5, normalise_gates=False),
    dispatch=Dispatch(buffer_factor=0.4),
    data=DATA,
    train=TRAIN,
)  # fmt: skip
"""Its buffers are so small that later rounds run."""


PATTERN = Config(
    model=dataclasses.replace(
        SMALL, num_layers=3, layers=("moe", "dense", "moe"),
    ),
    attention=config.Attention(
        layers=("sliding", "chunked", "nope"), sliding_window=2, chunk_size=3,
        temperature_scale=0.5, temperature_floor=2,
    ),
    moe=Moe(num_experts=4, top_k=2, d_expert=8, num_shared_experts=1),
    data=DATA,
    train=TRAIN,
)  # fmt: skip


def tokens():
    """Return random token ids [b, t]."""
    return np.random.default_rng(0).integers(0, SMALL.vocab_size, (B, T))


def positions():
    """Return positions [b, t] of one document a row, and of several in rows 0 and 1."""
    position_bt = np.tile(np.arange(T), (B, 1))
    position_bt[:2] = [0, 1, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4]
    return position_bt


@pytest.mark.parametrize(
    "cfg",
    [
        MIXED,
        PATTERN,
        pytest.param(SHORTCUT, marks=pytest.mark.slow),
    ],
    ids=["mixed", "pattern", "shortcut"],
)
def test_equals_its_formulas(cfg):
    """The logits equal those of the plain formulas.

    The models cover dense prefix, cycles with one and two MoE layers, shortcut layers,
    shared experts, grouped queries, both QK-norms, RoPE, layers without it, with a
    window or with chunks, tied and untied embeddings, softmax and sigmoid gates, and
    rows of several documents.
    """
    ours = network(cfg)
    windows = tokens(), positions()
    hidden_btd, _, head_vd = ours.jit(ours.params, *windows)
    logits = jax.jit(lambda *args: plain_model.logits(cfg, *args))
    assert_close(
        hidden_btd @ head_vd.T,
        logits(ours.params, *windows),
        factor=3,
        reason="up to five layers, each summed in another order",
    )


@pytest.mark.parametrize("position", [1, 4])
def test_no_hidden_state_depends_on_a_later_token_or_another_document(position):
    """Hidden states are equal bit for bit when a token before their document or behind
    them changes, so that routing too depends on the past of a document alone."""
    ours = network(MIXED)
    before, after = tokens(), tokens()
    after[:, position] = (after[:, position] + 1) % SMALL.vocab_size
    hidden_btd, again_btd = (
        np.asarray(ours.jit(ours.params, each, positions())[0])
        for each in (before, after)
    )
    document_bt = np.cumsum(positions() == 0, axis=1)
    is_same_bt = document_bt == document_bt[:, position, None]
    is_read_bt = is_same_bt & (np.arange(T) >= position)
    is_other_bt = (hidden_btd != again_btd).any(axis=-1)
    assert is_other_bt[:, position].all()
    assert not is_other_bt[~is_read_bt].any()
    assert is_other_bt[is_read_bt].mean() > 0.9


def test_hidden_states_are_bfloat16_and_sums_of_the_router_float32():
    """Hidden states and head have the compute dtype; sums that the router's losses are
    made of are float32."""
    model = dataclasses.replace(SHORTCUT.model, compute_dtype="bfloat16", num_layers=1)
    ours = network(dataclasses.replace(SHORTCUT, model=model))
    hidden, sums, head = jax.eval_shape(ours.apply, ours.params, tokens())
    assert hidden.dtype == head.dtype == jnp.bfloat16
    assert sums.prob_e.dtype == sums.z.dtype == jnp.float32
    assert sums.tokens_e.dtype == jnp.int32
    assert sums.tokens_e.shape == (1, 4, 4)


def test_jitter_is_drawn_for_the_global_batch_around_one(monkeypatch):
    """Jitter is drawn before the batch is split, so that no mesh changes it."""
    calls = []

    def called(params, inputs, *args, **kwargs):
        calls.append(inputs)

    monkeypatch.setattr(routed, "moe_layer_of_parts", called)
    layer, x_btd = SimpleNamespace(params=dict), jnp.zeros((8, 16, 32))
    for seed in (0, 1):
        inputs = routed.MoeInputs(None, key=jax.random.key(seed))
        options = routed.MoeOptions(None, routed.RoutingMode(jitter=0.25))
        routed.routed_experts(layer, inputs, (x_btd,), options)
    first, second = (inputs.jitter_btd for (inputs,) in calls)
    assert first.shape == x_btd.shape
    assert 0.75 <= first.min() < 0.76
    assert 1.24 < first.max() <= 1.25
    assert (first != second).mean() > 0.9
