"""Run one MoE layer on simulated devices, under any layout, plan and router, and
compare it with the reference.

    layer_layout(topology, store, axes)     a layout with room for every plan
    cut(mp, esp, expert, schedule)          a configuration with a tensor axis
    make_layer(topology, layout), layer_of(cfg)     compiled once
    check(layer, skew, plan)                output, losses and all gradients agree

    MP    devices of the tensor axis        ESP    expert shards (moejax.plan.parallel)

The tests choose each token's experts, so that one compiled layer serves all skews.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.axes import BATCH_AXES, make_mesh, sharding
from moejax.config import Config, Data, Moe, Router, Train
from moejax.moe import reference, route
from moejax.moe.dense import dense
from moejax.moe.layer import MoeLayer
from moejax.moe.setup import LayerSetup
from moejax.moe.types import Placement, RouterLosses
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.groups import GROUP_AXES
from moejax.plan.layout import Layout, Topology
from moejax.plan.schedule_rules import SCHEDULES as RULES
from tests.support.close import assert_close
from tests.support.expert_fields import parts_with
from tests.support.random_plans import roomy
from tests.support.resolved import make_layout

BATCH, SEQ, WIDTH, EXPERTS, TOP_K, HIDDEN = 16, 8, 24, 16, 2, 16
ALONE, MERGED = GROUP_AXES["expert"], GROUP_AXES["data_expert"]
MESHES = {
    "expert8": Topology(expert=8),
    "data2_expert4": Topology(data=2, expert=4),
    "data4_expert2": Topology(data=4, expert=2),
    "dc2_data2_expert2": Topology(dc=2, data=2, expert=2),
}
MOE = Moe(num_experts=EXPERTS, top_k=TOP_K, d_expert=HIDDEN)
SOFTMAX = Router()
SKEWS = ("uniform", "zipf", "one_hot", "empty")
SCHEDULES = tuple(n for n, rules in RULES.items() if not rules.is_local)
"""Schedules that send rows between devices."""
CUTS = ((2, 2, 4), (2, 1, 2), (2, 4, 4), (4, 2, 2), (1, 2, 4), (2, 2, 1), (4, 4, 2))
"""Sizes (MP, ESP, expert axis) that the tests cover."""
SCHEDULED = [
    (*sizes, name)
    for sizes in CUTS
    for name in (*SCHEDULES, "local")
    if name != "local" or 1 < sizes[0] == sizes[1]
]
"""Every schedule at every size that it can have."""
ALL_ROWS = {"buffer_factor": 1e3}
"""Buffers so large that round 0 holds all rows. No later round is compiled then."""
SMALL = {"buffer_factor": 0.4}
"""Buffers so small that later rounds run: for some of the rows, and some of what
devices compute."""


class Layer(NamedTuple):
    """A compiled MoE layer on its mesh."""

    topology: Topology
    layout: Layout
    moe: Moe
    router: Router
    forward: Callable
    """forward(params, placement, x_btd, forced_btk) -> y_btd, sums"""
    run: Callable
    """run(the same) -> value, (y_btd, losses, sums), gradients of params and x"""
    params: Any
    batch: int = BATCH


def build_mesh(topology: Topology) -> jax.sharding.Mesh:
    """Return a mesh of the first simulated devices."""
    return make_mesh(topology, jax.devices()[: topology.num_devices])


def split_layer(moe: Moe = MOE):
    """Return the graph, the parameters and the other state of a new MoE layer."""
    return nnx.split(MoeLayer(moe, WIDTH, nnx.Rngs(0)), nnx.Param, ...)


def layer_layout(
    topology: Topology, store: str, axes=ALONE, top_k: int = TOP_K, **changes
) -> Layout:
    """Return a layout with two more slots on each device than it owns experts.

    Store 'owned' has no such slots. The budgets admit any copies in them, and the
    buffers hold all rows in round 0.
    """
    devices = topology.expert * (topology.data if axes == MERGED else 1)
    own = EXPERTS // devices
    assignments = BATCH * SEQ * top_k // topology.num_batch_shards
    slots = changes.get("slots_per_device", own + 2)
    sizes = {"slots_per_device": slots, "top_k": top_k, **ALL_ROWS}
    if store == "owned":
        sizes |= {"slots_per_device": own}
    if store in ("transient", "resident"):
        sizes |= {"offers_per_device": own, "copies_per_device": slots}
    nodes = {"num_nodes": topology.data if axes == MERGED else 1}
    layout = Layout.home(
        EXPERTS, devices, assignments, store=store, axes=axes, **nodes | sizes | changes
    )
    return dataclasses.replace(layout, **layout.most_between_nodes)


def config(
    mesh: Topology, batch: int = BATCH, router: Router = SOFTMAX, **moe
) -> Config:
    """Return the configuration of a small layer; `moe` holds fields of Moe and
    Dispatch."""
    fields = {"num_experts": EXPERTS, "top_k": TOP_K, "d_expert": HIDDEN} | moe
    rest = {"data": Data(seq_len=SEQ), "train": Train(batch_size=batch, loss_chunk=SEQ)}
    return Config(mesh, router=router, **parts_with(fields), **rest)


def cut(mp: int, esp: int, expert: int, schedule: str, **changes) -> Config:
    """Return a configuration with `mp` devices on the tensor axis and `esp` expert
    shards.

    Buffers are so small that there are several rounds. An expert
    axis of 2 gets a batch of six sequences of 8 tokens; a
    tensor axis of 4 then cuts through sequences.
    """
    changes = {**SMALL, "batch": 6 if expert == 2 else BATCH} | changes
    mesh = Topology(expert=expert, tensor=mp)
    return config(mesh, schedule=schedule, expert_shards=esp, **changes)


def layer_of(
    cfg: Config, dtype: str = "float32", saved: tuple[str, ...] = (), **changes
) -> Layer:
    """Return the layer of a configuration, with room for any plan and these changes of
    its layout."""
    layout = dataclasses.replace(roomy(make_layout(cfg)), **changes)
    layer = make_layer(cfg.mesh, layout, cfg.moe, cfg.router, dtype, saved)
    return layer._replace(batch=cfg.train.batch_size)


@functools.cache
def make_layer(
    topology: Topology,
    layout: Layout,
    moe: Moe = MOE,
    router: Router = SOFTMAX,
    dtype: str = "float32",
    saved: tuple[str, ...] = (),
) -> Layer:
    """Return the compiled layer on its devices.

    If `saved` names arrays, the backward pass recomputes all other arrays. `dtype` is
    only a key of the cache: the fixture `doubles` widens the layer.
    """
    del dtype
    graph, params, rest = split_layer(moe)
    setup = LayerSetup(moe, router, WIDTH, layout, build_mesh(topology))

    def layer(params, placement, x_btd, forced_btk):
        layer, jitter_btd = nnx.merge(graph, params, rest), jitter(router, x_btd)
        if router.training == "dense":
            return dense(layer, x_btd, placement, setup, jitter_btd)
        choices = {"forced_btk": forced_btk, "jitter_btd": jitter_btd}
        return layer(x_btd, placement, setup, **choices)

    if saved:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        layer = jax.checkpoint(layer, policy=policy)

    def run(params, placement, x_btd, forced_btk):
        y_btd, sums = layer(params, placement, x_btd, forced_btk)
        totals = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums)
        losses = joined(route.router_losses(totals, x_btd[..., 0].size, SEQ))
        return linear_value(y_btd, losses), (y_btd, losses, sums)

    forward, run = jax.jit(layer), differentiated(run)
    return Layer(topology, layout, moe, router, forward, run, jax.device_get(params))


def jitter(router: Router, x_btd):
    """Return the same random factors [b, t, d] in every call, or None if the router has
    no jitter."""
    if not router.jitter:
        return None
    noise_btd = np.random.default_rng(2).uniform(-1, 1, (BATCH, SEQ, WIDTH))
    return jnp.asarray(1 + router.jitter * noise_btd[: len(x_btd)], x_btd.dtype)


def joined(losses: RouterLosses):
    """Return the losses as one array, so that its largest sets the tolerance of all.

    A small loss can be the difference of large entropies, whose rounding is larger than
    the tolerance of the loss itself.
    """
    return jnp.stack(jax.tree.leaves(losses))


def linear_value(y_btd, losses):
    """Return a scalar whose gradient depends on every output and every loss: a weighted
    sum of the outputs plus the square of the sum of the losses."""
    pull_btd = jnp.cos(jnp.arange(y_btd.size, dtype=y_btd.dtype)).reshape(y_btd.shape)
    return jnp.sum(y_btd * pull_btd) + jnp.sum(losses) ** 2


def differentiated(run):
    """Return `run`, jitted, with gradients of its parameters and its input x_btd."""
    return jax.jit(jax.value_and_grad(run, (0, 2), has_aux=True))


@functools.cache
def make_reference(moe: Moe, router: Router, dtype: str):
    """Return the layer's step with gradients on one device, computed by
    moe/reference.py; its third result is the number of choices. In dense training every
    token takes all experts, and its best ones count."""
    del dtype
    graph, _, rest = split_layer(moe)

    def run(params, placement, x_btd, forced_btk):
        layer, x_nd = nnx.merge(graph, params, rest), x_btd.reshape(-1, WIDTH)
        forced_nk = None if forced_btk is None else forced_btk.reshape(-1, moe.top_k)
        jitter_btd = jitter(router, x_btd)
        routed_nd = (
            x_nd if jitter_btd is None else x_nd * jitter_btd.reshape(x_nd.shape)
        )
        args = (routed_nd, layer.router_de[...], layer.bias_e[...], router)
        routes, score_ne, logit_ne = route.route(*args, moe.top_k, forced_nk)
        added = route.balance_sums(score_ne, logit_ne, routes.expert_nk, SEQ)
        totals = types.SimpleNamespace(**added)
        losses = joined(route.router_losses(totals, len(x_nd), SEQ))
        num_choices = jnp.sum(routes.expert_nk >= 0)
        if router.training == "dense":
            routes, _, _ = route.route(*args, EXPERTS)
        y_btd = reference.moe(x_nd, routes, layer.master_params()).reshape(x_btd.shape)
        return linear_value(y_btd, losses), (y_btd, losses, num_choices)

    return differentiated(run)


def operands(batch: int, choices, top_k: int = TOP_K, dtype: str = "float32"):
    """Return random hidden states [b, t, d] and the experts of each token [b, t, k],
    which `choices` gives or names by their skew. None leaves them to the router."""
    x_btd = np.random.default_rng(1).normal(size=(BATCH, SEQ, WIDTH)).astype(dtype)
    if isinstance(choices, str):
        choices = skewed_choices(choices, top_k)[:batch]
    return x_btd[:batch], choices


def skewed_choices(skew: str, k: int = TOP_K) -> np.ndarray:
    """Return k distinct experts for every token, int32 [b, t, k]."""
    chance_e = {
        "uniform": np.ones(EXPERTS),
        "zipf": np.arange(1, EXPERTS + 1) ** -1.5,
        "one_hot": np.eye(EXPERTS)[0] + 1e-9,
        "empty": (np.arange(EXPERTS) % 3 == 0) * 1.0,
    }[skew]
    return drawn(np.random.default_rng(SKEWS.index(skew)), chance_e, k)


def zipf_choices(seed: int, exponent: float) -> np.ndarray:
    """Return distinct choices [b, t, k] of experts under a Zipf law."""
    rng = np.random.default_rng(seed)
    return drawn(rng, rng.permutation((1.0 + np.arange(EXPERTS)) ** -exponent), TOP_K)


def drawn(rng, chance_e: np.ndarray, k: int) -> np.ndarray:
    """Return distinct choices [b, t, k] of experts that are drawn with these
    chances."""
    noise_bte = rng.gumbel(size=(BATCH, SEQ, EXPERTS))
    with np.errstate(divide="ignore"):
        score_bte = np.log(chance_e) + noise_bte
    order_bte = np.argsort(-score_bte, axis=-1, kind="stable")
    return order_bte[..., :k].astype(np.int32)


def in_order(params, owned_e: np.ndarray):
    """Return master parameters in the order of a plan's owners; the router keeps the
    logical order."""

    def ordered(path, leaf):
        return leaf if "router" in jax.tree_util.keystr(path) else leaf[owned_e]

    return jax.tree_util.tree_map_with_path(ordered, params)


def placed(plan: ExpertPlan, layout: Layout) -> Placement:
    """Return the placement of a plan's only layer."""
    return Placement.from_plan(plan.validate(layout), layout).layer(0)


