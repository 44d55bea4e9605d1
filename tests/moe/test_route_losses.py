"""Compare the router's losses with naive formulas; test micro-batches and jitter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Router
from moejax.moe import route as routing
from moejax.moe.types import LayerSums
from tests.support.close import assert_close
from tests.support.primitives import primitives
from tests.support.steps import routed_step
from train.step import step as training

B, T, E, K = 4, 8, 8, 2
N = B * T
KINDS = {"softmax": Router(), "sigmoid": Router(kind="sigmoid")}


def operands(seed=0, skew=1.0):
    """Return logits that favour the first experts, and each token's choice of
    experts."""
    random = np.random.default_rng(seed)
    logit_ne = random.standard_normal((N, E)) - skew * np.arange(E) / 2
    logit_ne = logit_ne.astype(np.float32)
    return logit_ne, np.argsort(-logit_ne, axis=1)[:, :K].astype(np.int32)


@functools.partial(jax.jit, static_argnums=2)
def layer_sums(logit_ne, expert_nk, cfg):
    score_ne = routing.scores(logit_ne, cfg)
    sums = routing.balance_sums(score_ne, logit_ne, expert_nk, T)
    counts = {"rows_h": jnp.zeros(1, int), "bound_h": jnp.zeros(1, int)}
    return LayerSums(**sums, **counts, rounds=1, dropped=0, fullest_pair=0)


@functools.partial(jax.jit, static_argnums=2)
def router_losses(logit_ne, expert_nk, cfg):
    sums = layer_sums(logit_ne, expert_nk, cfg)
    return routing.router_losses(sums, len(logit_ne), T)


def plain_losses(logit_ne, expert_nk, cfg):
    """Return the losses of Switch eq. 4-6, DeepSeek-V3 eq. 17-20 and ST-MoE eq. 5,
    computed sequence by sequence, and the mean entropy of a token's choice."""
    score_ne = jnp.exp(logit_ne) / jnp.exp(logit_ne).sum(1, keepdims=True)
    if cfg.kind == "sigmoid":
        score_ne = 1 / (1 + jnp.exp(-logit_ne))
        score_ne = score_ne / score_ne.sum(1, keepdims=True)

    def balance(rows):
        chosen_nk = expert_nk[rows]
        total = 0.0
        for e in range(E):
            share = (chosen_nk == e).sum() / chosen_nk.size
            total += share * score_ne[rows, e].mean()
        return E * total

    sequences = [slice(first, first + T) for first in range(0, len(logit_ne), T)]
    z = jnp.log(jnp.exp(logit_ne).sum(1)) ** 2
    return {
        "balance": balance(slice(None)),
        "sequence_balance": sum(map(balance, sequences)) / len(sequences),
        "z": z.mean(),
        "entropy": -(score_ne * jnp.log(score_ne)).sum(1).mean(),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_the_papers(kind):
    cfg, (logit_ne, expert_nk) = KINDS[kind], operands()
    names = ("balance", "sequence_balance", "z", "entropy")

    @jax.jit
    def both(logit_ne):
        def ours(logit_ne):
            losses = router_losses(logit_ne, expert_nk, cfg)
            return {name: getattr(losses, name) for name in names}

        def plain(logit_ne):
            return plain_losses(logit_ne, expert_nk, cfg)

        return [(f(logit_ne), jax.jacrev(f)(logit_ne)) for f in (ours, plain)]

    actual, expected = both(logit_ne)
    assert_close(actual, expected)
    for name in names:
        assert np.abs(expected[1][name]).max() > 1e-4, name
    assert len({round(float(loss), 3) for loss in expected[0].values()}) == len(names)


def test_sums_of_devices_add_up_to_those_of_the_batch():
    cfg, (logit_ne, expert_nk) = Router(), operands()
    parts = [
        layer_sums(logit_ne[rows], expert_nk[rows], cfg)
        for rows in (slice(0, N // 2), slice(N // 2, N))
    ]
    added = jax.tree.map(lambda a, b: a + b, *parts)
    whole = layer_sums(logit_ne, expert_nk, cfg)
    for name in ("prob_e", "sequence", "z", "tokens_e"):
        assert_close(getattr(added, name), getattr(whole, name))


def test_accumulation_leaves_z_and_sequence_losses_and_redefines_balance():
    """The balance loss is larger in each of two micro-batches that are skewed towards
    different experts than in both together; z and sequence losses are means.

    By definition the balance loss is that within a micro-batch.
    """
    cfg, (logit_ne, _) = Router(), operands(skew=2.0)
    logit_ne = np.concatenate([logit_ne[: N // 2], logit_ne[N // 2 :, ::-1]])
    expert_nk = np.argsort(-logit_ne, axis=1)[:, :K]
    halves = [
        router_losses(logit_ne[rows], expert_nk[rows], cfg)
        for rows in (slice(0, N // 2), slice(N // 2, N))
    ]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
    whole = router_losses(logit_ne, expert_nk, cfg)
    assert_close(mean.z, whole.z)
    assert_close(mean.sequence_balance, whole.sequence_balance)
    assert mean.balance > 1.5 * whole.balance
    assert_close(whole.balance, plain_losses(logit_ne, expert_nk, cfg)["balance"])


@pytest.mark.parametrize("jitter", [0.0, 0.01])
def test_jitter_is_drawn_in_training_and_nowhere_else(jitter):
    model, state, placement, windows = routed_step(Router(jitter=jitter))
    train_step = training.make_train_step(model)
    traced = train_step.trace(state, placement, windows)
    assert bool(primitives(traced.jaxpr)["random_bits"]) == (jitter > 0)
    eval_step = training.make_eval_step(model)
    args = (state.params, state.router_bias, placement, windows)
    assert primitives(eval_step.trace(*args).jaxpr)["random_bits"] == 0


def test_every_loss_has_its_weight():
    """The router's part of the loss is a weighted sum of means over layers; it is 0
    with recorded choices."""
    router = Router(
        balance_loss=0.5, sequence_balance_loss=0.25, z_loss=0.125,
        mutual_information_loss=0.0625,
    )  # fmt: skip
    losses = routing.RouterLosses(*(jnp.array([i, i + 2.0]) for i in (1, 2, 3, 4, 9)))
    total = routing.weighted_loss(losses, router)
    assert_close(total, np.float32(0.5 * 2 + 0.25 * 3 + 0.125 * 4 + 0.0625 * 5))
    recorded = dataclasses.replace(router, kind="recorded")
    assert routing.weighted_loss(losses, recorded) == 0
