"""Test that documents of one data window do not affect each other in latent attention.

Other attention is compared with formulas in test_transformer.py."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Config, Data, Mla, Model, Moe, Train
from tests.support.close import assert_close
from tests.support.plain_model import network

LENGTHS = (5, 1, 6)
T = sum(LENGTHS)
B = len(LENGTHS)
LATENT = Config(
    model=Model(
        vocab_size=32, d_model=16, num_layers=1, num_heads=4, num_kv_heads=4,
        head_dim=8, rope_theta=100.0, compute_dtype="float32", attention="blocked",
    ),
    moe=Moe(num_experts=4, top_k=2, d_expert=8),
    mla=Mla(
        kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5,
    ),
    data=Data(seq_len=T),
    train=Train(batch_size=B, loss_chunk=T),
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


@pytest.mark.slow
def test_a_window_of_three_documents_is_three_windows():
    """Three documents in one window have the hidden states and gradients of three
    windows."""
    ours = network(LATENT)

    @jax.jit
    def gradients_and_hidden(windows, is_in_loss_bt):
        def loss(params):
            hidden_btd, _, head_vd = ours.apply(params, *windows)
            nats_bt = jax.nn.logsumexp(hidden_btd @ head_vd.T, axis=-1)
            return jnp.sum(jnp.where(is_in_loss_bt, nats_bt, 0.0)), hidden_btd

        return jax.grad(loss, has_aux=True)(ours.params)

    is_first_row_bt = np.broadcast_to(np.arange(B)[:, None] == 0, (B, T))
    is_document_bt = np.arange(T) < np.array(LENGTHS)[:, None]
    gradients, hidden_btd = gradients_and_hidden(in_one_window(), is_first_row_bt)
    alone_gradients, alone_btd = gradients_and_hidden(each_in_its_own(), is_document_bt)
    assert_close(hidden_btd[0], np.asarray(alone_btd)[is_document_bt])
    assert_close(
        gradients,
        alone_gradients,
        factor=3,
        reason="sums over the tokens of one row, and over those of three",
    )
