"""Compare the router with loops in NumPy, written from the papers' formulas."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Router
from moejax.moe import route as routing
from tests.support.close import assert_close

N, D, E, K = 24, 8, 8, 3
SOFTMAX, SIGMOID = Router(gate_scale=1.5), Router(kind="sigmoid")
KINDS = {
    "softmax, one choice": (Router(normalise_gates=False), 1),
    "softmax, gates normalised and scaled": (SOFTMAX, K),
    "softmax, groups": (Router(num_groups=4, top_groups=2), K),
    "sigmoid": (SIGMOID, K),
    "sigmoid, scaled": (replace(SIGMOID, gate_scale=2.5, normalise_gates=False), K),
    "sigmoid, groups": (replace(SIGMOID, num_groups=4, top_groups=2), K),
    "sigmoid, groups of one": (replace(SIGMOID, num_groups=8, top_groups=4), K),
}
"""Routers, and the number of experts that a token chooses."""
route = jax.jit(routing.route, static_argnums=(3, 4))


def operands(seed=0):
    """Return random x_nd, router_de and a bias that is large enough to change
    choices."""
    random = np.random.default_rng(seed)
    x_nd = random.standard_normal((N, D)).astype(np.float32)
    router_de = random.standard_normal((D, E)).astype(np.float32) / 2
    bias_e = random.standard_normal(E).astype(np.float32) / 3
    return x_nd, router_de, bias_e


def plain_scores(x_nd, router_de, cfg):
    """Return logits and scores [n, e] in float64."""
    logit_ne = x_nd.astype(np.float64) @ router_de
    if cfg.kind == "sigmoid":
        return logit_ne, 1 / (1 + np.exp(-logit_ne))
    score_ne = np.exp(logit_ne)
    return logit_ne, score_ne / score_ne.sum(axis=1, keepdims=True)


def best(values, count):
    """Return the indices of the largest values; of equal values the lower index
    first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def plain_choice(score_e, cfg, top_k):
    """Return the experts that one token chooses, best first.

    The score of a group is the sum of its two best experts with sigmoid scores
    (DeepSeek-V3 section 2.1.2), and its best expert with softmax scores (DeepSeek-V2).
    """
    size = E // cfg.num_groups
    num_summed = min(size, 2 if cfg.kind == "sigmoid" else 1)
    groups = score_e.reshape(cfg.num_groups, size)
    group_scores = [sum(sorted(group, reverse=True)[:num_summed]) for group in groups]
    top_groups = best(group_scores, cfg.top_groups if cfg.num_groups > 1 else 1)
    allowed = [e for e in range(E) if e // size in top_groups]
    return [allowed[i] for i in best(score_e[allowed], top_k)]


def plain_routes(x_nd, router_de, bias_e, cfg, top_k):
    """Return the experts and the gates [n, k] of every token."""
    _, score_ne = plain_scores(x_nd, router_de, cfg)
    expert_nk = np.array(
        [plain_choice(row_e, cfg, top_k) for row_e in score_ne + bias_e]
    )
    gate_nk = np.take_along_axis(score_ne, expert_nk, axis=1)
    if cfg.normalise_gates:
        gate_nk /= gate_nk.sum(axis=1, keepdims=True)
    return expert_nk, gate_nk * cfg.gate_scale


@pytest.mark.parametrize("name", KINDS)
def test_token_choice_is_the_papers(name):
    (cfg, top_k), (x_nd, router_de, bias_e) = KINDS[name], operands()
    routes, score_ne, logit_ne = route(x_nd, router_de, bias_e, cfg, top_k)
    expert_nk, gate_nk = plain_routes(x_nd, router_de, bias_e, cfg, top_k)
    np.testing.assert_array_equal(routes.expert_nk, expert_nk)
    expected = (gate_nk, *plain_scores(x_nd, router_de, cfg)[::-1])
    assert_close((routes.gate_nk, score_ne, logit_ne), expected, dtype=np.float32)


def test_bias_changes_the_choice_and_never_the_gates():
    """With the same choice, the gates are equal bit for bit with and without the bias
    (DeepSeek-V3 eq. 16)."""
    x_nd, router_de, _ = operands()
    bias_e = np.where(np.arange(E) == 5, 10.0, 0.0).astype(np.float32)
    plain, *_ = route(x_nd, router_de, 0 * bias_e, SIGMOID, K)
    biased, *_ = route(x_nd, router_de, bias_e, SIGMOID, K)
    assert (np.asarray(plain.expert_nk) == 5).any(axis=1).mean() < 0.5
    assert (np.asarray(biased.expert_nk)[:, 0] == 5).all()
    forced, *_ = route(x_nd, router_de, 0 * bias_e, SIGMOID, K, biased.expert_nk)
    np.testing.assert_array_equal(biased.gate_nk, forced.gate_nk)


@pytest.mark.parametrize("cfg", [SOFTMAX, replace(SIGMOID, normalise_gates=False)])
def test_forced_choice_keeps_the_experts_and_takes_their_scores(cfg):
    x_nd, router_de, bias_e = operands()
    forced_nk = np.random.default_rng(1).permuted(np.tile(np.arange(E), (N, 1)), axis=1)
    forced_nk = forced_nk[:, :K].astype(np.int32)
    routes, *_ = route(x_nd, router_de, bias_e, cfg, K, forced_nk)
    np.testing.assert_array_equal(routes.expert_nk, forced_nk)
    gate_nk = np.take_along_axis(plain_scores(x_nd, router_de, cfg)[1], forced_nk, 1)
    if cfg.normalise_gates:
        gate_nk *= cfg.gate_scale / gate_nk.sum(axis=1, keepdims=True)
    assert_close(routes.gate_nk, gate_nk, dtype=np.float32)


def test_routing_is_float32_whatever_comes_in():
    """Tokens in bfloat16 are routed as the same values in float32 are."""
    x_nd, router_de, bias_e = operands()
    x_nd = jnp.asarray(x_nd, jnp.bfloat16)
    narrow = route(x_nd, router_de, bias_e, SIGMOID, K)
    wide = route(x_nd.astype(jnp.float32), router_de, bias_e, SIGMOID, K)
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)
    assert narrow[0].gate_nk.dtype == jnp.float32


