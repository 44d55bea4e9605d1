"""The router: scores, choice of experts, gates, and losses that balance the load.

Everything is float32, because a bfloat16 router would choose other experts. The n local
tokens are `b` sequences of `t` tokens; only the sequence-wise parts use that shape.
"""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax.config import Router
from moejax.moe.types import LayerSums, RouterLosses, Routes

MIN_PROBABILITY = 1e-30
"""Floor on probabilities before the logarithm."""
ROUTES = "routes"
"""Checkpoint name of arrays that every remat policy saves: choices, gates, manifest.

If a recomputed top-k chose other experts, the gradient would be wrong. So choices get
this name before anything reads them.
"""


@jax.named_scope("route")
def route(
    x_nd: Float[Array, "n d"],
    router_de: Float[Array, "d e"],
    bias_e: Float[Array, " e"],
    cfg: Router,
    top_k: int,
    forced_nk: Int[Array, "n k"] | None = None,
    logit_bias_e: Float[Array, " e"] | None = None,
) -> tuple[Routes, Float[Array, "n e"], Float[Array, "n e"]]:
    """Return the routes, scores and logits of n tokens.

    Gates are the scores of the chosen experts, without bias (DeepSeek-V3, eq. 16),
    divided by their sum if cfg.normalise_gates, times cfg.gate_scale. If `forced_nk` is
    given, it replaces the router's choice. `logit_bias_e` is added to the logits.
    """
    logit_ne = jnp.matmul(
        x_nd.astype(jnp.float32), router_de, precision=jax.lax.Precision.HIGHEST
    )
    if logit_bias_e is not None:
        logit_ne += logit_bias_e
    score_ne = scores(logit_ne, cfg)
    if forced_nk is None:
        biased_ne = jax.lax.stop_gradient(score_ne + bias_e)
        forced_nk = choose_experts(biased_ne, top_k, cfg)
    expert_nk = checkpoint_name(forced_nk, ROUTES)
    gate_nk = gates(pick(score_ne, expert_nk), cfg)
    return Routes(expert_nk, gate_nk), score_ne, logit_ne


def gates(score_nk: Float[Array, "n k"], cfg: Router) -> Float[Array, "n k"]:
    """Return the gates of a token's experts from their scores."""
    if cfg.normalise_gates:
        score_nk = score_nk / (jnp.sum(score_nk, axis=-1, keepdims=True) + 1e-20)
    return score_nk * cfg.gate_scale


def scores(logit_ne: Float[Array, "n e"], cfg: Router) -> Float[Array, "n e"]:
    """Return the experts' scores: sigmoid of the logits if cfg.kind is 'sigmoid',
    otherwise their softmax."""
    if cfg.kind == "sigmoid":
        return jax.nn.sigmoid(logit_ne)
    return jax.nn.softmax(logit_ne, axis=-1)


