"""Test dense training, in which every expert computes every token.

test_equals_reference.py compares the layer with the reference. The mutual-information
loss, which makes few experts per token enough for evaluation, is compared with its
definition.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Balance, Dispatch, Router
from moejax.model.flops import flops_per_token, num_params
from moejax.moe import route
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.layers import (
    BATCH,
    EXPERTS,
    SEQ,
    TOP_K,
    WIDTH,
    config,
    home,
    layer_of,
    on_mesh,
    operands,
)
from tests.support.primitives import dot_flops, primitives
from tests.support.resolved import make_run
from tests.support.steps import routed_step
from train.step import step as training

CFG = config(Topology(), router=Router(training="dense"))
E, K, NUM_TOKENS = EXPERTS, TOP_K, BATCH * SEQ


def test_each_device_computes_its_experts_for_all_tokens_of_its_group():
    layer = layer_of(dataclasses.replace(CFG, mesh=Topology(data=2, expert=4)))
    _, sums = layer.forward(*on_mesh(layer, home(layer), operands(BATCH, None)))
    assert np.all(sums.rows == NUM_TOKENS // 2 * E // 4)


def test_training_is_dense_and_evaluation_sparse():
    """Only evaluation exchanges rows, and only training draws random numbers."""
    model, state, placement, windows = routed_step(Router(training="dense", jitter=0.1))
    trained = training.make_train_step(model).trace(state, placement, windows)
    args = (state.params, state.router_bias, placement, windows)
    evaluated = training.make_eval_step(model).trace(*args)
    counts = [primitives(traced.jaxpr) for traced in (trained, evaluated)]
    assert [count["all_to_all"] > 0 for count in counts] == [False, True]
    assert [count["random_bits"] > 0 for count in counts] == [True, False]


def test_flops_of_training_are_those_of_all_experts():
    """FLOPs count all experts; the parameters that serve a token count top_k
    experts."""
    layer = layer_of(CFG)
    args = on_mesh(layer, home(layer), operands(BATCH, None))
    flops, layers = flops_per_token(CFG.network), CFG.model.num_moe_layers
    counted = (
        CFG.model.d_model / WIDTH * layers * dot_flops(layer.forward.__wrapped__, *args)
    )
    assert (flops.routed + flops.router) * NUM_TOKENS == counted
    sparse = dataclasses.replace(CFG, router=Router())
    assert flops.routed == E / K * flops_per_token(sparse.network).routed
    assert num_params(CFG.network) == num_params(sparse.network)


def mutual_information(prob_ne):
    """Return sum p(n, e) log(p(n, e) / (p(n) p(e))), with equal p(n) for all tokens."""
    joint_ne = prob_ne / len(prob_ne)
    return jnp.sum(joint_ne * jnp.log(prob_ne / joint_ne.sum(axis=0)))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_loss_is_minus_the_mutual_information_of_token_and_expert(kind):
    """Value and gradient equal the definition; the sums come from two halves of the
    tokens, as two devices would compute them."""
    logit_ne = (
        np.random.default_rng(0).standard_normal((NUM_TOKENS, E)).astype(np.float32)
    )
    score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[kind]

    def ours(logit_ne):
        half = NUM_TOKENS // 2
        parts = [
            balance_sums(logit_ne[:half], kind),
            balance_sums(logit_ne[half:], kind),
        ]
        return router_losses(jax.tree.map(jnp.add, *parts)).mutual_information

    def defined(logit_ne):
        score_ne = score(logit_ne)
        return -mutual_information(score_ne / score_ne.sum(axis=1, keepdims=True))

    actual, expected = jax.jit(
        lambda x: [jax.value_and_grad(f)(x) for f in (ours, defined)]
    )(logit_ne)
    assert_close(actual, expected, factor=3, reason="a difference of two entropies")
    assert np.abs(expected[1]).max() > 1e-4


@pytest.mark.parametrize(("name", "expected"), [("sure", -np.log(E)), ("even", 0.0),
                                                ("one for all", 0.0)])  # fmt: skip
def test_the_loss_is_minimal_if_tokens_are_sure_and_experts_are_even(name, expected):
    """Probabilities of exactly 0 give no NaN and no gradient."""
    favourite_n = (
        np.arange(NUM_TOKENS) % E if name == "sure" else np.zeros(NUM_TOKENS, int)
    )
    height = 0.0 if name == "even" else 400.0
    logit_ne = (height * np.eye(E)[favourite_n]).astype(np.float32)

    def loss(logit_ne):
        return router_losses(balance_sums(logit_ne, "softmax")).mutual_information

    value, gradient = jax.jit(jax.value_and_grad(loss))(logit_ne)
    assert np.isclose(value, expected, atol=1e-5)
    assert_close(
        gradient, np.zeros_like(logit_ne), factor=10, reason="rounding of sums"
    )


def balance_sums(logit_ne, kind):
    score_ne = route.scores(logit_ne, Router(kind=kind))
    choice_nk = jnp.argsort(-score_ne, axis=1)[:, :K]
    return route.balance_sums(score_ne, logit_ne, choice_nk, SEQ)


def router_losses(sums):
    return route.router_losses(types.SimpleNamespace(**sums), NUM_TOKENS, SEQ)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Router(kind="recorded", training="dense"),
         ["Router.training='dense'", "kind is 'recorded'", "'softmax' or 'sigmoid'"]),
        (lambda: resolve_with(balance=Balance(policy="eplb")),
         ["Router.training='dense'", "Balance.policy='eplb'", "use 'home'"]),
        (lambda: resolve_with(dispatch=Dispatch(store="resident")),
         ["Router.training='dense'", "Dispatch.store='resident'", "use 'home'"]),
        (lambda: resolve_with(dispatch=Dispatch(fp8="e5m2")),
         ["Router.training='dense'", "Dispatch.fp8='e5m2': use 'none'"]),
    ],
)  # fmt: skip
def test_bad_combinations_are_refused_in_one_line(make, words):
    with pytest.raises(ValueError) as error:
        make()
    message = str(error.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def resolve_with(**parts):
    return make_run(dataclasses.replace(CFG, **parts))
