"""Tiny models of published architectures compute what transformers computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.moe import route as routing
from tests.support.golden_hf import as_published, case
from tests.support.plain_model import network

OFTEN = ["granitemoe", "qwen2_moe", "gpt_oss", "llama4_text", "deepseek_v3"]
"""Models that have every kind of layer together; the others repeat parts of them."""
OTHERS = [
    "mixtral", "olmoe", "olmoe_clip", "qwen3_moe", "ernie4_5_moe", "glm4_moe",
    "deepseek_v2", "deepseek_v2_lite", "moonlight",
]  # fmt: skip


@pytest.fixture
def chosen(monkeypatch) -> dict[bytes, np.ndarray]:
    """Record the experts that routers choose: int [n, k] by the bytes of the router's
    matrix, in whatever order layers report, and how often."""
    found, route = {}, routing.route

    def record(router_de, expert_nk):
        found[np.asarray(router_de).tobytes()] = np.asarray(expert_nk)

    def recorded(x_nd, router_de, *args, **kwargs):
        routes, *scores = route(x_nd, router_de, *args, **kwargs)
        matrix_de = jax.lax.stop_gradient(router_de)
        jax.debug.callback(record, matrix_de, routes.expert_nk)
        return routes, *scores

    monkeypatch.setattr(routing, "route", recorded)
    return found


def make_loss(name: str):
    """Return loss(params) -> mean loss of the next tokens, logits."""
    cfg, _, bias, expected = case(name)
    ours, tokens_bt = network(cfg), expected["input_ids"]

    def loss(params):
        hidden_btd, _, head_vd = ours.apply(params, tokens_bt, bias=bias)
        logits_btv = hidden_btd @ head_vd.T
        log_prob_btv = jax.nn.log_softmax(logits_btv[:, :-1])
        nats_bt1 = -jnp.take_along_axis(log_prob_btv, tokens_bt[:, 1:, None], axis=2)
        return nats_bt1.mean(), logits_btv

    return loss


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)
def test_logits_routes_and_loss(name, chosen):
    """In float32, logits agree within 1e-5, expert ids are equal, and the loss agrees
    within 1e-6."""
    _, params, _, expected = case(name)
    nats, logits_btv = jax.jit(make_loss(name))(params)
    jax.effects_barrier()
    assert np.abs(logits_btv - expected["logits"]).max() < 1e-5
    assert abs(nats / expected["ce_loss"] - 1) < 1e-6
    leaves = jax.tree_util.tree_leaves_with_path(params)
    (routers_lde,) = (leaf for path, leaf in leaves if path[-1].key == "router_de")
    ids_lnk = [chosen[router_de.tobytes()] for router_de in routers_lde]
    # A correction bias orders choices, and the stored ones are ordered by their gates.
    np.testing.assert_array_equal(np.sort(ids_lnk), np.sort(expected["expert_ids"]))


@pytest.mark.long
@pytest.mark.parametrize("name", [*OFTEN, *OTHERS])
def test_gradients(name):
    """Every stored gradient agrees within 1e-4 of its largest entry, and the norm of
    every gradient within 1e-4."""
    _, params, _, expected = case(name)
    grads, _ = jax.jit(jax.grad(make_loss(name), has_aux=True))(params)
    grads = as_published(name, jax.device_get(grads))
    assert gradient_error(grads, expected) <= 1e-4
    assert norm_error(grads, expected) < 1e-4


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
