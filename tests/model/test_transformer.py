"""Test the decoder: it equals its formulas, is causal, and has the configured
layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import config
from moejax.config import Config, Data, Model, Moe, Rope, Router, Train
from moejax.model.rope import rope, rotation
from moejax.model.routed import RoutingMode
from moejax.model.transformer import StepInputs
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
PLAIN = Config(
    model=dataclasses.replace(
        SMALL, qk_norm="head", tie_embeddings=False, num_kv_heads=1
    ),
    moe=Moe(num_experts=4, top_k=1, d_expert=8),
    router=Router(kind="sigmoid", gate_scale=2.5, normalise_gates=False),
    data=DATA,
    train=TRAIN,
)


PATTERN = Config(
    model=dataclasses.replace(
        SMALL, num_layers=4, first_k_dense=1, layers=("moe", "dense", "moe"),
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
    [MIXED, PATTERN, pytest.param(PLAIN, marks=pytest.mark.slow)],
    ids=["mixed", "pattern", "plain"],
)
def test_equals_its_formulas(cfg):
    """The logits equal those of the plain formulas.

    The models cover dense prefix, cycles with one and two MoE layers, shared experts,
    grouped queries, both QK-norms, RoPE, layers without it, with a window or with
    chunks, tied and untied embeddings, softmax and sigmoid gates, and rows of several
    documents.
    """
    ours = network(cfg)
    windows = tokens(), positions()
    hidden_btd, _, head_vd = ours.jit(ours.params, *windows)
    expected = jax.jit(lambda *args: plain_model.logits(cfg, *args))
    assert_close(
        hidden_btd @ head_vd.T,
        expected(ours.params, *windows),
        factor=3,
        reason="up to five layers, each summed in another order",
    )


@pytest.mark.parametrize("position", [1, 4])
def test_no_hidden_state_depends_on_a_later_token(position):
    """Hidden states are equal bit for bit when a later token changes, so that routing
    too depends on the past alone. Row 1 begins a document at position 1."""
    ours = network(MIXED)
    before, after = tokens(), tokens()
    after[:, position] = (after[:, position] + 1) % SMALL.vocab_size
    hidden_btd, again_btd = (
        np.asarray(ours.jit(ours.params, each, positions())[0])
        for each in (before, after)
    )
    is_other_bt = (hidden_btd != again_btd).any(axis=-1)
    assert is_other_bt[:, position].all()
    assert not is_other_bt[:, :position].any()


def test_rope_depends_on_relative_positions_only():
    random = np.random.default_rng(0)
    q_bthi, k_bthi = random.standard_normal((2, 1, 5, 2, 8)).astype(np.float32)

    def scores(first):
        turn = rotation(first + jnp.arange(5)[None], 8, 100.0, Rope())
        q, k = (rope(y, turn) for y in (q_bthi, k_bthi))
        return jnp.einsum("bthi,bshi->bhts", q, k)

    assert_close(scores(40), scores(0), factor=3, reason="angles are 40 radians large")
    still = jnp.einsum("bthi,bshi->bhts", q_bthi, k_bthi)
    off_diagonal = ~np.eye(5, dtype=bool)
    difference = np.abs(scores(0) - still)
    assert difference[..., off_diagonal].min() > 1e-4
    assert_close(
        jnp.diagonal(scores(0), axis1=2, axis2=3),
        jnp.diagonal(still, axis1=2, axis2=3),
    )


def test_rope_keeps_norms_and_dtype():
    x_bthi = np.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype(np.float32)
    turn = rotation(jnp.arange(5)[None], 8, 10_000.0, Rope())
    turned_bthi = rope(x_bthi, turn)
    norms = (jnp.linalg.norm(y, axis=-1) for y in (turned_bthi, x_bthi))
    assert_close(*norms)
    assert rope(jnp.asarray(x_bthi, jnp.bfloat16), turn).dtype == jnp.bfloat16


def test_layers_are_where_the_rule_puts_them():
    """The model has one dense layer, then two cycles of a dense and an MoE layer;
    shared experts are in the block of the routed ones."""
    params = network(MIXED).params
    d = SMALL.d_model
    assert params["prefix"]["dense"]["gate_df"].shape == (1, d, 24)
    assert "moe" not in params["prefix"]
    dense, moe = params["cycles"]["blocks"].values()
    assert dense["dense"]["gate_df"].shape == (2, d, 24)
    assert "moe" not in dense
    assert moe["dense"]["gate_df"].shape == (2, d, 3 * 8)
    assert moe["moe"]["gate_edf"].shape == (2, 4, d, 8)
    (only,) = network(PLAIN).params["cycles"]["blocks"].values()
    assert "dense" not in only
    assert "prefix" not in network(PLAIN).params


def test_tied_embeddings_are_one_parameter():
    tied, untied = network(MIXED), network(PLAIN)
    assert "head_vd" not in tied.params
    np.testing.assert_array_equal(
        tied.jit(tied.params, tokens(), positions())[2], tied.params["embed_vd"]
    )
    np.testing.assert_array_equal(
        untied.jit(untied.params, tokens(), positions())[2], untied.params["head_vd"]
    )
    assert not (untied.params["head_vd"] == untied.params["embed_vd"]).any()


def test_hidden_states_are_bfloat16_and_sums_of_the_router_float32():
    """Hidden states and head have the compute dtype; sums that the router's losses are
    made of are float32."""
    model = dataclasses.replace(MIXED.model, compute_dtype="bfloat16")
    ours = network(dataclasses.replace(MIXED, model=model))
    hidden, sums, head = jax.eval_shape(ours.apply, ours.params, tokens())
    assert hidden.dtype == head.dtype == jnp.bfloat16
    assert sums.prob_e.dtype == sums.z.dtype == jnp.float32
    assert sums.tokens_e.dtype == jnp.int32
    assert sums.tokens_e.shape == (2, 1, 4)


@pytest.mark.long
def test_jitter_is_the_same_noise_on_one_device_and_on_eight():
    """Jitter is drawn for the global batch, so that it does not depend on the mesh;
    another key gives other noise."""
    cfg = dataclasses.replace(PLAIN, moe=Moe(num_experts=8, top_k=2, d_expert=8))
    runs = {}
    for mesh in (Topology(), Topology(data=2, expert=4)):
        ours = network(dataclasses.replace(cfg, mesh=mesh))

        def noisy(params, seed, ours=ours):
            step_inputs = StepInputs(jax.random.key(seed), None, RoutingMode(0.5))
            hidden_btd, sums, _ = ours.apply(params, tokens(), step_inputs=step_inputs)
            return hidden_btd, jnp.sum(sums.tokens_e, axis=1)

        run = jax.jit(noisy)
        runs[mesh] = [run(ours.params, seed) for seed in (0, 1)]
    one, eight = runs.values()
    assert_close(eight, one)
    assert (one[0][1] != one[1][1]).any()
