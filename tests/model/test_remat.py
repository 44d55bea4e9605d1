"""Test what the backward pass computes again under each remat policy.

That no policy changes a result is in tests/train/step/test_steps.py.

Routes are never chosen again, because a top-k with another result in the backward pass
would give a wrong gradient. Operations are counted in the jaxpr of the gradient; XLA
can only remove some.
"""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Config, Data, Dispatch, Model, Moe, Router, Train
from moejax.model.routed import RoutingMode
from moejax.model.transformer import StepInputs
from moejax.plan.layout import Topology
from tests.support.plain_model import network
from tests.support.primitives import equations

POLICIES = ("none", "dispatch", "full")
B, T, E, K, L = 8, 8, 8, 2, 2
NUM_ASSIGNMENTS = B * T // 8 * K
"""Number of assignments on one of eight devices."""
ROUTERS = {
    "softmax": Router(),
    "sigmoid, groups": Router(kind="sigmoid", num_groups=4, top_groups=2),
    "recorded": Router(kind="recorded"),
}
SMALL = Config(
    mesh=Topology(data=2, expert=4),
    model=Model(
        vocab_size=16, d_model=16, num_layers=L, num_heads=2, num_kv_heads=1,
        head_dim=8, d_ff=16, compute_dtype="float32",
    ),
    moe=Moe(num_experts=E, top_k=K, d_expert=8),
    dispatch=Dispatch(buffer_factor=0.4),
    data=Data(seq_len=T),
    train=Train(batch_size=B, loss_chunk=T),
)  # fmt: skip


def make_loss(cfg, remat):
    """Return loss(params, tokens, key), which reads every output of the model, and the
    parameters."""
    model = dataclasses.replace(cfg.model, remat=remat)
    ours = network(dataclasses.replace(cfg, model=model))
    chance_le = None
    if cfg.router.kind == "recorded":
        chance_le = np.full((L, E), K / E, np.float32)

    def loss(params, tokens_bt, key):
        step_inputs = StepInputs(key, chance_le, RoutingMode(cfg.router.jitter))
        hidden_btd, sums, head_vd = ours.apply(
            params, tokens_bt, step_inputs=step_inputs
        )
        nats = jax.nn.logsumexp(hidden_btd @ head_vd.T, axis=-1).mean()
        losses = sums.sequence.mean() + 0.01 * sums.z.mean() + sums.prob_e[0, 0, 0]
        return nats + losses, (jnp.max(sums.rounds), jnp.sum(sums.tokens_e, axis=1))

    return loss, ours.params


def operands():
    """Return random tokens and a key."""
    tokens_bt = np.random.default_rng(0).integers(0, 16, (B, T))
    return tokens_bt, jax.random.key(0)


@functools.cache
def gradient(cfg: Config, remat: str):
    """Return the jaxpr of the gradient."""
    loss, params = make_loss(cfg, remat)
    return jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, *operands())


def counts(cfg, remat):
    """Return how often each primitive occurs in forward and backward pass of a
    layer."""
    occurrences = Counter()
    for eqn, _ in equations(gradient(cfg, remat)):
        name, operand = eqn.primitive.name, eqn.invars[0].aval if eqn.invars else None
        occurrences[name] += 1
        if name == "sort" and operand.shape == (NUM_ASSIGNMENTS,):
            occurrences["sort of all choices"] += 1
        if name.startswith("all_gather") and operand.dtype == jnp.int32:
            is_tokens = eqn.params["tiled"]  # which the embedding gathers
            occurrences["all_gather of counts"] += not is_tokens
    return occurrences


@pytest.mark.parametrize("kind", ROUTERS)
def test_routes_are_chosen_once(kind):
    """The policy 'full', which saves fewest arrays, repeats no top-k, no draw, no sort
    of the manifest and no exchange of counts."""
    count = counts(dataclasses.replace(SMALL, router=ROUTERS[kind]), "full")
    assert count["top_k"] == {"sigmoid, groups": 3, "recorded": 0}.get(kind, 1)
    assert count["random_bits"] == (kind == "recorded")
    assert count["sort of all choices"] == 1
    assert count["all_gather of counts"] == 2


@pytest.mark.slow
def test_exchanges():
    """The policy 'dispatch' repeats no exchange, and no policy runs the loop of later
    rounds again.

    Round 0 has 3 forward, of rows, cards and results, and 3 of gradients. Later rounds
    have 3 forward; their backward loop dispatches again, and has 3 and 3. 'full'
    repeats only rows and cards of round 0: the backward pass does not read results that
    came back.

    The policies do repeat matrix products, so that the test can tell them apart. (On
    CPUs the last one of experts too: it stands in one loop with the others.)
    """
    by_policy = [counts(SMALL, remat) for remat in POLICIES]
    assert [count["all_to_all"] for count in by_policy] == [15, 15, 17]
    assert [count["all_gather of counts"] for count in by_policy] == [2, 2, 2]
    dots = [count["dot_general"] for count in by_policy]
    assert dots[0] < dots[1] <= dots[2]


def test_offload_sends_the_inputs_of_layers_to_the_host_alone():
    """The scan over layers returns one array in the host's memory, and the backward
    pass computes as much again as under 'full'."""
    sent = [
        eqn.outvars[0].aval.shape
        for eqn, _ in equations(gradient(SMALL, "offload"))
        if eqn.primitive.name == "device_put" and "<host>" in str(eqn.outvars[0].aval)
    ]
    assert sent == [(B, T, SMALL.model.d_model)]
    dots = [counts(SMALL, remat)["dot_general"] for remat in ("offload", "full")]
    assert dots[0] == dots[1]
