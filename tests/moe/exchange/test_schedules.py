"""Every order of collectives is the same layer: outputs, router losses, all gradients
against moe/reference.py; and what a schedule may do otherwise.

    MP    devices of the tensor axis        ESP    expert shards (moejax.plan.tensor)

Choices are given to the layer, so that one compiled layer serves all skews; buffers are
small, so that later rounds run.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.axes import BATCH_AXES, make_mesh, sharding
from moejax.config import Config, Data, Router, Train
from moejax.moe import reference, route
from moejax.moe.exchange import dispatch
from moejax.moe.layer import MoeLayer
from moejax.moe.types import Placement, RouterLosses
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from tests.moe.test_layer import (
    BATCH,
    EXPERTS,
    SEQ,
    SKEWS,
    WIDTH,
    devices_of,
    skewed_choices,
)
from tests.moe.weights.test_stores import in_order
from tests.support.close import assert_close
from tests.support.expert_fields import parts_with
from tests.support.random_plans import odd_plans, random_plan
from train.layouts import layout_of

TOP_K, HIDDEN = 2, 16
QUICK = {"xla_backend_optimization_level": 0}  # compiled in half the time
ALSO = pytest.mark.long
FULL, DISPATCH = (route.ROUTES,), (route.ROUTES, dispatch.ROWS)


class Case(NamedTuple):
    cfg: Config
    layout: Layout
    forward: Callable
    """forward(params, placement, x_btd, forced_btk) -> y_btd, sums"""
    run: Callable
    """Of the same: value, (y_btd, losses, sums), gradients of params and x."""
    params: Any


SOFTMAX = Router()


def config(
    mesh: Topology, batch: int = BATCH, router: Router = SOFTMAX, **moe
) -> Config:
    fields = {"num_experts": EXPERTS, "top_k": TOP_K, "d_expert": HIDDEN} | moe
    rest = {"data": Data(seq_len=SEQ), "train": Train(batch_size=batch, loss_chunk=SEQ)}
    return Config(mesh, router=router, **parts_with(fields), **rest)


def split_layer(cfg: Config, mesh):
    layer = MoeLayer(cfg.moe, cfg.router, WIDTH, mesh, nnx.Rngs(0))
    return nnx.split(layer, nnx.Param, ...)


def mesh_of(topology: Topology) -> jax.sharding.Mesh:
    return make_mesh(topology, devices_of(topology))


def joined(losses: RouterLosses):
    """One array: of small differences of large entropies that rounding is large."""
    return jnp.stack(jax.tree.leaves(losses))


def value_of(y_btd, losses):
    """What no linear function of any output is."""
    pull_btd = jnp.cos(jnp.arange(y_btd.size, dtype=y_btd.dtype)).reshape(y_btd.shape)
    return jnp.sum(y_btd * pull_btd) + jnp.sum(losses) ** 2


def differentiated(run):
    """Of run(params, placement, x_btd, forced_btk), by params and x."""
    step = jax.value_and_grad(run, (0, 2), has_aux=True)
    return jax.jit(step, compiler_options=QUICK)


@functools.cache
def make_case(cfg: Config, dtype: str = "float32", saved: tuple = ()) -> Case:
    """The layer on its devices; recomputed when going back but for what is `saved`, if
    anything is."""
    layout, mesh = layout_of(cfg), mesh_of(cfg.mesh)
    graph, params, rest = split_layer(cfg, mesh)

    def layer(params, placement, x_btd, forced_btk):
        args = (x_btd, placement, layout, None, forced_btk)
        return nnx.merge(graph, params, rest)(*args)

    if saved:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        layer = jax.checkpoint(layer, policy=policy)

    def run(params, placement, x_btd, forced_btk):
        y_btd, sums = layer(params, placement, x_btd, forced_btk)
        totals = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums)
        losses = joined(route.losses(totals, x_btd[..., 0].size, SEQ))
        return value_of(y_btd, losses), (y_btd, losses, sums)

    forward = jax.jit(layer, compiler_options=QUICK)
    return Case(cfg, layout, forward, differentiated(run), params)


@functools.cache
def make_reference(router: Router, dtype: str):
    """The same of one device, by definition."""
    cfg = config(Topology(), router=router)
    graph, _, rest = split_layer(cfg, mesh_of(Topology()))

    def run(params, placement, x_btd, forced_btk):
        layer, x_nd = nnx.merge(graph, params, rest), x_btd.reshape(-1, WIDTH)
        forced_nk = None if forced_btk is None else forced_btk.reshape(-1, TOP_K)
        args = (layer.router_de[...], layer.bias_e[...], router, TOP_K, SEQ)
        routes, score_ne, logit_ne = route.route(x_nd, *args, forced_nk)
        added = route.balance_sums(score_ne, logit_ne, routes.expert_nk, SEQ)
        totals = types.SimpleNamespace(**added)
        losses = joined(route.losses(totals, len(x_nd), SEQ))
        y_btd = reference.moe(x_nd, routes, layer.masters()).reshape(x_btd.shape)
        return value_of(y_btd, losses), (y_btd, losses)

    return differentiated(run)


def operands(batch: int, skew: str, dtype: str = "float32"):
    x_btd = np.random.default_rng(1).normal(size=(BATCH, SEQ, WIDTH)).astype(dtype)
    return x_btd[:batch], skewed_choices(skew, TOP_K)[:batch]


def home(case: Case) -> ExpertPlan:
    return ExpertPlan.home_in(case.layout, 1)


def on_mesh(case: Case, plan: ExpertPlan, args):
    """What a case's functions take."""
    mesh = mesh_of(case.cfg.mesh)
    placement = Placement.of_plan(plan.validate(case.layout), case.layout).layer(0)
    params = jax.device_put(in_order(case.params, plan.owned_le[0]), sharding(mesh))
    return params, placement, *jax.device_put(args, sharding(mesh, BATCH_AXES))


