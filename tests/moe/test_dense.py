"""Test dense training, in which every expert computes every token.

The layer is compared with the reference on several meshes. The mutual-information loss,
which makes few experts per token enough for evaluation, is compared with its
definition.
"""

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


def weighted_sum(y_btd, losses):
    """Return a scalar whose gradient depends on every output and every loss."""
    pull_btd = jnp.cos(jnp.arange(y_btd.size, dtype=y_btd.dtype)).reshape(y_btd.shape)
    return jnp.sum(y_btd * pull_btd) + sum(jax.tree.leaves(losses)) ** 2


@functools.cache
def make_case(cfg: Config, call=dense):
    """Return run(params, x) of the layer on its mesh, and its arguments.

    Experts have random owners. `call` is the function that computes the layer.
    """
    layout = make_layout(cfg)
    mesh = axes.make_mesh(cfg.mesh, simulated_devices(cfg.mesh))
    graph, params, rest = split_layer(cfg)
    setup = LayerSetup(cfg.moe, cfg.router, D, layout, mesh)
    x_btd, jitter_btd, owned_e = operands()
    plan = ExpertPlan(owned_e[None], E, owned_e[None]).validate(layout)
    placement = Placement.from_plan(plan, layout).layer(0)

    def run(params, x_btd):
        layer = nnx.merge(graph, params, rest)
        return value_and_results(
            *call(layer, x_btd, placement, setup, jitter_btd=jitter_btd)
        )

    return run, params, x_btd


def split_layer(cfg):
    layer = MoeLayer(cfg.moe, D, nnx.Rngs(0))
    layer.router_de[...] = jax.random.normal(jax.random.key(1), (D, E))
    return nnx.split(layer, nnx.Param, ...)


def value_and_results(y_btd, sums):
    totals = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums)
    losses = route.router_losses(totals, B * T, T)
    return weighted_sum(y_btd, losses), (y_btd, losses, sums)


def value_and_gradients(run, *args):
    run = jax.value_and_grad(run, (0, 1), has_aux=True)
    return jax.device_get(jax.jit(run, compiler_options=QUICK)(*args))


@functools.cache
def reference_results(router: Router):
    """Return the results of moe/reference.py on one device, with all experts chosen."""
    cfg = config(router=router)
    graph, params, rest = split_layer(cfg)
    x_btd, jitter_btd, owned_e = operands()

    def run(params, x_btd):
        layer, x_nd = nnx.merge(graph, params, rest), x_btd.reshape(-1, D)
        routed_nd = (x_btd * jitter_btd).reshape(-1, D)
        args = (routed_nd, layer.router_de[...], layer.bias_e[...], router)
        routes, score_ne, logit_ne = route.route(*args, K, T)
        every, _, _ = route.route(*args, E, T)
        position_e = jnp.argsort(owned_e)  # parameters are in the order of owners
        weights = {n: leaf[position_e] for n, leaf in layer.master_params().items()}
        y_btd = reference.moe(x_nd, every, weights).reshape(x_btd.shape)
        sums = route.balance_sums(score_ne, logit_ne, routes.expert_nk, T)
        sums = {n: jnp.asarray(leaf)[None] for n, leaf in sums.items()}
        return value_and_results(y_btd, Sums(**sums))

    return value_and_gradients(run, params, x_btd)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Sums:
    """Sums over tokens that the router's losses are computed from."""

    prob_e: jax.Array
    entropy: jax.Array
    sequence: jax.Array
    z: jax.Array
    tokens_e: jax.Array


MESHES = {
    "alone": config(),
    "parameters over data": config(Topology(data=2, expert=4), SIGMOID),
    "shards of half": config(Topology(dc=2, expert=2, tensor=2), schedule="s1h"),
    "one shard": config(Topology(expert=2, tensor=2), expert_shards=1),
    "more shards": config(
        Topology(expert=4, tensor=2), expert_shards=4, schedule="base"
    ),
    "local": config(Topology(data=2, tensor=4), UNNORMALISED, schedule="local"),
    "domain": config(Topology(dc=2, expert=2), group="dc_expert", domain=(2, 1)),
    "merged": config(Topology(data=2, expert=2), group="data_expert"),
}
FIRST = ("parameters over data", "shards of half", "more shards")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=ALSO) for name in MESHES],
)
def test_every_mesh_equals_the_reference(name):
    """Outputs, router losses, loads and all gradients equal those of the reference."""
    cfg = MESHES[name]
    (_, (y_btd, losses, sums)), gradients = value_and_gradients(*make_case(cfg))
    (_, (y_expected, losses_expected, sums_expected)), expected = reference_results(
        cfg.router
    )
    assert_close((y_btd, losses), (y_expected, losses_expected))
    assert_close(gradients, expected)
    assert np.abs(expected[0]["router_de"][...]).max(axis=0).min() > 1e-3
    assert_close(sums.tokens_e.sum(axis=0), sums_expected.tokens_e[0])
    # Every device computes the same number of rows.
    assert len(np.unique(sums.rows)) == 1
    assert sums.rows[0] == sums.bound[0] == expected_rows(cfg)


