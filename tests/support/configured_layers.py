"""Run one MoE layer of a Config on its mesh and compare it with the reference.

Outputs, router losses and all gradients are compared. Comments use two abbreviations:

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
from moejax.config import Config, Data, Router, Train
from moejax.moe import reference, route
from moejax.moe.layer import MoeLayer
from moejax.moe.setup import LayerSetup
from moejax.moe.types import Placement, RouterLosses
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from moejax.plan.schedule_rules import SCHEDULES as RULES
from tests.support.close import assert_close
from tests.support.expert_fields import parts_with
from tests.support.layers import EXPERTS, QUICK, SEQ, WIDTH, in_order, simulated_devices
from tests.support.resolved import make_layout

BATCH, TOP_K, HIDDEN = 16, 2, 16
SKEWS = ("uniform", "zipf", "one_hot", "empty")


class ConfiguredLayer(NamedTuple):
    """A compiled MoE layer on its mesh, with its configuration and parameters."""

    cfg: Config
    layout: Layout
    forward: Callable
    """forward(params, placement, x_btd, forced_btk) -> y_btd, sums"""
    run: Callable
    """run(the same) -> value, (y_btd, losses, sums), gradients of params and x"""
    params: Any


SOFTMAX = Router()


def config(
    mesh: Topology, batch: int = BATCH, router: Router = SOFTMAX, **moe
) -> Config:
    """Return the configuration of a small layer; `moe` holds fields of Moe and
    Dispatch."""
    fields = {"num_experts": EXPERTS, "top_k": TOP_K, "d_expert": HIDDEN} | moe
    rest = {"data": Data(seq_len=SEQ), "train": Train(batch_size=batch, loss_chunk=SEQ)}
    return Config(mesh, router=router, **parts_with(fields), **rest)


def split_layer(cfg: Config):
    """Return the graph, the parameters and the other state of a new MoE layer."""
    layer = MoeLayer(cfg.moe, WIDTH, nnx.Rngs(0))
    return nnx.split(layer, nnx.Param, ...)


def build_mesh(topology: Topology) -> jax.sharding.Mesh:
    """Return a mesh of the first simulated devices."""
    return make_mesh(topology, simulated_devices(topology))


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
    step = jax.value_and_grad(run, (0, 2), has_aux=True)
    return jax.jit(step, compiler_options=QUICK)


@functools.cache
def make_case(
    cfg: Config, dtype: str = "float32", saved: tuple = (), align_rows: int = 1
) -> ConfiguredLayer:
    """Return the compiled layer on its devices, whose slots begin at multiples of
    `align_rows`.

    If `saved` names arrays, the backward pass recomputes all other arrays.
    """
    layout, mesh = make_layout(cfg), build_mesh(cfg.mesh)
    layout = dataclasses.replace(layout, align_rows=align_rows)
    graph, params, rest = split_layer(cfg)
    setup = LayerSetup(cfg.moe, cfg.router, WIDTH, layout, mesh)

    def layer(params, placement, x_btd, forced_btk):
        layer = nnx.merge(graph, params, rest)
        return layer(x_btd, placement, setup, forced_btk=forced_btk)

    if saved:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        layer = jax.checkpoint(layer, policy=policy)

    def run(params, placement, x_btd, forced_btk):
        y_btd, sums = layer(params, placement, x_btd, forced_btk)
        totals = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums)
        losses = joined(route.router_losses(totals, x_btd[..., 0].size, SEQ))
        return linear_value(y_btd, losses), (y_btd, losses, sums)

    forward = jax.jit(layer, compiler_options=QUICK)
    return ConfiguredLayer(cfg, layout, forward, differentiated(run), params)


@functools.cache
def make_reference(router: Router, dtype: str):
    """Return the layer's step with gradients on one device, computed by
    moe/reference.py."""
    cfg = config(Topology(), router=router)
    graph, _, rest = split_layer(cfg)

    def run(params, placement, x_btd, forced_btk):
        layer, x_nd = nnx.merge(graph, params, rest), x_btd.reshape(-1, WIDTH)
        forced_nk = None if forced_btk is None else forced_btk.reshape(-1, TOP_K)
        args = (layer.router_de[...], layer.bias_e[...], router, TOP_K, SEQ)
        routes, score_ne, logit_ne = route.route(x_nd, *args, forced_nk)
        added = route.balance_sums(score_ne, logit_ne, routes.expert_nk, SEQ)
        totals = types.SimpleNamespace(**added)
        losses = joined(route.router_losses(totals, len(x_nd), SEQ))
        y_btd = reference.moe(x_nd, routes, layer.master_params()).reshape(x_btd.shape)
        return linear_value(y_btd, losses), (y_btd, losses)

    return differentiated(run)


def operands(batch: int, skew: str, dtype: str = "float32"):
    """Return random hidden states [b, t, d] and the experts of each token [b, t, k]."""
    x_btd = np.random.default_rng(1).normal(size=(BATCH, SEQ, WIDTH)).astype(dtype)
    return x_btd[:batch], skewed_choices(skew, TOP_K)[:batch]


def skewed_choices(skew: str, k: int) -> np.ndarray:
    """Return k distinct experts for every token, int32 [b, t, k]."""
    rng = np.random.default_rng(SKEWS.index(skew))
    chance_e = {
        "uniform": np.ones(EXPERTS),
        "zipf": np.arange(1, EXPERTS + 1) ** -1.5,
        "one_hot": np.eye(EXPERTS)[0] + 1e-9,
        "empty": np.arange(EXPERTS) % 3 == 0,
    }[skew] * 1.0
    noise = rng.gumbel(size=(BATCH, SEQ, EXPERTS))
    with np.errstate(divide="ignore"):
        score = np.log(chance_e) + noise
    return np.argsort(-score, axis=-1, kind="stable")[..., :k].astype(np.int32)


def home(case: ConfiguredLayer) -> ExpertPlan:
    """Return the plan of one layer that keeps every expert at home."""
    return ExpertPlan.home_in(case.layout, 1)


def on_mesh(case: ConfiguredLayer, plan: ExpertPlan, args):
    """Return the arguments of a case's functions, placed on its devices."""
    mesh = build_mesh(case.cfg.mesh)
    placement = Placement.from_plan(plan.validate(case.layout), case.layout).layer(0)
    params = jax.device_put(in_order(case.params, plan.owned_le[0]), sharding(mesh))
    return params, placement, *jax.device_put(args, sharding(mesh, BATCH_AXES))


