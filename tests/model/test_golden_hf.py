"""Tiny models of published architectures compute what transformers computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Dispatch
from moejax.model.cache import Cache
from moejax.moe import route as routing
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.golden_hf import B, T, as_published, case
from tests.support.plain_model import network
from tests.support.random_plans import random_plan
from tests.support.resolved import make_layout, make_run
from train.step.expert_params import is_expert

OFTEN = ["granitemoe", "qwen2_moe", "gpt_oss", "llama4_text", "deepseek_v3"]
"""Models that have every kind of layer together; the others repeat parts of them."""
NAMES = [
    *OFTEN, "mixtral", "olmoe", "olmoe_clip", "qwen3_moe", "ernie4_5_moe", "glm4_moe",
    "deepseek_v2", "deepseek_v2_lite", "moonlight",
]  # fmt: skip
pytestmark = pytest.mark.published


def long(*values):
    """Return the values of a test that `make test-all` alone runs."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else long(name) for name in NAMES]
)
def test_logits_routes_and_loss(name, monkeypatch):
    """In float32, logits agree within 1e-5, expert ids are equal, and the loss agrees
    within 1e-6."""
    cfg, params, bias, expected = case(name)
    chosen, choose = [], routing.choose_experts

    def recorded(*args):
        expert_nk = choose(*args)
        jax.debug.callback(lambda ids: chosen.append(np.asarray(ids)), expert_nk)
        return expert_nk

    monkeypatch.setattr(routing, "choose_experts", recorded)
    ours = network(cfg)
    run = jax.jit(lambda *args: ours.apply(*args, bias=bias))
    hidden_btd, _, head_vd = run(params, expected["input_ids"])
    jax.effects_barrier()
    logits_btv = hidden_btd @ head_vd.T
    assert np.abs(logits_btv - expected["logits"]).max() < 1e-5
    # A correction bias orders choices, and the stored ones are ordered by their gates.
    np.testing.assert_array_equal(np.sort(chosen), np.sort(expected["expert_ids"]))
    assert (
        abs(mean_nats(logits_btv, expected["input_ids"]) / expected["ce_loss"] - 1)
        < 1e-6
    )


def mean_nats(logits_btv, tokens_bt) -> float:
    """Return the mean loss of the next tokens, in float64."""
    logits_btv = np.asarray(logits_btv, np.float64)[:, :-1]
    of_targets_bt1 = np.take_along_axis(logits_btv, tokens_bt[:, 1:, None], axis=2)
    return np.mean(np.log(np.exp(logits_btv).sum(-1)) - of_targets_bt1[..., 0])


@pytest.mark.parametrize("name", [long(name) for name in NAMES])
def test_a_cache_gives_the_same_logits(name):
    """A prompt of 20 tokens, and then one token at a time, give the logits of the whole
    window within 1e-5."""
    cfg, params, bias, expected = case(name)
    ours, tokens_bt = network(cfg), expected["input_ids"]
    b, t = tokens_bt.shape

    @jax.jit
    def extend(params, token_bt, position_bt, cache):
        layout = make_run(cfg).exact_layout(*token_bt.shape)
        args = params, token_bt, position_bt, cache, layout
        return ours.extend(*args, bias=bias)

    cache, hidden = Cache.empty(cfg.network, b, t), []
    for start, end in [(0, 20), *((i, i + 1) for i in range(20, t))]:
        position_bt = np.tile(np.arange(start, end, dtype=np.int32), (b, 1))
        new_btd, cache = extend(params, tokens_bt[:, start:end], position_bt, cache)
        hidden.append(new_btd)
    head_vd = params["embed_vd" if cfg.model.tie_embeddings else "head_vd"]
    logits_btv = np.concatenate(hidden, axis=1) @ head_vd.T
    assert np.abs(logits_btv - expected["logits"]).max() < 1e-5


MESHES = {
    "data, expert": (Topology(data=2, expert=4), Dispatch()),
    "tensor": (Topology(tensor=2), Dispatch()),
    "replicas": (
        Topology(data=2, expert=4),
        Dispatch(
            store="resident", slots_per_device=3, offers_per_device=2,
            copies_per_device=3, split="local_first",
        ),
    ),
}  # fmt: skip
"""Meshes, and how experts are computed on them."""


@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("name", [long(name) for name in NAMES])
def test_a_mesh_gives_the_same(name, where):
    """The batch, four times over, gives the same logits within 1e-5 and the same norm
    of gradients within 1e-5 of it, on eight devices or two; with random replicas."""
    cfg, params, bias, expected = case(name)
    mesh, dispatch = MESHES[where]
    rows = 4 * B * T * cfg.moe.top_k
    cfg = dataclasses.replace(
        cfg,
        mesh=mesh,
        dispatch=dataclasses.replace(dispatch, rows_per_peer=rows),
        train=dataclasses.replace(cfg.train, batch_size=4 * B),
    )
    ours, layers = network(cfg), cfg.model.num_moe_layers
    layout, random = make_layout(cfg), np.random.default_rng(0)
    plan = random_plan(random, layout, layers)
    if where != "replicas":
        plan = ExpertPlan.home_in(layout, layers)
    tokens_bt = np.tile(expected["input_ids"], (4, 1))
    layer_l1 = np.arange(layers)[:, None]

    def at_owners(path, leaf):
        return leaf[layer_l1, plan.owned_le] if is_expert(path) else leaf

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        hidden_btd, _, head_vd = ours.apply(params, tokens_bt, bias=bias, plan=plan)
        logits_btv = hidden_btd @ head_vd.T
        log_prob_btv = jax.nn.log_softmax(logits_btv[:, :-1])
        return -jnp.take_along_axis(log_prob_btv, tokens_bt[:, 1:, None], 2).mean(), (
            logits_btv
        )

    params = jax.tree_util.tree_map_with_path(at_owners, params)
    (_, logits_btv), grads = jax.jit(loss)(params)
    logits_btv = np.asarray(logits_btv).reshape(4, *expected["logits"].shape)
    assert np.abs(logits_btv - expected["logits"]).max() < 1e-5
    squares = [np.square(np.float64(leaf)).sum() for leaf in jax.tree.leaves(grads)]
    assert abs(np.sqrt(sum(squares)) / expected["grad_norm"] - 1) < 1e-5


@pytest.mark.parametrize("name", [long(name) for name in NAMES])
def test_every_stored_gradient(name):
    """Gradients of the mean loss agree within 1e-4 of the largest entry of a tensor."""
    cfg, params, bias, expected = case(name)
    ours, tokens_bt = network(cfg), expected["input_ids"]

    def loss(params):
        hidden_btd, _, head_vd = ours.apply(params, tokens_bt, bias=bias)
        log_prob_btv = jax.nn.log_softmax((hidden_btd @ head_vd.T)[:, :-1])
        return -jnp.take_along_axis(log_prob_btv, tokens_bt[:, 1:, None], 2).mean()

    grads = as_published(name, jax.jit(jax.grad(loss))(params))
    stored = {
        key.removeprefix("grad/"): value
        for key, value in expected.items()
        if key.startswith("grad/") and "e_score_correction_bias" not in key
    }
    assert len(stored) > 10
    for key, value in stored.items():
        error = np.abs(grads[key] - value).max()
        assert error <= 1e-4 * np.abs(value).max(), key
