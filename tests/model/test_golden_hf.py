"""Tiny models of published architectures compute what transformers computes."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.axes import BATCH_AXES, TENSOR
from moejax.config import Config, Dispatch
from moejax.model.cache import Cache
from moejax.moe import route as routing
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.golden_hf import B, as_published, case
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


def long(*values):
    """Return the values of a test that `make test-all` alone runs."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture
def chosen(monkeypatch) -> dict:
    """Record the experts that routers choose: int [n, k] by the bytes of the router's
    matrix, the device's index along the batch axes, and that along the tensor axis.

    These say whose tokens they are, in whatever order devices and layers report, and
    how often: rematerialised layers choose twice.
    """
    found, route = {}, routing.route

    def record(router_de, batch, tensor, expert_nk):
        key = np.asarray(router_de).tobytes(), int(batch), int(tensor)
        found[key] = np.asarray(expert_nk)

    def recorded(x_nd, router_de, *args, **kwargs):
        routes, *scores = route(x_nd, router_de, *args, **kwargs)
        place = map(jax.lax.axis_index, (BATCH_AXES, TENSOR))
        matrix_de = jax.lax.stop_gradient(router_de)
        jax.debug.callback(record, matrix_de, *place, routes.expert_nk)
        return routes, *scores

    monkeypatch.setattr(routing, "route", recorded)
    return found


def in_order(chosen: dict, cfg: Config, params: dict) -> np.ndarray:
    """Return the records of `chosen` as int [l, n, k], tokens in the order of the
    batch. Devices along the tensor axis route the same tokens, or a part each."""
    topology, num_tokens = cfg.mesh, cfg.train.batch_size * cfg.data.seq_len
    jax.effects_barrier()
    leaves = jax.tree_util.tree_leaves_with_path(params)
    (routers_lde,) = (leaf for path, leaf in leaves if path[-1].key == "router_de")
    num_batches = topology.num_devices // topology.tensor
    assert len(chosen) == len(routers_lde) * topology.num_devices
    layers = []
    for router_de in routers_lde:
        matrix, parts = np.asarray(router_de).tobytes(), []
        for batch in range(num_batches):
            of_batch = [chosen[matrix, batch, i] for i in range(topology.tensor)]
            is_part = len(of_batch[0]) * topology.num_devices == num_tokens
            assert is_part or all(np.array_equal(x, of_batch[0]) for x in of_batch)
            parts += of_batch if is_part else of_batch[:1]
        layers.append(np.concatenate(parts))
    return np.stack(layers)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else long(name) for name in NAMES]
)
def test_logits_routes_and_loss(name, chosen):
    """In float32, logits agree within 1e-5, expert ids are equal, and the loss agrees
    within 1e-6."""
    cfg, params, bias, expected = case(name)
    ours = network(cfg)
    run = jax.jit(lambda *args: ours.apply(*args, bias=bias))
    hidden_btd, _, head_vd = run(params, expected["input_ids"])
    logits_btv = hidden_btd @ head_vd.T
    assert np.abs(logits_btv - expected["logits"]).max() < 1e-5
    assert_same_experts(in_order(chosen, cfg, params), expected)
    assert (
        abs(mean_nats(logits_btv, expected["input_ids"]) / expected["ce_loss"] - 1)
        < 1e-6
    )


def assert_same_experts(ids_lnk, expected):
    """Check choices of experts against those stored, for each repetition of the batch.
    A correction bias orders choices, and the stored ones are ordered by their gates."""
    stored_lnk = np.sort(expected["expert_ids"])
    times = ids_lnk.shape[1] // stored_lnk.shape[1]
    np.testing.assert_array_equal(np.sort(ids_lnk), np.tile(stored_lnk, (1, times, 1)))


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


PLACES = {
    "one device": (1, Topology(), Dispatch()),
    "data, expert": (4, Topology(data=2, expert=4), Dispatch()),
    "tensor": (4, Topology(tensor=2), Dispatch()),
    "replicas": (
        4,
        Topology(data=2, expert=4),
        Dispatch(
            store="resident", slots_per_device=3, split="local_first",
        ),
    ),
}  # fmt: skip
"""How often the batch is repeated, on which mesh, and how experts are computed."""