def choose_experts(
    score_ne: Float[Array, "n e"], top_k: int, cfg: Router
) -> Int[Array, "n k"]:
    """Return the k best experts of each token, best first, ties to the lower index.

    With groups, only experts of the token's best `top_groups` groups qualify. For
    sigmoid scores a group's score is the sum of its two best experts (DeepSeek-V3,
    section 2.1.2); for softmax scores it is that of its best one (DeepSeek-V2, section
    2.1.2).
    """
    if cfg.num_groups > 1:
        n, num_experts = score_ne.shape
        by_group = score_ne.reshape(n, cfg.num_groups, num_experts // cfg.num_groups)
        best = 2 if cfg.kind == "sigmoid" and by_group.shape[-1] > 1 else 1
        group_score = jnp.sum(jax.lax.top_k(by_group, best)[0], axis=-1)
        group_nq = jax.lax.top_k(group_score, cfg.top_groups)[1]
        is_allowed = jnp.any(
            group_nq[..., None] == jnp.arange(cfg.num_groups), axis=1, keepdims=False
        )
        score_ne = jnp.where(is_allowed[..., None], by_group, -jnp.inf).reshape(
            score_ne.shape
        )
    return jax.lax.top_k(score_ne, top_k)[1]


def pick(value_ne: Float[Array, "n e"], expert_nk: Int[Array, "n k"]):
    """Return value[n, expert_nk[n, k]].

    It is computed by comparison, so that the gradient is no scatter.
    """
    is_chosen_nke = expert_nk[..., None] == jnp.arange(value_ne.shape[-1])
    return jnp.sum(jnp.where(is_chosen_nke, value_ne[:, None, :], 0.0), axis=-1)


def count(expert_nk: Int[Array, "n k"], num_experts: int) -> Int[Array, " e"]:
    """Return the load of each expert: the number of times that it was chosen."""
    is_chosen_nke = expert_nk[..., None] == jnp.arange(num_experts)
    return jnp.sum(is_chosen_nke, axis=(0, 1), dtype=jnp.int32)


def count_together(expert_nk: Int[Array, "n k"], num_experts: int) -> Int[Array, "e e"]:
    """Return the number of tokens that choose both of two experts; on the diagonal is
    `count`, since a token's experts are distinct.

    The product of zeros and ones in float32 is exact below 2^24 tokens.
    """
    assert len(expert_nk) < 2**24, len(expert_nk)
    is_chosen_nke = expert_nk[..., None] == jnp.arange(num_experts)
    chosen_ne = jnp.any(is_chosen_nke, axis=1).astype(jnp.float32)
    return jnp.matmul(chosen_ne.T, chosen_ne).astype(jnp.int32)


def balance_sums(
    score_ne: Float[Array, "n e"],
    logit_ne: Float[Array, "n e"],
    expert_nk: Int[Array, "n k"],
    seq_len: int,
    split_axes: tuple[str, ...] = (),
) -> dict[str, Array]:
    """Return this device's contributions to the losses and loads of a batch.

    The keys are fields of LayerSums. Consecutive tokens are split along the mesh axes
    `split_axes`. If this cuts sequences, the sums of their pieces are added over the
    devices first.
    """
    n, num_experts = score_ne.shape
    prob_ne = score_ne / jnp.sum(score_ne, axis=-1, keepdims=True)
    width = math.gcd(n, seq_len)
    prob_bte = prob_ne.reshape(-1, width, num_experts)
    expert_btk = expert_nk.reshape(-1, width, expert_nk.shape[-1])
    tokens_be = jax.vmap(lambda choice: count(choice, num_experts))(expert_btk)
    mean_be, sequence_be, weight = jnp.mean(prob_bte, axis=1), tokens_be, num_experts
    if width != seq_len:
        pieces = _sum_sequences(
            (tokens_be, width * mean_be), width, seq_len, split_axes
        )
        sequence_be, mean_be = pieces[0], pieces[1] / seq_len
        # All devices along these axes have all sequences: each adds its share.
        weight = num_experts / jax.lax.axis_size(split_axes)
    share_be = sequence_be / jnp.maximum(jnp.sum(sequence_be, -1, keepdims=True), 1)
    sequence_b = weight * jnp.sum(share_be * mean_be, axis=-1)
    return {
        "prob_e": jnp.sum(prob_ne, axis=0),
        "entropy": jnp.sum(entropy(prob_ne)),
        "sequence": jnp.sum(sequence_b),
        "z": jnp.sum(jax.nn.logsumexp(logit_ne, axis=-1) ** 2),
        "tokens_e": jnp.sum(tokens_be, axis=0),
    }


def entropy(prob_ne: Float[Array, "n e"]) -> Float[Array, " n"]:
    """Return the entropy of each token's probabilities, in nats.

    An expert of probability 0 adds nothing, and its logit gets no gradient.
    """
    return -jnp.sum(prob_ne * jnp.log(jnp.maximum(prob_ne, MIN_PROBABILITY)), axis=-1)


def _sum_sequences(pieces, width: int, seq_len: int, split_axes: tuple[str, ...]):
    """Sum per-expert values over each sequence, also where sequences are split over
    devices.

    `pieces` is a list of arrays [b, e]. Each row is the sum over a piece of `width`
    consecutive tokens of a sequence. Return the sums of each array over sequences of
    `seq_len` tokens, for all sequences of the devices along `split_axes`.
    """
    num_pieces, _ = pieces[0].shape
    first = jax.lax.axis_index(split_axes) * num_pieces
    num_sequences = num_pieces * jax.lax.axis_size(split_axes) * width // seq_len
    sequence_b = (first + jnp.arange(num_pieces)) * width // seq_len
    is_in_qb = jnp.arange(num_sequences)[:, None] == sequence_b
    sums = [is_in_qb.astype(x_be.dtype) @ x_be for x_be in pieces]
    return jax.lax.psum(sums, split_axes)


def router_losses(sums: LayerSums, num_tokens: int, seq_len: int) -> RouterLosses:
    """Return the router losses of one global micro-batch of `num_tokens` tokens.

    `sums` are those of all devices together (LayerSums.over_devices), of one layer or,
    with a leading dim, of several. Losses have one value per layer.

        balance              e * sum_e share_e * mean prob_e     (Switch, eq. 4-6)
        sequence_balance     the same within each sequence, averaged (DeepSeek-V3,
                             eq. 17-20)
        z                    mean logsumexp(logits)^2            (ST-MoE, eq. 5)
        mutual_information   mean entropy(prob) - entropy(mean prob)  (DS-MoE, L_MI)
        entropy              mean entropy(prob): no loss, and no part of `weighted_loss`

    share_e is the expert's share of all choices, so perfect balance is 1 for every k.
    The mutual-information loss lies between -log(e), where all experts are used equally
    and each token is certain of its expert, and 0.

    With gradient accumulation a step's loss is the mean over its micro-batches.
    `sequence_balance` and `z` do not depend on how the batch was cut into these; the
    other losses are computed within each micro-batch.
    """
    if num_tokens % seq_len:
        raise ValueError(
            f"num_tokens={num_tokens} must be a multiple of seq_len={seq_len}: all "
            "tokens of the batch come first, then those of a sequence"
        )
    num_experts = sums.prob_e.shape[-1]
    share_e = sums.tokens_e / jnp.maximum(jnp.sum(sums.tokens_e, -1, keepdims=True), 1)
    balance = num_experts * jnp.sum(share_e * sums.prob_e, axis=-1) / num_tokens
    mean_entropy = sums.entropy / num_tokens
    return RouterLosses(
        balance=balance,
        sequence_balance=sums.sequence / (num_tokens // seq_len),
        z=sums.z / num_tokens,
        mutual_information=mean_entropy - entropy(sums.prob_e / num_tokens),
        entropy=mean_entropy,
    )


def weighted_loss(losses: RouterLosses, cfg: Router) -> Float[Array, ""]:
    """Return the router losses times their weights, averaged over layers, so that a
    weight means the same at every depth (as in the trainers of OLMoE and Mixtral)."""
    if cfg.kind == "recorded":
        return jnp.float32(0)  # choices follow the record: nothing can be balanced
    weighted = (
        cfg.balance_loss * losses.balance
        + cfg.sequence_balance_loss * losses.sequence_balance
        + cfg.z_loss * losses.z
    )
    if cfg.mutual_information_loss:  # its gradient waits for a sum over all devices
        weighted += cfg.mutual_information_loss * losses.mutual_information
    return jnp.mean(weighted)


def update_bias(
    bias_le: Float[Array, "l e"], tokens_le: Int[Array, "l e"], rate: float
) -> Float[Array, "l e"]:
    """Return the router bias after one step of balancing without an auxiliary loss.

    The bias of an expert rises by `rate` if its load is below the mean, and falls by
    `rate` if it is above (Wang et al. 2024). The mean of these moves is then taken from
    all of them. It cannot change a choice, but with a few hot experts it is positive in
    each step: after a million steps float32 would have few digits left for scores.
    """
    tokens_le = tokens_le.astype(jnp.float32)
    mean_l1 = jnp.mean(tokens_le, axis=-1, keepdims=True)
    move_le = rate * jnp.sign(mean_l1 - tokens_le)
    return bias_le + (move_le - jnp.mean(move_le, axis=-1, keepdims=True))