def check(case: ConfiguredLayer, skew: str = "zipf", plan=None, dtype="float32"):
    """Assert that a layer agrees with the reference, and return its routing sums."""
    plan = plan or home(case)
    args = operands(case.cfg.train.batch_size, skew, dtype)
    (value, (y_btd, losses, sums)), grads = case.run(*on_mesh(case, plan, args))
    define = make_reference(case.cfg.router, dtype)
    (expected, outs), (d_params, d_x) = define(case.params, None, *args)
    d_params = in_order(d_params, plan.owned_le[0])
    actual = (value, (y_btd, losses), grads)
    assert_close(*jax.device_get((actual, (expected, outs, (d_params, d_x)))))
    assert_same_bits_along_tensor(y_btd, case.cfg.mesh)
    assert int(jnp.sum(sums.tokens_e)) == args[1].size
    assert int(jnp.sum(sums.dropped)) == 0
    return sums


def assert_same_bits_along_tensor(y_btd, mesh: Topology) -> None:
    """Raise AssertionError unless all devices of the tensor axis hold the same bits."""
    copies = {}
    for shard in y_btd.addressable_shards:
        copies.setdefault(shard.index[0].start, []).append(np.asarray(shard.data))
    assert {len(each) for each in copies.values()} == {mesh.tensor}
    for first, *others in copies.values():
        assert all(first.tobytes() == other.tobytes() for other in others)


def cut(mp: int, esp: int, expert: int, schedule: str, **changes) -> Config:
    """Return a configuration with `mp` devices on the tensor axis and `esp` expert
    shards.

    Buffers hold two rows per peer and device of the tensor axis, so that even loads
    need two rounds. An expert axis of 2 gets a batch of six sequences of 8 tokens; a
    tensor axis of 4 then cuts through sequences.
    """
    changes = {"rows_per_peer": 2 * mp, "batch": 6 if expert == 2 else BATCH} | changes
    mesh = Topology(expert=expert, tensor=mp)
    return config(mesh, schedule=schedule, expert_shards=esp, **changes)


ALL_ROWS = {"rows_per_peer": 4 * BATCH * SEQ * TOP_K}
"""Buffers so large that round 0 holds all rows, also those that schedule 'base' sends
several times. No later round is compiled then."""
SCHEDULES = tuple(n for n, rules in RULES.items() if not rules.is_local)
"""Schedules that send rows between devices."""
CUTS = ((2, 2, 4), (2, 1, 2), (2, 4, 4), (4, 2, 2), (1, 2, 4), (2, 2, 1), (4, 4, 2))
"""Sizes (MP, ESP, expert axis) that the tests cover."""
