"""Compare the MoE layer with moe/reference.py: outputs and all gradients, in float32.

The tests cover a grid of mesh x k x skew x shared experts. For a skew the tests choose
each token's experts, so that one compiled layer serves all skews. The gates are still
the router's, and their gradient is compared too.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.axes import BATCH_AXES, make_mesh, sharding
from moejax.config import Moe, Router
from moejax.moe import reference, route
from moejax.moe.setup import LayerSetup
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from tests.support.close import assert_close
from tests.support.configured_layers import BATCH, SKEWS, skewed_choices
from tests.support.layers import EXPERTS, SEQ, WIDTH, simulated_devices, split_modules
from tests.support.layers import MESHES as MESHES_OF_EIGHT

MESHES = {"1": Topology()} | MESHES_OF_EIGHT


@functools.cache
def make_case(mesh_name: str, k: int, shared: int, rows_per_peer=None, kind="softmax"):
    """Return layer step, reference step, parameters and x; each step is jitted once."""
    topology = MESHES[mesh_name]
    mesh = make_mesh(topology, simulated_devices(topology))
    moe = Moe(num_experts=EXPERTS, top_k=k, d_expert=32, num_shared_experts=shared)
    router = Router(
        kind=kind,
        normalise_gates=k > 1,  # one normalised gate is 1, and has no gradient
        allow_expert_choice_in_decoder=True,
    )
    layout = Layout.home(
        EXPERTS,
        topology.expert,
        BATCH * SEQ * k // topology.num_batch_shards,
        rows_per_peer,
    )
    placement = Placement.from_plan(ExpertPlan.home_in(layout, 1), layout).layer(0)
    graph, params, rest = split_modules(mesh, moe)
    here = make_mesh(Topology(), jax.devices()[:1])
    graph_here, _, _ = split_modules(here, moe)
    x_btd = jax.random.normal(jax.random.key(1), (BATCH, SEQ, WIDTH))
    weight_btd = jax.random.normal(jax.random.key(2), x_btd.shape)

    def distributed(params, x_btd, forced_btk):
        modules = nnx.merge(graph, params, rest)
        setup = LayerSetup(moe, router, WIDTH, layout, mesh)
        y_btd, sums = modules["moe"](x_btd, placement, setup, forced_btk=forced_btk)
        y_btd = y_btd + (modules["dense"]((x_btd,))[0] if shared else 0.0)
        return jnp.sum(y_btd * weight_btd), (y_btd, sums)

    def defined(params, x_btd, forced_btk):
        modules = nnx.merge(graph_here, params, rest)
        layer, x_nd = modules["moe"], x_btd.reshape(-1, WIDTH)
        forced_nk = None if forced_btk is None else forced_btk.reshape(-1, k)
        weights = (layer.router_de[...], layer.bias_e[...], router, k, SEQ)
        routes, _, _ = route.route(x_nd, *weights, forced_nk)
        names = ("gate_edf", "up_edf", "down_efd")
        y_nd = reference.moe(x_nd, routes, {n: getattr(layer, n)[...] for n in names})
        y_btd = y_nd.reshape(x_btd.shape)
        y_btd = y_btd + (modules["dense"]((x_btd,))[0] if shared else 0.0)
        return jnp.sum(y_btd * weight_btd), (y_btd, routes)

    step = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    run, define = jax.jit(step(distributed)), jax.jit(step(defined))

    def on_mesh(params, x_btd, forced_btk):
        x_btd = jax.device_put(x_btd, sharding(mesh, BATCH_AXES))
        return run(jax.device_put(params, sharding(mesh)), x_btd, forced_btk)

    return on_mesh, define, params, x_btd


def check_case(case, forced_btk):
    """Assert that outputs and all gradients agree with the reference and that no row is
    lost; return the layer's routing sums."""
    step, defined, params, x_btd = case
    (_, (y_btd, sums)), grads = step(params, x_btd, forced_btk)
    (_, (expected_btd, routes)), expected = defined(params, x_btd, forced_btk)
    assert_close(y_btd, expected_btd)
    assert_close(jax.device_get(grads), jax.device_get(expected))
    num_choices = int(np.sum(np.asarray(routes.expert_nk) >= 0))
    assert int(np.sum(sums.tokens_e)) == num_choices
    assert int(np.sum(sums.dropped)) == 0
    return sums


ALSO = pytest.mark.long
"""Mark of cases that differ from a case of `make test` in one already tested
respect."""


GRID = list(itertools.product(MESHES, (1, 2, 4), (0, 1)))
FIRST = (("expert8", 4, 0), ("dc2_data2_expert2", 1, 1))
"""Cases of `make test`. With the two tests below they cover one device, each axis, each
k, shared experts and rounds."""


@pytest.mark.parametrize(
    ("mesh_name", "k", "shared"),
    [*FIRST, *(pytest.param(*x, marks=ALSO) for x in GRID if x not in FIRST)],
)
@pytest.mark.slow
def test_grid_equals_the_reference(mesh_name, k, shared):
    case = make_case(mesh_name, k, shared)
    for skew in SKEWS:
        check_case(case, skewed_choices(skew, k))


def test_one_device_equals_the_reference():
    """A layer on one device equals the reference; this is the part of the grid in
    `make test-fast`."""
    for skew in SKEWS:
        check_case(make_case("1", 2, 0), skewed_choices(skew, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows_per_peer", [3, *(pytest.param(rows, marks=ALSO) for rows in (1, 8))]
)
def test_later_rounds_carry_what_round_0_could_not(rows_per_peer):
    """If one expert takes every token, the number of rounds is the number that the
    fullest pair of devices needs."""
    case = make_case("data2_expert4", 2, 0, rows_per_peer)
    for skew in SKEWS:
        check_case(case, skewed_choices(skew, 2))
    sums = check_case(case, skewed_choices("one_hot", 2))
    fullest = int(np.max(sums.fullest_pair))
    assert fullest >= BATCH * SEQ // 8, "the hot expert takes all of a device's tokens"
    later = -(-(fullest - rows_per_peer) // -(-rows_per_peer // 4))
    assert int(np.max(sums.rounds)) == 1 + later


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("sigmoid", marks=ALSO), "expert_choice"])
def test_other_routers_travel_the_same_way(kind):
    """The layer equals the reference under choices of the router itself; expert choice
    leaves some choices empty."""
    step, defined, params, x_btd = make_case("data2_expert4", 2, 0, None, kind)
    check_case((step, defined, params, x_btd), None)