def check(case: Case, skew: str = "zipf", plan=None, dtype="float32"):
    """Against the reference; returns the layer's sums."""
    plan = plan or home(case)
    args = operands(case.cfg.train.batch_size, skew, dtype)
    (value, (y_btd, losses, sums)), grads = case.run(*on_mesh(case, plan, args))
    define = make_reference(case.cfg.router, dtype)
    (expected, outs), (d_params, d_x) = define(case.params, None, *args)
    d_params = in_order(d_params, plan.owned_le[0])
    found = (value, (y_btd, losses), grads)
    assert_close(*jax.device_get((found, (expected, outs, (d_params, d_x)))))
    assert_same_bits_along_tensor(y_btd, case.cfg.mesh)
    assert int(jnp.sum(sums.tokens_e)) == args[1].size
    assert int(jnp.sum(sums.dropped)) == 0
    return sums


def assert_same_bits_along_tensor(y_btd, mesh: Topology) -> None:
    copies = {}
    for shard in y_btd.addressable_shards:
        copies.setdefault(shard.index[0].start, []).append(np.asarray(shard.data))
    assert {len(each) for each in copies.values()} == {mesh.tensor}
    for first, *others in copies.values():
        assert all(first.tobytes() == other.tobytes() for other in others)


def cut(mp: int, esp: int, expert: int, schedule: str, **changes) -> Config:
    """Two rows per peer and device of the tensor axis: even loads take two rounds.

    Six sequences of 8 on two devices: along a tensor axis of 4 they are cut.
    """
    changes = {"rows_per_peer": 2 * mp, "batch": 6 if expert == 2 else BATCH} | changes
    mesh = Topology(expert=expert, tensor=mp)
    return config(mesh, schedule=schedule, expert_shards=esp, **changes)


ALL_ROWS = {"rows_per_peer": 4 * BATCH * SEQ * TOP_K}
"""Fit into round 0, copies of base too, and no later round is compiled."""
SCHEDULES = ("base", "s1", "s2", "s1h")
CUTS = ((2, 2, 4), (2, 1, 2), (2, 4, 4), (4, 2, 2), (1, 2, 4), (2, 2, 1), (4, 4, 2))
"""MP, ESP, expert axis."""
FIRST = {(2, 2, 4): ("s1",), (2, 4, 4): ("s1h",)}
GRID = [
    pytest.param(*sizes, name, marks=() if name in FIRST.get(sizes, ()) else ALSO)
    for sizes in CUTS
    for name in (*SCHEDULES, "local")
    if name != "local" or 1 < sizes[0] == sizes[1]
]


@pytest.mark.slow
@pytest.mark.parametrize(("mp", "esp", "expert", "schedule"), GRID)
def test_every_schedule_equals_the_reference(mp, esp, expert, schedule):
    case = make_case(cut(mp, esp, expert, schedule))
    rounds = [int(jnp.max(check(case, skew).rounds)) for skew in SKEWS]
    assert max(rounds) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mp", "esp", "expert", "schedule"),
    [
        (2, 2, 4, "local"),
        (4, 2, 2, "s2"),
        pytest.param(2, 4, 4, "base", marks=ALSO),
        pytest.param(4, 2, 2, "base", marks=ALSO),
    ],
)
def test_one_round_equals_the_reference(mp, esp, expert, schedule):
    case = make_case(cut(mp, esp, expert, schedule, **ALL_ROWS))
    assert {int(jnp.max(check(case, skew).rounds)) for skew in SKEWS} == {1}