class Errors(NamedTuple):
    """Largest differences from what transformers computes."""

    logits: float
    loss: float
    """Relative."""
    gradient: float
    """Of any stored tensor, in units of the tensor's largest entry."""
    norm: float
    """Of the gradient of any tensor, stored or not, relative."""


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", [long(name) for name in NAMES])
def test_logits_routes_loss_and_gradients(name, where, chosen):
    """Logits agree within 1e-5, expert ids are equal, the loss agrees within 1e-6, and
    every stored gradient within 1e-4 of its largest entry: on one device, and for the
    batch four times over on eight, on two along the tensor axis, and with random owners
    and replicas."""
    _, params, _, expected = case(name)
    cfg = configure(name, where)
    layout, layers = make_layout(cfg), cfg.model.num_moe_layers
    plan = ExpertPlan.home_in(layout, layers)
    if where == "replicas":
        plan = random_plan(np.random.default_rng(0), layout, layers)
        assert (plan.owned_le != np.arange(cfg.moe.num_experts)).any()
    errors = compare(name, cfg, plan)
    assert_same_experts(in_order(chosen, cfg, params), expected)
    assert errors.logits < 1e-5
    assert errors.loss < 1e-6
    assert errors.gradient <= 1e-4
    assert errors.norm < 1e-4


def configure(name: str, where: str) -> Config:
    """Return the configuration of a folder at a place."""
    times, mesh, dispatch = PLACES[where]
    cfg = case(name).cfg
    rows = times * cfg.dispatch.rows_per_peer
    return dataclasses.replace(
        cfg,
        mesh=mesh,
        dispatch=dataclasses.replace(dispatch, rows_per_peer=rows),
        train=dataclasses.replace(cfg.train, batch_size=times * B),
    )


def compare(name: str, cfg: Config, plan: ExpertPlan) -> Errors:
    """Compute the mean loss and its gradients under a plan, and compare them."""
    _, params, bias, expected = case(name)
    ours, times = network(cfg), cfg.train.batch_size // B
    tokens_bt = np.tile(expected["input_ids"], (times, 1))

    def loss(params):
        hidden_btd, _, head_vd = ours.apply(params, tokens_bt, bias=bias, plan=plan)
        logits_btv = hidden_btd @ head_vd.T
        log_prob_btv = jax.nn.log_softmax(logits_btv[:, :-1])
        nats_bt1 = -jnp.take_along_axis(log_prob_btv, tokens_bt[:, 1:, None], axis=2)
        return nats_bt1.mean(), logits_btv

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    owned_le = plan.owned_le
    (nats, logits_btv), grads = run(reorder(params, owned_le))
    grads = reorder(jax.device_get(grads), np.argsort(owned_le, axis=1))
    logits_btv = np.asarray(logits_btv).reshape(times, *expected["logits"].shape)
    grads = as_published(name, grads)
    return Errors(
        float(np.abs(logits_btv - expected["logits"]).max()),
        abs(float(nats) / float(expected["ce_loss"]) - 1),
        gradient_error(grads, expected),
        norm_error(grads, expected),
    )


def reorder(params: dict, order_le) -> dict:
    """Return parameters with the experts of each layer in another order."""
    layer_l1 = np.arange(len(order_le))[:, None]
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf[layer_l1, order_le] if is_expert(path) else leaf, params
    )


def gradient_error(grads: dict, expected: dict) -> float:
    """Return the largest difference of the gradients from those stored, in units of the
    largest entry of the tensor; infinity where zeros are stored and ours are none."""
    stored = {
        key.removeprefix("grad/"): value
        for key, value in expected.items()
        if key.startswith("grad/") and "e_score_correction_bias" not in key
    }
    assert len(stored) > 10
    errors = []
    for key, value in stored.items():
        error, largest = np.abs(grads[key] - value).max(), np.abs(value).max()
        errors.append(error / largest if largest else np.inf * error if error else 0)
    return float(max(errors))


def norm_error(grads: dict, expected: dict) -> float:
    """Return the largest relative difference of norms of gradients from those stored,
    over all tensors of the folder but correction biases."""
    norms = dict(zip(expected["grad_keys"].tolist(), expected["grad_norms"]))
    pairs = [
        (np.linalg.norm(np.float64(grads[key])), norm)
        for key, norm in norms.items()
        if "e_score_correction_bias" not in key
    ]
    assert len(pairs) == len(grads)
    # An expert that no token chose has a gradient of zeros, and so must ours.
    assert not any(ours for ours, norm in pairs if not norm)
    return float(max(abs(ours / norm - 1) for ours, norm in pairs if norm))