@pytest.mark.parametrize(
    "name", ["softmax, groups", "sigmoid", "sigmoid, groups", "sigmoid, groups of one"]
)
def test_ties_go_to_the_lower_index(name):
    (cfg, top_k), (x_nd, router_de, bias_e) = KINDS[name], operands()
    routes, *_ = route(x_nd, 0 * router_de, 0 * bias_e, cfg, top_k)
    assert np.asarray(routes.expert_nk).tolist() == [[0, 1, 2]] * N


def test_pick_and_its_gradient():
    """`pick` and its gradient equal loops, also if a token names an expert twice or
    names none (-1 picks zero)."""
    random = np.random.default_rng(0)
    value_ne, weight_nk = random.standard_normal((N, E)), random.standard_normal((N, 3))
    expert_nk = random.integers(-1, E, (N, 3))
    expert_nk[0] = [2, 2, -1]
    expected_nk, gradient_ne = np.zeros((N, 3)), np.zeros((N, E))
    for (n, k), expert in np.ndenumerate(expert_nk):
        if expert >= 0:
            expected_nk[n, k] = value_ne[n, expert]
            gradient_ne[n, expert] += weight_nk[n, k]
    picked_nk, vjp = jax.vjp(
        lambda value_ne: routing.pick(value_ne, expert_nk), value_ne.astype(np.float32)
    )
    assert_close(picked_nk, expected_nk, dtype=np.float32)
    assert_close(vjp(weight_nk.astype(np.float32))[0], gradient_ne, dtype=np.float32)


def test_count_ignores_empty_choices():
    expert_nk = np.array([[0, 3], [3, -1], [-1, -1], [3, 1]])
    assert routing.count(expert_nk, 5).tolist() == [1, 1, 0, 3, 0]


def test_gradient_of_gates_flows_through_scores_alone():
    """The gradient of the gates equals that with the same choice forced, so that the
    choice has no gradient; the bias has none either."""
    x_nd, router_de, bias_e = operands()
    weight_nk = np.random.default_rng(2).standard_normal((N, K)).astype(np.float32)

    def weighed(router_de, bias_e, forced_nk=None):
        routes, *_ = route(x_nd, router_de, bias_e, SIGMOID, K, forced_nk)
        return jnp.sum(weight_nk * routes.gate_nk), routes.expert_nk

    grad = jax.grad(weighed, argnums=(0, 1), has_aux=True)
    (d_router_de, d_bias_e), expert_nk = grad(router_de, bias_e)
    (d_forced_de, _), _ = grad(router_de, bias_e, expert_nk)
    assert np.abs(d_router_de).max() > 0
    assert_close(d_router_de, d_forced_de)
    assert not np.asarray(d_bias_e).any()


def test_update_bias_goes_up_below_the_mean_and_down_above():
    tokens_le = np.array([[4, 4, 4], [0, 6, 3]], np.int32)
    bias_le = routing.update_bias(jnp.ones((2, 3)), tokens_le, 0.25)
    assert bias_le.tolist() == [[1, 1, 1], [1.25, 0.75, 1]]


def test_update_bias_keeps_the_mean():
    """One hot expert among four: three moves up, one down, 0.5 * rate in the mean."""
    tokens_le = jnp.array([[9, 1, 1, 1]])
    bias_le = jnp.array([[0.5, 0.0, 0.25, -0.75]])
    for _ in range(1000):
        bias_le = routing.update_bias(bias_le, tokens_le, 0.25)
    assert bias_le.mean() == 0
    assert (bias_le[0, 1:] - bias_le[0, 0]).tolist() == [499.5, 499.75, 498.75]
