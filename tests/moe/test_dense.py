"""Dense training: every expert computes every token, on any mesh, and the loss that
makes few of them enough afterwards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax import axes
from moejax.config import Balance, Config, Data, Dispatch, Router, Train
from moejax.model.flops import flops_per_token, num_params
from moejax.moe import reference, route
from moejax.moe.dense import dense
from moejax.moe.layer import MoeLayer
from moejax.moe.setup import LayerSetup
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.expert_fields import parts_with
from tests.support.layers import simulated_devices
from tests.support.primitives import dot_flops, primitives
from tests.support.resolved import make_layout, make_run
from tests.support.steps import routed_step
from train.step import step as training

B, T, D, E, K, F = 8, 4, 6, 8, 2, 8
QUICK = {"xla_backend_optimization_level": 0}  # compiled in half the time
ALSO = pytest.mark.long
SOFTMAX = Router(gate_scale=1.5, training="dense")
SIGMOID = Router(kind="sigmoid", training="dense")
UNNORMALISED = Router(kind="sigmoid", normalise_gates=False, training="dense")


def config(mesh=None, router=SOFTMAX, **moe):
    fields = {"num_experts": E, "top_k": K, "d_expert": F, "rows_per_peer": 64} | moe
    rest = {"data": Data(seq_len=T), "train": Train(batch_size=B, loss_chunk=T)}
    return Config(mesh or Topology(), router=router, **parts_with(fields), **rest)


@functools.cache
def operands():
    random = np.random.default_rng(0)
    x_btd = random.standard_normal((B, T, D)).astype(np.float32)
    jitter_btd = random.uniform(0.9, 1.1, x_btd.shape).astype(np.float32)
    return x_btd, jitter_btd, random.permutation(E).astype(np.int32)


def value_of(y_btd, losses):
    pull_btd = jnp.cos(jnp.arange(y_btd.size, dtype=y_btd.dtype)).reshape(y_btd.shape)
    return jnp.sum(y_btd * pull_btd) + sum(jax.tree.leaves(losses)) ** 2


@functools.cache
def case_of(cfg: Config, call=dense):
    """run(params, x) of the layer on its mesh, its experts at owners by chance, and its
    arguments; `call` is how the layer is called."""
    layout = make_layout(cfg)
    mesh = axes.make_mesh(cfg.mesh, simulated_devices(cfg.mesh))
    graph, params, rest = layer_of(cfg)
    setup = LayerSetup(cfg.moe, cfg.router, D, layout, mesh)
    x_btd, jitter_btd, owned_e = operands()
    plan = ExpertPlan(owned_e[None], E, owned_e[None]).validate(layout)
    placement = Placement.from_plan(plan, layout).layer(0)

    def run(params, x_btd):
        layer = nnx.merge(graph, params, rest)
        return measured(*call(layer, x_btd, placement, setup, jitter_btd=jitter_btd))

    return run, params, x_btd


def layer_of(cfg):
    layer = MoeLayer(cfg.moe, D, nnx.Rngs(0))
    layer.router_de[...] = jax.random.normal(jax.random.key(1), (D, E))
    return nnx.split(layer, nnx.Param, ...)


def measured(y_btd, sums):
    totals = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums)
    losses = route.router_losses(totals, B * T, T)
    return value_of(y_btd, losses), (y_btd, losses, sums)


def result(run, *args):
    run = jax.value_and_grad(run, (0, 1), has_aux=True)
    return jax.device_get(jax.jit(run, compiler_options=QUICK)(*args))


@functools.cache
def defined(router: Router):
    """By moe/reference.py on one device, with a choice of all experts."""
    cfg = config(router=router)
    graph, params, rest = layer_of(cfg)
    x_btd, jitter_btd, owned_e = operands()

    def run(params, x_btd):
        layer, x_nd = nnx.merge(graph, params, rest), x_btd.reshape(-1, D)
        routed_nd = (x_btd * jitter_btd).reshape(-1, D)
        args = (routed_nd, layer.router_de[...], layer.bias_e[...], router)
        routes, score_ne, logit_ne = route.route(*args, K, T)
        every, _, _ = route.route(*args, E, T)
        position_e = jnp.argsort(owned_e)  # masters are in the order of owners
        weights = {n: leaf[position_e] for n, leaf in layer.master_params().items()}
        y_btd = reference.moe(x_nd, every, weights).reshape(x_btd.shape)
        sums = route.balance_sums(score_ne, logit_ne, routes.expert_nk, T)
        sums = {n: jnp.asarray(leaf)[None] for n, leaf in sums.items()}
        return measured(y_btd, Sums(**sums))

    return result(run, params, x_btd)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Sums:
    prob_e: jax.Array
    entropy: jax.Array
    sequence: jax.Array
    z: jax.Array
    tokens_e: jax.Array


MESHES = {
    "alone": config(),
    "masters over data": config(Topology(data=2, expert=4), SIGMOID),
    "shards of half": config(Topology(dc=2, expert=2, tensor=2), schedule="s1h"),
    "one shard": config(Topology(expert=2, tensor=2), expert_shards=1),
    "more shards": config(
        Topology(expert=4, tensor=2), expert_shards=4, schedule="base"
    ),
    "local": config(Topology(data=2, tensor=4), UNNORMALISED, schedule="local"),
    "domain": config(Topology(dc=2, expert=2), group="dc_expert", domain=(2, 1)),
    "merged": config(Topology(data=2, expert=2), group="data_expert"),
}
FIRST = ("masters over data", "shards of half", "more shards")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=ALSO) for name in MESHES],
)
def test_every_mesh_equals_the_reference(name):
    """Outputs, router losses, loads and all gradients."""
    cfg = MESHES[name]
    (_, (y_btd, losses, sums)), gradients = result(*case_of(cfg))
    (_, (y_expected, losses_expected, sums_expected)), expected = defined(cfg.router)
    assert_close((y_btd, losses), (y_expected, losses_expected))
    assert_close(gradients, expected)
    assert np.abs(expected[0]["router_de"][...]).max(axis=0).min() > 1e-3
    assert_close(sums.tokens_e.sum(axis=0), sums_expected.tokens_e[0])
    # Every device is equally busy: all tokens times all experts, shared out.
    assert len(set(sums.rows)) == 1
    assert sums.rows[0] == sums.bound[0] == rows_of(cfg)


def rows_of(cfg: Config) -> int:
    """Rows of a device: tokens of all devices that its experts' width or number is
    split over, times its experts."""
    sources = cfg.mesh.expert * (
        cfg.mesh.dc if cfg.dispatch.group == "dc_expert" else 1
    )
    sources *= cfg.mesh.data if cfg.dispatch.group == "data_expert" else 1
    sources = 1 if cfg.dispatch.schedule == "local" else sources
    return B * T // cfg.mesh.num_batch_shards * sources * E // cfg.group_size


@pytest.mark.long
def test_dense_is_the_sparse_layer_with_every_expert_chosen():
    """By dispatch, rounds and combine, with top_k = num_experts: outputs and gradients
    of all that makes them."""
    cfg = config(Topology(expert=2), SIGMOID, top_k=E, rows_per_peer=B * T * E)
    dense_run, *args = case_of(cfg)
    sparse_run, *_ = case_of(cfg, MoeLayer.__call__)
    (_, (y_btd, losses, sums)), gradients = result(dense_run, *args)
    (_, (y_sparse, losses_sparse, sums_sparse)), expected = result(sparse_run, *args)
    assert_close((y_btd, losses), (y_sparse, losses_sparse))
    assert_close(gradients, expected)
    assert sums.rows.tolist() == sums_sparse.rows.tolist()


def test_training_is_dense_and_evaluation_sparse():
    model, state, placement, windows = routed_step(Router(training="dense", jitter=0.1))
    trained = training.make_train_step(model).trace(state, placement, windows)
    args = (state.params, state.router_bias, placement, windows)
    evaluated = training.make_eval_step(model).trace(*args)
    found = [primitives(traced.jaxpr) for traced in (trained, evaluated)]
    assert [each["all_to_all"] > 0 for each in found] == [False, True]
    assert [each["random_bits"] > 0 for each in found] == [True, False]


def test_flops_of_training_are_those_of_all_experts():
    """And of the parameters that serve a token, those of the best top_k."""
    cfg = config()
    run, *args = case_of(cfg)
    flops, layers = flops_per_token(cfg.network), cfg.model.num_moe_layers
    scale = cfg.model.d_model / D * layers
    assert (flops.routed + flops.router) * B * T == scale * dot_flops(run, *args)
    sparse = dataclasses.replace(cfg, router=Router())
    assert flops.routed == E / K * flops_per_token(sparse.network).routed
    assert num_params(cfg.network) == num_params(sparse)


def mutual_information(prob_ne):
    """sum p(n, e) log(p(n, e) / (p(n) p(e))) with all tokens alike."""
    joint_ne = prob_ne / len(prob_ne)
    return jnp.sum(joint_ne * jnp.log(prob_ne / joint_ne.sum(axis=0)))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_loss_is_minus_the_mutual_information_of_token_and_expert(kind):
    """Value and gradient, in two halves as two devices have them."""
    logit_ne = np.random.default_rng(0).standard_normal((B * T, E)).astype(np.float32)
    score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[kind]

    def ours(logit_ne):
        half = B * T // 2
        parts = [sums_of(logit_ne[:half], kind), sums_of(logit_ne[half:], kind)]
        return losses_of(jax.tree.map(jnp.add, *parts)).mutual_information

    def defined(logit_ne):
        score_ne = score(logit_ne)
        return -mutual_information(score_ne / score_ne.sum(axis=1, keepdims=True))

    actual, expected = jax.jit(
        lambda x: [jax.value_and_grad(f)(x) for f in (ours, defined)]
    )(logit_ne)
    assert_close(actual, expected, factor=3, reason="a difference of two entropies")
    assert np.abs(expected[1]).max() > 1e-3


@pytest.mark.parametrize(("name", "least"), [("sure", -np.log(E)), ("even", 0.0),
                                             ("one for all", 0.0)])  # fmt: skip
def test_the_loss_is_least_where_tokens_are_sure_and_experts_busy(name, least):
    """Chances of exactly 0 give no NaN, and no gradient."""
    favourite_n = np.arange(B * T) % E if name == "sure" else np.zeros(B * T, int)
    height = 0.0 if name == "even" else 400.0
    logit_ne = (height * np.eye(E)[favourite_n]).astype(np.float32)

    def loss(logit_ne):
        return losses_of(sums_of(logit_ne, "softmax")).mutual_information

    value, gradient = jax.jit(jax.value_and_grad(loss))(logit_ne)
    assert np.isclose(value, least, atol=1e-5)
    assert_close(
        gradient, np.zeros_like(logit_ne), factor=10, reason="rounding of sums"
    )


def sums_of(logit_ne, kind):
    score_ne = route.scores(logit_ne, Router(kind=kind))
    choice_nk = jnp.argsort(-score_ne, axis=1)[:, :K]
    return Sums(**route.balance_sums(score_ne, logit_ne, choice_nk, T))


def losses_of(sums):
    return route.router_losses(sums, B * T, T)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Router(kind="recorded", training="dense"),
            ["Router.training='dense'", "kind is 'recorded'", "'softmax' or 'sigmoid'"],
        ),
        (
            lambda: resolved_with(balance=Balance(policy="eplb")),
            ["Router.training='dense'", "Balance.policy='eplb'", "use 'home'"],
        ),
        (
            lambda: resolved_with(dispatch=Dispatch(store="resident")),
            ["Router.training='dense'", "Dispatch.store='resident'", "use 'home'"],
        ),
        (
            lambda: resolved_with(dispatch=Dispatch(fp8="e5m2")),
            ["Router.training='dense'", "Dispatch.fp8='e5m2': use 'none'"],
        ),
    ],
)
def test_bad_combinations_are_refused_in_one_line(make, words):
    with pytest.raises(ValueError) as error:
        make()
    message = str(error.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def resolved_with(**parts):
    return make_run(dataclasses.replace(config(), **parts))