def expected_rows(cfg: Config) -> int:
    """Return the rows of one device: the tokens of all devices of its group, times its
    share of the experts."""
    sources = cfg.mesh.expert * (
        cfg.mesh.dc if cfg.dispatch.group == "dc_expert" else 1
    )
    sources *= cfg.mesh.data if cfg.dispatch.group == "data_expert" else 1
    sources = 1 if cfg.dispatch.schedule == "local" else sources
    return B * T // cfg.mesh.num_batch_shards * sources * E // cfg.group_size


@pytest.mark.long
def test_dense_is_the_sparse_layer_with_every_expert_chosen():
    """Outputs and gradients equal those of the sparse layer with top_k = num_experts,
    which uses dispatch, rounds and combine."""
    cfg = config(Topology(expert=2), SIGMOID, top_k=E, rows_per_peer=B * T * E)
    dense_run, *args = make_case(cfg)
    sparse_run, *_ = make_case(cfg, MoeLayer.__call__)
    (_, (y_btd, losses, sums)), gradients = value_and_gradients(dense_run, *args)
    (_, (y_sparse, losses_sparse, sums_sparse)), expected = value_and_gradients(
        sparse_run, *args
    )
    assert_close((y_btd, losses), (y_sparse, losses_sparse))
    assert_close(gradients, expected)
    assert sums.rows.tolist() == sums_sparse.rows.tolist()


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
    cfg = config()
    run, *args = make_case(cfg)
    flops, layers = flops_per_token(cfg.network), cfg.model.num_moe_layers
    scale = cfg.model.d_model / D * layers
    assert (flops.routed + flops.router) * B * T == scale * dot_flops(run, *args)
    sparse = dataclasses.replace(cfg, router=Router())
    assert flops.routed == E / K * flops_per_token(sparse.network).routed
    assert num_params(cfg.network) == num_params(sparse.network)


def mutual_information(prob_ne):
    """Return sum p(n, e) log(p(n, e) / (p(n) p(e))), with equal p(n) for all tokens."""
    joint_ne = prob_ne / len(prob_ne)
    return jnp.sum(joint_ne * jnp.log(prob_ne / joint_ne.sum(axis=0)))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_loss_is_minus_the_mutual_information_of_token_and_expert(kind):
    """Value and gradient equal the definition; the sums come from two halves of the
    tokens, as two devices would compute them."""
    logit_ne = np.random.default_rng(0).standard_normal((B * T, E)).astype(np.float32)
    score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[kind]

    def ours(logit_ne):
        half = B * T // 2
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
    assert np.abs(expected[1]).max() > 1e-3


@pytest.mark.parametrize(("name", "expected"), [("sure", -np.log(E)), ("even", 0.0),
                                                ("one for all", 0.0)])  # fmt: skip
def test_the_loss_is_minimal_if_tokens_are_sure_and_experts_are_even(name, expected):
    """Probabilities of exactly 0 give no NaN and no gradient."""
    favourite_n = np.arange(B * T) % E if name == "sure" else np.zeros(B * T, int)
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
    return Sums(**route.balance_sums(score_ne, logit_ne, choice_nk, T))


def router_losses(sums):
    return route.router_losses(sums, B * T, T)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Router(kind="recorded", training="dense"),
            ["Router.training='dense'", "kind is 'recorded'", "'softmax' or 'sigmoid'"],
        ),
        (
            lambda: resolve_with(balance=Balance(policy="eplb")),
            ["Router.training='dense'", "Balance.policy='eplb'", "use 'home'"],
        ),
        (
            lambda: resolve_with(dispatch=Dispatch(store="resident")),
            ["Router.training='dense'", "Dispatch.store='resident'", "use 'home'"],
        ),
        (
            lambda: resolve_with(dispatch=Dispatch(fp8="e5m2")),
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


def resolve_with(**parts):
    return make_run(dataclasses.replace(config(), **parts))
