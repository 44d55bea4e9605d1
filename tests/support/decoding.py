"""Compute hidden states of a small model token by token, with a key-value cache."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config import Config, Data, Model, Moe, Train
from moejax.model.cache import Cache
from tests.support.plain_model import network
from tests.support.resolved import make_run

B, SEQ_LEN, PROMPT, TOTAL = 8, 6, 4, 9
LENGTHS = np.array([4, 1, 3, 2, 4, 2, 1, 3])
"""Number of tokens in each row's prompt. Rows end with 6 to 9 tokens, at least
SEQ_LEN."""
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
    """Return random token ids [b, t] of the prompts and of what follows them."""
    return np.random.default_rng(0).integers(0, 32, (B, TOTAL)).astype(np.int32)


def one_by_one(cfg):
    """Return hidden states [b, step, d] of each prompt's last token and of every later
    token, computed with a cache."""
    ours = network(cfg)

    def extend(params, token_bt, position_bt, cache):
        layout = make_run(cfg).exact_layout(*token_bt.shape)
        return ours.extend(params, token_bt, position_bt, cache, layout)

    run = jax.jit(extend)
    token_bt = np.zeros((B, PROMPT), np.int32)
    position_bt = np.full((B, PROMPT), -1, np.int32)
    for row, length in enumerate(LENGTHS):
        token_bt[row, PROMPT - length :] = tokens()[row, :length]
        position_bt[row, PROMPT - length :] = np.arange(length)
    cache = Cache.empty(cfg.network, B, capacity=16)
    hidden_btd, cache = run(ours.params, token_bt, position_bt, cache)
    hidden = [hidden_btd[:, -1]]
    for more in range(TOTAL - max(LENGTHS)):
        position_b1 = (LENGTHS + more)[:, None]
        token_b1 = np.take_along_axis(tokens(), position_b1, axis=1)
        hidden_b1d, cache = run(ours.params, token_b1, position_b1, cache)
        hidden.append(hidden_b1d[:, 0])
    assert cache.num_tokens == PROMPT + TOTAL - max(LENGTHS)
    return jnp.stack(hidden, axis=1)
