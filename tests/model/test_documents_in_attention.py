"""Test that documents of one data window do not affect each other, unless joined."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Attention, Config, Data, Mla, Model, Moe, Train
from tests.support.close import assert_close
from tests.support.plain_model import network

LENGTHS = (5, 1, 6)
T = sum(LENGTHS)
B = len(LENGTHS)
SEPARATE = Config(
    model=Model(
        vocab_size=32, d_model=16, num_layers=3, num_heads=4, num_kv_heads=2,
        head_dim=8, d_ff=24, first_k_dense=1, qk_norm="head", rope_theta=100.0,
        compute_dtype="float32", attention="blocked",
    ),
    moe=Moe(num_experts=4, top_k=2, d_expert=8),
    data=Data(seq_len=T),
    train=Train(batch_size=B, loss_chunk=T),
)  # fmt: skip
JOINED = dataclasses.replace(SEPARATE, data=Data(seq_len=T, documents="joined"))
LATENT = dataclasses.replace(
    SEPARATE,
    model=dataclasses.replace(SEPARATE.model, num_kv_heads=4, qk_norm="none"),
    mla=Mla(
        kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5,
    ),
)  # fmt: skip
KINDS = dataclasses.replace(
    SEPARATE,
    model=dataclasses.replace(SEPARATE.model, first_k_dense=0),
    attention=Attention(
        layers=("sliding", "chunked", "nope"), sliding_window=3, chunk_size=4,
        temperature_scale=1.0, temperature_floor=2, sinks=True,
    ),
)  # fmt: skip
EDGES = np.cumsum((0, *LENGTHS))


def tokens():
    """Return random token ids [b, t]."""
    return np.random.default_rng(0).integers(0, 32, (B, T)).astype(np.int32)


def in_one_window():
    """Return tokens and positions with three documents in row 0 and one document in
    each other row."""
    position_bt = np.tile(np.arange(T), (B, 1))
    position_bt[0] = np.concatenate([np.arange(length) for length in LENGTHS])
    return tokens(), position_bt


def each_in_its_own():
    """Return tokens and positions with document i of row 0 at the start of row i; the
    tokens after it are ignored."""
    token_bt = tokens()
    for row, (first, last) in enumerate(itertools.pairwise(EDGES)):
        token_bt[row, : last - first] = tokens()[0, first:last]
    return token_bt, np.tile(np.arange(T), (B, 1))


def gradients_and_hidden(cfg, windows, is_in_loss_bt):
    """Return every gradient of a loss over the chosen tokens, and the hidden states."""
    ours = network(cfg)

    def loss(params, token_bt, position_bt, is_in_loss_bt):
        hidden_btd, _, head_vd = ours.apply(params, token_bt, position_bt)
        nats_bt = jax.nn.logsumexp(hidden_btd @ head_vd.T, axis=-1)
        return jnp.sum(jnp.where(is_in_loss_bt, nats_bt, 0.0)), hidden_btd

    run = jax.jit(jax.grad(loss, has_aux=True))
    return run(ours.params, *windows, is_in_loss_bt)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg",
    [LATENT, KINDS],
    ids=["latent", "windows, chunks and no positions"],
)
def test_a_window_of_three_documents_is_three_windows(cfg):
    """Three documents in one window have the hidden states and gradients of three
    windows."""
    is_first_row_bt = np.broadcast_to(np.arange(B)[:, None] == 0, (B, T))
    is_document_bt = np.arange(T) < np.array(LENGTHS)[:, None]
    gradients, hidden_btd = gradients_and_hidden(cfg, in_one_window(), is_first_row_bt)
    alone_gradients, alone_btd = gradients_and_hidden(
        cfg, each_in_its_own(), is_document_bt
    )
    assert_close(hidden_btd[0], np.asarray(alone_btd)[is_document_bt])
    assert_close(
        gradients,
        alone_gradients,
        factor=3,
        reason="sums over the tokens of one row, and over those of three",
    )


@pytest.mark.slow
def test_no_hidden_state_depends_on_another_document():
    """Changing a document changes no bit of a later one, unless documents are
    joined."""
    token_bt, position_bt = in_one_window()
    other_bt = token_bt.copy()
    other_bt[0, : LENGTHS[0]] = (other_bt[0, : LENGTHS[0]] + 1) % 32
    for cfg, is_joined in ((SEPARATE, False), (JOINED, True)):
        ours = network(cfg)
        hidden_btd, again_btd = (
            np.asarray(ours.jit(ours.params, each, position_bt)[0])
            for each in (token_bt, other_bt)
        )
        later = slice(LENGTHS[0], None)
        assert (hidden_btd[0, later] != again_btd[0, later]).any() == is_joined
        assert (hidden_btd[0, :1] != again_btd[0, :1]).any()