@pytest.fixture
def doubles(monkeypatch):
    """What asks for float32, as the router does, gets float64."""
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    with jax.enable_x64(True):
        yield "float64"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mp", "esp", "expert", "schedule"),
    [(4, 2, 2, "s1h"), *(pytest.param(2, 2, 4, s, marks=ALSO) for s in SCHEDULES)],
)
def test_in_float64(doubles, mp, esp, expert, schedule):
    """To 1e-12, router and combine too: nothing is rounded to float32."""
    case = make_case(cut(mp, esp, expert, schedule), doubles)
    for skew in ("uniform", "zipf"):
        check(case, skew, dtype=doubles)


COPIES = {"offers_per_device": 4, "copies_per_device": 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "store", "split", "rows_per_peer"),
    [
        ("s1h", "resident", "water_filling", 512),
        pytest.param("s1", "transient", "even", 4, marks=ALSO),
        pytest.param("s1", "transient", "water_filling", 4, marks=ALSO),
        pytest.param("s1h", "transient", "local_first", 4, marks=ALSO),
        pytest.param("s2", "sharded", "water_filling", 4, marks=ALSO),
    ],
)
def test_replicas_change_nothing(schedule, store, split, rows_per_peer):
    """s1 and s1h have twice as many sources as owners: halves of a device's tokens."""
    changes = {"store": store, "split": split, "rows_per_peer": rows_per_peer}
    changes |= COPIES if store != "sharded" else {}
    case = make_case(cut(2, 2, 4, schedule, slots_per_device=6, **changes))
    assert case.layout.num_sources == (8 if schedule != "s2" else 4)
    odd, rng = odd_plans(case.layout, 1).values(), np.random.default_rng(0)
    for plan in (*odd, *(random_plan(rng, case.layout, 1) for _ in range(2))):
        check(case, plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [FULL, pytest.param(DISPATCH, marks=ALSO)], ids=str)
def test_recomputed_layers_are_the_same(saved):
    """When a layer saves what Model.remat = 'full' and 'dispatch' do."""
    check(make_case(cut(2, 2, 4, "s1h", **ALL_ROWS), saved=saved))


def of_capacity(expert: int, rows_per_slot: int, **changes):
    """Output, and how many choices were dropped, of a layer of this capacity."""
    changes |= {"rows_per_peer": rows_per_slot * EXPERTS // expert}
    mesh = Topology(expert=expert, tensor=changes.get("expert_shards", 1))
    case = make_case(config(mesh, exchange="capacity", **changes))
    assert case.layout.rows_per_slot == rows_per_slot
    args = operands(BATCH, "zipf")
    y_btd, sums = case.forward(*on_mesh(case, home(case), args))
    num_dropped = int(jnp.sum(sums.dropped))
    assert int(jnp.sum(sums.rows)) + num_dropped == args[1].size
    return np.asarray(y_btd), num_dropped


@pytest.mark.long
@pytest.mark.slow
def test_which_rows_a_capacity_drops():
    """s2 those that one device with all tokens of the tensor group would; s1 and s1h
    those of as many devices with a part of them each, which are others."""
    whole, num_whole = of_capacity(4, 4)
    s2, num_s2 = of_capacity(4, 4, schedule="s2", expert_shards=2)
    parts, num_parts = of_capacity(8, 2)
    s1, num_s1 = of_capacity(4, 2, schedule="s1", expert_shards=2)
    assert 0 < num_whole == num_s2
    assert 0 < num_parts == num_s1
    assert_close((s2, s1), (whole, parts))
    assert np.abs(s1 - s2).max() > 0.1 * np.abs(s2).max()


def test_expert_choice_wants_whole_sequences():
    """It chooses among the tokens of one, which s1 may cut."""
    router = Router(kind="expert_choice", allow_expert_choice_in_decoder=True)
    case = make_case(cut(4, 4, 2, "s1", router=router))
    x_btd, _ = operands(6, "zipf")
    with pytest.raises(ValueError, match="schedule") as error:
        case.forward(*on_mesh(case, home(case), (x_btd, None)))
    assert "\n" not in str(error.value)
