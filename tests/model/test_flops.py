"""Compare FLOPs and numbers of parameters with counts of programs and arrays."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.config import (
    Attention,
    Config,
    Data,
    Mla,
    Model,
    Moe,
    Network,
    Router,
    Train,
)
from moejax.model.flops import flops_per_token, num_keys, num_params
from tests.support import plain_model
from tests.support.plain_model import network
from tests.support.primitives import dot_flops
from train.step.expert_params import is_expert

B, T = 2, 6
BASE = Config(
    model=Model(
        vocab_size=48, d_model=16, num_layers=2, num_heads=4, num_kv_heads=4,
        head_dim=8, d_ff=40,
    ),
    moe=Moe(num_experts=4, top_k=2, d_expert=24),
    data=Data(seq_len=T),
    train=Train(batch_size=B, loss_chunk=T),
)  # fmt: skip


def vary(moe=None, router=None, attention=None, mla=None, **model):
    """Return BASE with changes; `moe` and `model` hold fields, the others are whole."""
    return dataclasses.replace(
        BASE,
        model=dataclasses.replace(BASE.model, **model),
        moe=dataclasses.replace(BASE.moe, **(moe or {})),
        router=router or BASE.router,
        attention=attention or BASE.attention,
        mla=mla or BASE.mla,
    )


CONFIGS = {
    "base": BASE,
    "untied": vary(tie_embeddings=False),
    "grouped queries, norms per head": vary(num_kv_heads=2, qk_norm="head"),
    "one key head, norms over all": vary(num_kv_heads=1, qk_norm="full"),
    "wide heads": vary(head_dim=32),
    "dense prefix": vary(num_layers=3, first_k_dense=2),
    "every second": vary(num_layers=4, moe_every=2),
    "prefix, every second": vary(num_layers=3, first_k_dense=1, moe_every=2),
    "shared experts": vary(moe={"num_shared_experts": 2}, num_layers=1),
    "all experts": vary(moe={"top_k": 4}),
    "sigmoid, one of eight": vary(
        moe={"num_experts": 8, "top_k": 1}, router=Router(kind="sigmoid")
    ),
    "shortcut": vary(
        moe={"num_shared_experts": 1}, num_layers=4, moe_every=2, block="shortcut"
    ),
}

PATTERNS = {
    "two MoE layers a cycle": vary(num_layers=6, layers=("moe", "dense", "moe")),
    "windows": vary(attention=Attention(layers=("full", "sliding"), sliding_window=4)),
}
"""Configurations whose layers differ; the plain program computes every score."""
MLA = Mla(
    kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10
)  # fmt: skip
LATENT = {
    "latent": vary(mla=MLA),
    "latent queries": vary(mla=dataclasses.replace(MLA, q_lora_rank=14)),
}
"""Configurations with latent attention."""
VECTORS = {
    "biases of queries, keys and values": vary(attention=Attention(bias="qkv")),
    "all biases, sinks": vary(attention=Attention(bias="all", sinks=True)),
    "biases of experts and router": vary(
        moe={"expert_bias": True}, router=Router(bias=True)
    ),
    "gate of two shared experts": vary(
        moe={"num_shared_experts": 2, "d_shared": 20, "shared_gate": True}
    ),
}
"""Configurations with more parameters and no more products than BASE."""


@pytest.mark.parametrize("name", [*CONFIGS, *VECTORS, *PATTERNS, *LATENT])
def test_num_params_counts_the_elements_of_the_model(name):
    """The total counts all parameters; the active ones leave out the experts of each
    layer that a token does not use."""
    cfg = (CONFIGS | VECTORS | PATTERNS | LATENT)[name]
    moe = cfg.moe
    leaves = jax.tree_util.tree_leaves_with_path(network(cfg).params)
    total = sum(leaf.size for _, leaf in leaves)
    routed = [leaf for path, leaf in leaves if is_expert(path)]
    assert len(routed) == 3 * (1 + moe.expert_bias), "gate, up and down"
    idle = sum(leaf.size for leaf in routed) * (moe.num_experts - moe.top_k)
    expected = {"total": total, "active": total - idle // moe.num_experts}
    assert num_params(cfg.network) == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_of_the_plain_program(name):
    """FLOPs of the forward pass, and of a pass with all gradients, are those of the
    plain program."""
    cfg = CONFIGS[name]
    params, tokens_bt = network(cfg).params, np.zeros((B, T), np.int32)

    def total(params):
        return plain_model.logits(cfg, params, tokens_bt).sum()

    flops = flops_per_token(cfg.network)
    assert flops.forward * B * T == dot_flops(total, params)
    assert flops.train * B * T == dot_flops(jax.value_and_grad(total), params)


def test_flops_of_each_part_computed_by_hand():
    """FLOPs of each part equal a hand calculation for d = 16, 4 query heads and 2 key
    heads of width 8, t = 6, 1 dense layer and 2 MoE layers."""
    cfg = vary(
        moe={"num_shared_experts": 2}, num_layers=3, first_k_dense=1, num_kv_heads=2
    )
    flops = flops_per_token(cfg.network)
    assert flops.attention_projections == 3 * 2 * 16 * (32 + 16 + 16 + 32)
    assert flops.attention_scores == 3 * 2 * (2 * 32 * (1 + 2 + 3 + 4 + 5 + 6) / 6)
    assert flops.dense == 1 * 3 * 2 * 16 * 40
    assert flops.shared == 2 * 3 * 2 * 16 * 48
    assert flops.routed == 2 * 2 * 3 * 2 * 16 * 24
    assert flops.router == 2 * 2 * 16 * 4
    assert flops.head == 2 * 16 * 48
    assert flops.train == 3 * flops.forward == 3 * sum(dataclasses.astuple(flops))
    gated = flops_per_token(VECTORS["gate of two shared experts"].network)
    assert gated.shared == 2 * (3 * 2 * 16 * 40 + 2 * 16), "two of width 20, a gate"
    dense = flops_per_token(vary(router=Router(training="dense")).network)
    assert dense.routed == 2 * 4 * 3 * 2 * 16 * 24


def test_flops_of_latent_attention_computed_by_hand():
    """FLOPs for d = 16, 4 heads, latents of 12 and 14, queries of 6 + 4 and values of
    10, t = 6 and 2 layers."""
    flops = flops_per_token(LATENT["latent queries"].network)
    queries = 16 * 14 + 14 * 4 * (6 + 4)
    keys_and_values = 16 * (12 + 4) + 12 * 4 * (6 + 10)
    per_layer = 2 * (queries + keys_and_values + 4 * 10 * 16)
    assert flops.attention_projections == 2 * per_layer
    assert flops.attention_scores == 2 * 2 * 4 * (10 + 10) * (1 + 2 + 3 + 4 + 5 + 6) / 6


@pytest.mark.parametrize("t", [6, 3, 16])
def test_keys_that_a_token_reads(t):
    """The mean number of keys is that of a count token by token, for windows and chunks
    that are shorter and longer than the sequence."""
    kinds = ("sliding", "chunked", "full", "nope", "sliding")
    options = Attention(layers=kinds, sliding_window=4, chunk_size=5)
    model = dataclasses.replace(BASE.model, num_layers=7)
    cfg = Network(model, attention=options, seq_len=t)
    counts = {
        "sliding": [min(token + 1, 4) for token in range(t)],
        "chunked": [token % 5 + 1 for token in range(t)],
        "full": range(1, t + 1),
        "nope": range(1, t + 1),
    }
    total = sum(sum(counts[kind]) for kind in (*kinds, *kinds[:2]))
    assert num_keys(cfg) == pytest.approx(total / t)
