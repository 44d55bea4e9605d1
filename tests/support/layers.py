"""Run one MoE layer on eight devices, under any layout and plan, and compare it with
the reference.

    layer_layout(topology, store, axes)          a layout with room for every plan
    make_layer(topology, layout)                 compiled once
    check_layer(topology, layout, plan, ...)     output and all gradients agree
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.axes import BATCH_AXES, make_mesh, sharding
from moejax.config import Model, Moe, Router
from moejax.model.layers import SwiGlu
from moejax.moe import reference, route
from moejax.moe.layer import MoeLayer
from moejax.moe.setup import LayerSetup
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import GROUP_AXES, Layout, Topology
from tests.support.close import assert_close

BATCH, SEQ, WIDTH, EXPERTS, TOP_K, HIDDEN = 8, 8, 24, 16, 2, 32
ALONE, MERGED = GROUP_AXES["expert"], GROUP_AXES["data_expert"]
MESHES = {
    "expert8": Topology(expert=8),
    "data2_expert4": Topology(data=2, expert=4),
    "data4_expert2": Topology(data=4, expert=2),
    "dc2_data2_expert2": Topology(dc=2, data=2, expert=2),
}
MOE = Moe(num_experts=EXPERTS, top_k=TOP_K, d_expert=HIDDEN)
PULL_BTD = np.random.default_rng(2).normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)
QUICK = {"xla_backend_optimization_level": 0}  # compiled in half the time
compiled = functools.partial(jax.jit, compiler_options=QUICK)


def simulated_devices(topology: Topology) -> list:
    """Return the first devices, as many as the topology has."""
    return jax.devices()[: topology.num_devices]


def split_modules(mesh, moe: Moe):
    """Return the graph, the parameters and the other state of an MoE layer and its
    shared experts."""
    rngs = nnx.Rngs(0)
    modules = {"moe": MoeLayer(moe, WIDTH, rngs)}
    if moe.num_shared_experts:
        modules["dense"] = SwiGlu(Model(d_model=WIDTH), 32, mesh, rngs)
    return nnx.split(nnx.Dict(modules), nnx.Param, ...)


def layer_layout(topology: Topology, store: str, axes=ALONE, **changes) -> Layout:
    """Return a layout with two more slots on each device than it owns experts.

    Store 'owned' has no such slots. The budgets admit any copies in them, and the
    buffers hold all rows in round 0.
    """
    devices = topology.expert * (topology.data if axes == MERGED else 1)
    own, assignments = EXPERTS // devices, BATCH * SEQ * TOP_K // 8
    slots = changes.get("slots_per_device", own + 2)
    sizes = {"rows_per_peer": assignments, "slots_per_device": slots}
    if store == "owned":
        sizes |= {"slots_per_device": own}
    if store in ("transient", "resident"):
        sizes |= {"offers_per_device": own, "copies_per_device": slots}
    return Layout.home(
        EXPERTS, devices, assignments, store=store, axes=axes, **sizes | changes
    )


@functools.cache
def make_layer(topology: Topology, layout: Layout):
    """Return the mesh, step(params, placement, x, choices) and the parameters."""
    mesh = make_mesh(topology)
    graph, params, rest = split_modules(mesh, MOE)
    setup = LayerSetup(MOE, Router(), WIDTH, layout, mesh)

    def run(params, placement, x_btd, forced_btk):
        layer = nnx.merge(graph, params, rest)["moe"]
        y_btd, sums = layer(x_btd, placement, setup, forced_btk=forced_btk)
        return jnp.sum(y_btd * PULL_BTD), (y_btd, sums)

    step = compiled(jax.value_and_grad(run, (0, 2), has_aux=True))
    return mesh, step, jax.device_get(params)


@functools.cache
def make_reference():
    """Return step(params, x, choices) with gradients on one device, computed by
    moe/reference.py."""
    graph, _, rest = split_modules(
        make_mesh(Topology(), simulated_devices(Topology())), MOE
    )

    def run(params, x_btd, forced_btk):
        layer, x_nd = nnx.merge(graph, params, rest)["moe"], x_btd.reshape(-1, WIDTH)
        args = (layer.router_de[...], layer.bias_e[...], Router(), TOP_K, SEQ)
        routes, _, _ = route.route(x_nd, *args, forced_btk.reshape(-1, TOP_K))
        y_nd = reference.moe(x_nd, routes, layer.master_params())
        return jnp.sum(y_nd.reshape(x_btd.shape) * PULL_BTD), y_nd

    return compiled(jax.value_and_grad(run, (0, 1), has_aux=True))


def in_order(params, owned_e: np.ndarray):
    """Return master parameters in the order of a plan's owners; the router keeps the
    logical order."""

    def ordered(path, leaf):
        return leaf if "router" in jax.tree_util.keystr(path) else leaf[owned_e]

    return jax.tree_util.tree_map_with_path(ordered, params)


def placed(plan: ExpertPlan, layout: Layout) -> Placement:
    """Return the placement of a plan's only layer."""
    return Placement.from_plan(plan.validate(layout), layout).layer(0)


def skewed(seed: int) -> np.ndarray:
    """Return distinct choices [b, t, k]: expert 0 is chosen by most tokens, and some
    experts by none."""
    chance_e = np.r_[8.0, 3.0, np.ones(EXPERTS - 4), 1e-9, 1e-9]
    return drawn(np.random.default_rng(seed), chance_e)


def zipf_choices(seed: int, exponent: float) -> np.ndarray:
    """Return distinct choices [b, t, k] of experts under a Zipf law."""
    rng = np.random.default_rng(seed)
    return drawn(rng, rng.permutation((1.0 + np.arange(EXPERTS)) ** -exponent))


def drawn(rng, chance_e: np.ndarray) -> np.ndarray:
    """Return distinct choices [b, t, k] of experts that are drawn with these
    chances."""
    noise_bte = rng.gumbel(size=(BATCH, SEQ, EXPERTS))
    order_bte = np.argsort(-(np.log(chance_e) + noise_bte), axis=-1)
    return order_bte[..., :TOP_K].astype(np.int32)


def layer_run(topology: Topology, layout: Layout, plan: ExpertPlan, x_btd, forced_btk):
    """Return the output, the routing sums and the gradients of the layer; gradients of
    experts are in the order of the plan's owners."""
    mesh, step, params = make_layer(topology, layout)
    args = jax.device_put((x_btd, forced_btk), sharding(mesh, BATCH_AXES))
    params = in_order(params, plan.owned_le[0])
    (_, (y_btd, sums)), grads = step(params, placed(plan, layout), *args)
    return jax.device_get((y_btd, sums, grads))


def check_layer(
    topology: Topology, layout: Layout, plan: ExpertPlan, seed=0, forced_btk=None
):
    """Assert that output and all gradients agree with the reference and that no row is
    lost; return the layer's routing sums.

    Choices of experts are skewed unless `forced_btk` gives them.
    """
    params = make_layer(topology, layout)[2]
    forced_btk = skewed(seed) if forced_btk is None else forced_btk
    x_btd = np.random.default_rng(seed).normal(size=PULL_BTD.shape).astype(np.float32)
    y_btd, sums, grads = layer_run(topology, layout, plan, x_btd, forced_btk)
    (_, y_nd), expected = make_reference()(params, x_btd, forced_btk)
    assert_close(y_btd.reshape(-1, WIDTH), y_nd)
    expected = (in_order(expected[0], plan.owned_le[0]), expected[1])
    assert_close(grads, jax.device_get(expected))
    assert int(np.sum(sums.rows)) == forced_btk.size
    return sums
