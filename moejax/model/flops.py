"""Exact matrix-multiply FLOPs per token, by part, from which MFU is computed.

XLA's own count takes the body of a scan only once, so it cannot be used. A multiply-add
is two FLOPs. The backward pass costs twice the forward pass. Rematerialization and
padding cost time but are not useful work, so they do not count.
"""

import dataclasses

from moejax.config import Network


@dataclasses.dataclass(frozen=True)
class Flops:
    """Forward FLOPs per token of the whole model, by part."""

    attention_projections: float
    attention_scores: float
    """Products of queries and keys, and of scores and values. Attention is causal, so
    a token of a sequence of t attends to (t + 1) / 2 positions on average; to fewer in
    layers with a window or chunks."""
    dense: float
    """Feed-forward parts of the dense layers."""
    shared: float
    """Shared experts."""
    routed: float
    """Routed experts."""
    router: float
    head: float
    """Output embedding."""

    @property
    def forward(self) -> float:
        """Forward FLOPs per token, all parts together."""
        return sum(dataclasses.astuple(self))

    @property
    def train(self) -> float:
        """FLOPs per token of one training step, forward and backward."""
        return 3 * self.forward


def flops_per_token(cfg: Network) -> Flops:
    """Return the forward FLOPs per token as the model runs in training.

    Under dense training (Router.training='dense') every expert counts, otherwise the
    top_k that a token chooses.
    """
    model, moe = cfg.model, cfg.moe
    d, layers, moe_layers = model.d_model, model.num_layers, model.num_moe_layers
    widths = model.num_heads * (cfg.query_dim + cfg.value_dim)
    swiglu = 2 * 3 * d  # three matrices, per hidden unit
    is_dense = cfg.router.training == "dense"
    experts = moe.num_experts if is_dense else moe.top_k
    return Flops(
        attention_projections=layers * 2 * attention_matrices(cfg),
        attention_scores=2 * widths * num_keys(cfg),
        dense=(layers - moe_layers) * swiglu * model.d_ff,
        shared=moe_layers * (swiglu * moe.shared_width + 2 * d * moe.shared_gate),
        routed=moe_layers * swiglu * experts * moe.d_expert,
        router=moe_layers * 2 * d * moe.num_experts,
        head=2 * d * model.vocab_size,
    )


def attention_flops_per_token(cfg: Network) -> float:
    """Return the forward FLOPs per token of attention, of the mean layer."""
    flops = flops_per_token(cfg)
    both = flops.attention_projections + flops.attention_scores
    return both / cfg.model.num_layers


def attention_matrices(cfg: Network) -> int:
    """Return the number of elements of the matrices of one layer's attention."""
    model, mla, d = cfg.model, cfg.mla, cfg.model.d_model
    query = model.num_heads * cfg.query_dim
    if not cfg.is_latent:
        return d * (2 * query + 2 * model.num_kv_heads * model.head_dim)
    rank, latent = mla.q_lora_rank, mla.kv_lora_rank
    queries = d * query if rank is None else rank * (d + query)
    into = d * (latent + mla.qk_rope_head_dim)
    heads = model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + into + latent * heads + model.num_heads * mla.v_head_dim * d


def num_keys(cfg: Network) -> float:
    """Return the number of keys that a token reads on average, summed over layers, in a
    sequence that is one document."""
    t, options = cfg.seq_len, cfg.attention
    window = min(options.sliding_window or t, t)
    chunk = min(options.chunk_size or t, t)
    rest = t % chunk
    full = (t + 1) / 2
    by_kind = {
        "full": full,
        "nope": full,
        "sliding": (window * (window + 1) / 2 + (t - window) * window) / t,
        "chunked": (t // chunk * chunk * (chunk + 1) + rest * (rest + 1)) / 2 / t,
    }
    kinds = options.layers
    return sum(by_kind[kinds[i % len(kinds)]] for i in range(cfg.model.num_layers))


def expert_params(cfg: Network) -> int:
    """Count the parameters of one routed expert, in all MoE layers together."""
    d, moe = cfg.model.d_model, cfg.moe
    biases = (2 * moe.d_expert + d) * moe.expert_bias
    return (3 * d * moe.d_expert + biases) * cfg.model.num_moe_layers


def num_params(cfg: Network) -> dict[str, int]:
    """Count parameters: 'total' is all of them, 'active' those that one token uses.

    'active' counts top_k of the routed experts.
    """
    model, moe = cfg.model, cfg.moe
    d, layers, moe_layers = model.d_model, model.num_layers, model.num_moe_layers
    query, key_value = (
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
    )
    qk_norms = {"none": 0, "head": 2 * model.head_dim, "full": query + key_value}
    vectors = 2 * d + qk_norms[model.qk_norm] + model.num_heads * cfg.attention.sinks
    biases = {"none": 0, "qkv": query + 2 * key_value}
    biases["all"] = biases["qkv"] + d
    vectors += biases[cfg.attention.bias]
    if cfg.is_latent:
        vectors += cfg.mla.kv_lora_rank + (cfg.mla.q_lora_rank or 0)
    every = layers * (attention_matrices(cfg) + vectors) + d
    every += model.vocab_size * d * (1 if model.tie_embeddings else 2)
    every += (layers - moe_layers) * 3 * d * model.d_ff
    every += moe_layers * (d + cfg.router.bias) * moe.num_experts
    every += moe_layers * (d if model.block == "shortcut" else 0)
    every += moe_layers * d * (3 * moe.shared_width + moe.shared_gate)
    expert = expert_params(cfg)
    return {
        "total": every + expert * moe.num_experts,
        "active": every + expert * moe.top_k,
    }
