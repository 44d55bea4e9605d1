"""Every store under every plan is the same function: outputs and all gradients of an
MoE layer against moe/reference.py, and what travels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from close import assert_close
from flax import nnx
from test_moe_layer import EXPERTS, SEQ, WIDTH, split_modules

from moejax.axes import BATCH_AXES, make_mesh, sharding
from moejax.config import Moe, Router
from moejax.layout import Layout, Topology
from moejax.moe import reference, route
from moejax.plan import ExpertPlan
from moejax.types import Placement

TOPOLOGY, BATCH, TOP_K, HIDDEN, SLOTS = Topology(data=2, expert=4), 8, 2, 32, 6
OWN = EXPERTS // TOPOLOGY.expert
STORES = {
    "transient": {"offers_per_device": OWN, "copies_per_device": SLOTS},
    "resident": {"offers_per_device": OWN, "copies_per_device": SLOTS},
    "sharded": {},
}


def layout_of(store: str, split: str = "even", **kwargs) -> Layout:
    assignments = BATCH * SEQ * TOP_K // TOPOLOGY.num_batch_shards
    slots = OWN if store == "owned" else SLOTS
    return Layout.home(
        EXPERTS,
        TOPOLOGY.expert,
        assignments,
        slots_per_device=slots,
        store=store,
        split=split,
        **STORES.get(store, {}) | kwargs,
    )


def random_plan(rng, layout: Layout) -> ExpertPlan:
    """One layer: every expert somewhere, the other slots anything or empty."""
    rest = rng.integers(-1, EXPERTS, layout.num_slots - EXPERTS)
    row_p = rng.permutation(np.r_[np.arange(EXPERTS), rest]).astype(np.int32)
    owned_e = None
    if layout.store in ("owned", "transient", "resident"):
        owned_e = rng.permutation(EXPERTS).astype(np.int32)[None]
    if layout.store == "owned":
        row_p = owned_e[0]
    return ExpertPlan(row_p[None], EXPERTS, owned_e)


def named_plans(layout: Layout) -> dict[str, ExpertPlan]:
    """Shapes that policies make and shapes that only a mistake would."""
    home_ws = ExpertPlan.home_in(layout, 1).slot_to_expert_lp.reshape(-1, SLOTS)
    hot_ws, crowd_ws = home_ws.copy(), home_ws.copy()
    hot_ws[1:, OWN] = 0
    crowd_ws[3, OWN:] = 0
    crowd_ws[0, 0] = -1
    tables = {"home": home_ws, "hot expert everywhere": hot_ws}
    tables["all replicas on a device that is not the owner"] = crowd_ws
    return {
        name: ExpertPlan(table_ws.reshape(1, -1), EXPERTS)
        for name, table_ws in tables.items()
    }


@functools.cache
def make_case(layout: Layout):
    """step(params, placement, x, choices) of the layer and the same by definition."""
    mesh = make_mesh(TOPOLOGY)
    moe = Moe(num_experts=EXPERTS, top_k=TOP_K, d_expert=HIDDEN)
    graph, params, rest = split_modules(mesh, moe, Router())
    weight_btd = jax.random.normal(jax.random.key(2), (BATCH, SEQ, WIDTH))

    def layer(params, placement, x_btd, forced_btk):
        layer = nnx.merge(graph, params, rest)["moe"]
        y_btd, sums = layer(x_btd, placement, layout, None, forced_btk)
        return jnp.sum(y_btd * weight_btd), (y_btd, sums)

    def defined(params, x_btd, forced_btk):
        layer, x_nd = nnx.merge(graph, params, rest)["moe"], x_btd.reshape(-1, WIDTH)
        args = (layer.router_de[...], layer.bias_e[...], Router(), TOP_K, SEQ)
        routes, _, _ = route.route(x_nd, *args, forced_btk.reshape(-1, TOP_K))
        y_nd = reference.moe(x_nd, routes, layer.masters())
        return jnp.sum(y_nd.reshape(x_btd.shape) * weight_btd), y_nd

    steps = (
        jax.jit(jax.value_and_grad(layer, argnums=(0, 2), has_aux=True)),
        jax.jit(jax.value_and_grad(defined, argnums=(0, 1), has_aux=True)),
    )
    return mesh, *steps, params


def in_order(params, owned_e: np.ndarray):
    """Masters as a plan's owners hold them; the router stays logical."""

    def ordered(path, leaf):
        return leaf if "router" in jax.tree_util.keystr(path) else leaf[owned_e]

    return jax.tree_util.tree_map_with_path(ordered, params)


def skewed(rng) -> np.ndarray:
    """Distinct choices, expert 0 chosen by most tokens, some experts by none."""
    chance_e = np.r_[8.0, 3.0, np.ones(EXPERTS - 4), 1e-9, 1e-9]
    noise = rng.gumbel(size=(BATCH, SEQ, EXPERTS))
    order = np.argsort(-(np.log(chance_e) + noise), axis=-1)
    return order[..., :TOP_K].astype(np.int32)


def check(layout: Layout, plan: ExpertPlan, seed: int = 0):
    mesh, step, defined, params = make_case(layout)
    forced_btk = skewed(np.random.default_rng(seed))
    x_btd = jax.random.normal(jax.random.key(seed), (BATCH, SEQ, WIDTH))
    placement = Placement.of_plan(plan.validate(layout), layout).layer(0)
    owned_e = plan.owned_le[0]
    here = sharding(mesh, BATCH_AXES)
    args = (jax.device_put(x_btd, here), jax.device_put(forced_btk, here))
    (_, (y_btd, sums)), grads = step(in_order(params, owned_e), placement, *args)
    (_, y_nd), expected = defined(params, x_btd, forced_btk)
    assert_close(y_btd.reshape(-1, WIDTH), y_nd)
    expected = (in_order(expected[0], owned_e), expected[1])
    assert_close(jax.device_get(grads), jax.device_get(expected))
    assert int(jnp.sum(sums.rows)) == forced_btk.size
    return sums


@pytest.mark.parametrize("split", ["even", "local_first"])
@pytest.mark.parametrize("store", ["transient", "sharded"])
def test_any_plan_is_the_same_function(store, split):
    layout = layout_of(store, split)
    rng = np.random.default_rng(1)
    for plan in named_plans(layout).values():
        check(layout, plan)
    for seed in range(6):
        check(layout, random_plan(rng, layout), seed)


def test_permuted_owners_are_the_same_function():
    layout, rng = layout_of("owned"), np.random.default_rng(2)
    for seed in range(4):
        check(layout, random_plan(rng, layout), seed)