def home(layer: Layer) -> ExpertPlan:
    """Return the plan of one layer that keeps every expert at home."""
    return ExpertPlan.home_in(layer.layout, 1)


def on_mesh(layer: Layer, plan: ExpertPlan, args):
    """Return the arguments of a layer's functions, placed on its devices."""
    mesh = build_mesh(layer.topology)
    params = jax.device_put(in_order(layer.params, plan.owned_le[0]), sharding(mesh))
    args = jax.device_put(args, sharding(mesh, BATCH_AXES))
    return params, placed(plan, layer.layout), *args


def check(layer: Layer, choices="zipf", plan=None, dtype="float32"):
    """Assert that a layer's output, router losses and all gradients agree with the
    reference, that devices of the tensor axis hold the same bits, and that no row is
    lost; return its routing sums."""
    plan = plan or home(layer)
    args = operands(layer.batch, choices, layer.moe.top_k, dtype)
    (value, (y_btd, losses, sums)), grads = layer.run(*on_mesh(layer, plan, args))
    define = make_reference(layer.moe, layer.router, dtype)
    (expected, (*outs, num_choices)), (d_params, d_x) = define(
        layer.params, None, *args
    )
    d_params = in_order(d_params, plan.owned_le[0])
    actual = (value, [y_btd, losses], grads)
    assert_close(*jax.device_get((actual, (expected, outs, (d_params, d_x)))))
    assert_same_bits_along_tensor(y_btd, layer.topology)
    assert int(jnp.sum(sums.tokens_e)) == num_choices
    assert int(jnp.sum(sums.dropped)) == 0
    if layer.layout.tensor is None and layer.router.training == "sparse":
        assert int(jnp.sum(sums.rows)) == num_choices
    return jax.device_get(sums)


def assert_same_bits_along_tensor(y_btd, mesh: Topology) -> None:
    """Raise AssertionError unless all devices of the tensor axis hold the same bits."""
    copies = {}
    for shard in y_btd.addressable_shards:
        copies.setdefault(shard.index[0].start, []).append(np.asarray(shard.data))
    assert {len(each) for each in copies.values()} == {mesh.tensor}
    for first, *others in copies.values():
        assert all(first.tobytes() == other.tobytes() for other in others)
