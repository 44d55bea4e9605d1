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
    computed sequence by sequence, the mean entropy of a token's choice, and minus the
    mutual information of token and expert: sum p(n, e) log(p(n, e) / (p(n) p(e)))."""
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

    joint_ne = score_ne / len(score_ne)
    sequences = [slice(first, first + T) for first in range(0, len(logit_ne), T)]
    z = jnp.log(jnp.exp(logit_ne).sum(1)) ** 2
    return {
        "balance": balance(slice(None)),
        "sequence_balance": sum(map(balance, sequences)) / len(sequences),
        "z": z.mean(),
        "entropy": -(score_ne * jnp.log(score_ne)).sum(1).mean(),
        "mutual_information": -jnp.sum(
            joint_ne * jnp.log(score_ne / joint_ne.sum(axis=0))
        ),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_the_papers(kind):
    """The sums come from two halves of the tokens, as two devices would compute
    them."""
    cfg, (logit_ne, expert_nk) = KINDS[kind], operands()

    def ours(logit_ne):
        halves = [
            layer_sums(logit_ne[rows], expert_nk[rows], cfg)
            for rows in (slice(0, N // 2), slice(N // 2, N))
        ]
        added = jax.tree.map(jnp.add, *halves)
        return vars(routing.router_losses(added, N, T)), added.tokens_e

    def plain(logit_ne):
        losses = plain_losses(logit_ne, expert_nk, cfg)
        return losses, jnp.bincount(expert_nk.ravel(), length=E)

    @jax.jit
    def both(logit_ne):
        return [
            (f(logit_ne), jax.jacrev(f, has_aux=True)(logit_ne)[0])
            for f in (ours, plain)
        ]

    actual, expected = both(logit_ne)
    why = "mutual information is a difference of two entropies"
    assert_close(actual, expected, factor=3, reason=why)
    (values, _), gradients = expected
    assert all(np.abs(gradients[name]).max() > 1e-4 for name in gradients)
    assert len({round(float(loss), 3) for loss in values.values()}) == len(values)


@pytest.mark.parametrize(("name", "expected"), [("sure", -np.log(E)), ("even", 0.0),
                                                ("one for all", 0.0)])  # fmt: skip
def test_mutual_information_is_most_if_tokens_are_sure_and_experts_are_even(
    name, expected
):
    """Probabilities of exactly 0 give no NaN and no gradient."""
    favourite_n = np.arange(N) % E if name == "sure" else np.zeros(N, int)
    height = 0.0 if name == "even" else 400.0
    logit_ne = (height * np.eye(E)[favourite_n]).astype(np.float32)
    expert_nk = np.zeros((N, K), np.int32)

    def loss(logit_ne):
        return router_losses(logit_ne, expert_nk, Router()).mutual_information

    value, gradient = jax.value_and_grad(loss)(logit_ne)
    assert np.isclose(value, expected, atol=1e-5)
    none = np.zeros_like(logit_ne)
    assert_close(gradient, none, factor=10, reason="rounding of sums")


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


@pytest.mark.parametrize(
    ("router", "is_drawn", "is_sparse"),
    [(Router(), False, True), (Router(training="dense", jitter=0.1), True, False)],
)
def test_only_training_draws_jitter_and_only_evaluation_is_always_sparse(
    router, is_drawn, is_sparse
):
    model, state, placement, windows = routed_step(router)
    trained = training.make_train_step(model).trace(state, placement, windows)
    args = (state.params, state.router_bias, placement, windows)
    evaluated = training.make_eval_step(model).trace(*args)
    for traced, expected in (
        (trained, (is_drawn, is_sparse)),
        (evaluated, (False, True)),
    ):
        counts = primitives(traced.jaxpr)
        found = counts["random_bits"] > 0, counts["all_to_all"] > 0
        assert found == expected


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
