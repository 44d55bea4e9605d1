"""An MoE layer whose tokens are exchanged in two independent halves (Layout.halves)
equals the reference, and is the whole layer applied to each half."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.axes import BATCH_AXES, make_mesh, sharding
from moejax.balance.policies.micromoe.symmetric import symmetric
from moejax.config import Moe, Router
from moejax.moe.exchange import dispatch
from moejax.moe.layer import LayerInputs
from moejax.moe.route import ROUTES
from moejax.moe.setup import LayerSetup
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from moejax.resolve.layer import set_up
from tests.support import configured_layers
from tests.support.close import assert_close
from tests.support.configured_layers import CUTS, cut
from tests.support.configured_layers import make_case as make_configured
from tests.support.layers import (
    ALONE,
    BATCH,
    EXPERTS,
    MERGED,
    MESHES,
    MOE,
    SEQ,
    TOP_K,
    WIDTH,
    check_layer,
    compiled,
    layer_layout,
    placed,
    skewed,
    split_modules,
    zipf_choices,
)
from tests.support.random_plans import owners_alone, random_owners, random_plan

ALSO = pytest.mark.long
STORES = ("owned", "transient", "resident", "sharded")
HALF = BATCH * SEQ * TOP_K // 8 // 2
"""Rows of one half of a device's tokens."""
GRID = [
    (mesh_name, axes, store, 2)
    for mesh_name in MESHES
    for axes in (ALONE, MERGED)
    for store in STORES
    if axes == ALONE or MESHES[mesh_name].data > 1
]
GRID += [("data2_expert4", MERGED, "transient", HALF)]
FIRST = ("data2_expert4", ALONE, "transient", 2)


def some(cases, first):
    """Return the cases, all of which but `first` are long."""
    return [
        case if case == first else pytest.param(*case, marks=ALSO) for case in cases
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh_name", "axes", "store", "rows"), some(GRID, FIRST))
def test_the_layer_equals_the_reference(mesh_name, axes, store, rows):
    """Values and gradients do, with later rounds in each half where buffers are
    small."""
    topology = MESHES[mesh_name]
    sizes = {"rows_per_peer": rows, "halves": True}
    layout = layer_layout(topology, store, axes, **sizes)
    rng = np.random.default_rng(3)
    for seed in range(2):
        plan = random_plan(rng, layout, 1)
        sums = check_layer(topology, layout, plan, seed)
        assert sums.rows_h.shape == (8, 2)
        assert (np.max(sums.rounds) > 1) == (rows < HALF)
        assert np.max(sums.fullest_pair) <= HALF


TENSOR_GRID = [
    (*sizes, name)
    for sizes in CUTS
    for name in (*configured_layers.SCHEDULES, "local")
    if name != "local" or 1 < sizes[0] == sizes[1]
]


@pytest.mark.slow
@pytest.mark.parametrize(("mp", "esp", "expert", "schedule"), some(TENSOR_GRID, None))
def test_every_schedule_equals_the_reference(mp, esp, expert, schedule):
    """Router losses do too, although a half may end within a sequence."""
    batch = {"batch": 8} if expert == 2 else {}
    case = make_configured(cut(mp, esp, expert, schedule, halves=True, **batch))
    assert case.layout.halves
    for skew in ("zipf", "one_hot"):
        assert configured_layers.check(case, skew).rows_h.shape[1] == 2


@ALSO
@pytest.mark.slow
@pytest.mark.parametrize("saved", [(ROUTES,), (ROUTES, dispatch.ROWS)], ids=str)
def test_recomputed_layers_are_the_same(saved):
    case = make_configured(cut(2, 2, 4, "s1", halves=True), saved=saved)
    configured_layers.check(case)


@ALSO
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["s1", "base"])
def test_in_float64(doubles, schedule):
    """Values and gradients equal the reference to 1e-12."""
    case = make_configured(cut(2, 2, 4, schedule, halves=True), doubles)
    configured_layers.check(case, dtype=doubles)


@functools.cache
def make_forward(topology: Topology, layout: Layout):
    """Return forward(placement, x_btd, forced_btk) -> y_btd, sums of the layer."""
    mesh = make_mesh(topology)
    graph, params, rest = split_modules(mesh, MOE)
    setup = LayerSetup(MOE, Router(), WIDTH, layout, mesh)

    @compiled
    def forward(params, placement, x_btd, forced_btk):
        layer = nnx.merge(graph, params, rest)["moe"]
        return layer(x_btd, placement, setup, forced_btk=forced_btk)

    params = jax.device_put(jax.device_get(params), sharding(mesh))

    def run(placement, *args):
        args = jax.device_put(args, sharding(mesh, BATCH_AXES))
        return jax.device_get(forward(params, placement, *args))

    return run


def make_plan(layout: Layout) -> ExpertPlan:
    """Return a plan that the layout's split can use."""
    rng = np.random.default_rng(0)
    if layout.split == "dynamic":
        return owners_alone(layout, random_owners(rng, EXPERTS, 1))
    if layout.split == "water_filling":
        row_p = symmetric(EXPERTS, layout.num_devices, layout.slots_per_device)
        return ExpertPlan(row_p[None].astype(np.int32), EXPERTS)
    return random_plan(rng, layout, 1)


def in_own_halves(value_bt: np.ndarray) -> list[np.ndarray]:
    """Return the halves of each device's tokens, one sequence of which is on each."""
    return np.split(value_bt, 2, axis=1)


SPLITS = ("even", "local_first", "water_filling", "dynamic")
HALVED = [
    (mesh_name, split, exchange, rows)
    for mesh_name in ("expert8", "data2_expert4")
    for split in SPLITS
    for exchange, rows in (("exact", HALF), ("exact", 2), ("capacity", HALF // 2))
    if (split, exchange) != ("dynamic", "capacity")  # such a layout is refused
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_name", "split", "exchange", "rows"),
    some(HALVED, ("expert8", "even", "capacity", HALF // 2)),
)
def test_a_layer_in_halves_is_the_layer_of_each_half(mesh_name, split, exchange, rows):
    """Each half has its own manifest, solves its own split, and drops rows by its own
    buffer. Statistics are sums over halves, or the larger of two maxima."""
    topology = MESHES[mesh_name]
    own = EXPERTS // topology.expert
    fields = {"exchange": exchange, "split": split, "rows_per_peer": rows}
    fields["slots_per_device"] = 2 * own
    if exchange == "capacity":  # a row for each slot
        fields["rows_per_peer"] = max(rows, 2 * own)
    if split == "dynamic":
        fields["copies_per_device"] = own
    whole = layer_layout(topology, "transient", **fields)
    plan = make_plan(whole)
    in_halves = make_forward(topology, dataclasses.replace(whole, halves=True))
    of_half = make_forward(topology, whole)
    x_btd = np.random.default_rng(0).normal(size=(BATCH, SEQ, WIDTH))
    x_btd, placement = x_btd.astype(np.float32), placed(plan, whole)
    for seed in range(2):
        forced_btk = zipf_choices(seed, 1.2)
        y_btd, sums = in_halves(placement, x_btd, forced_btk)
        pairs = zip(in_own_halves(x_btd), in_own_halves(forced_btk))
        halves = [of_half(placement, *pair) for pair in pairs]
        assert_close(y_btd, np.concatenate([y for y, _ in halves], axis=1))
        for h, (_, of_one) in enumerate(halves):
            for name in ("rows_h", "bound_h"):
                both_wh, one_wh = getattr(sums, name), getattr(of_one, name)
                assert both_wh[:, h].tolist() == one_wh[:, 0].tolist(), name
        for name in ("rounds", "fullest_pair"):
            values = [getattr(of_one, name) for _, of_one in halves]
            assert getattr(sums, name).tolist() == np.maximum(*values).tolist(), name
        for name in ("tokens_e", "dropped"):
            values = [getattr(of_one, name) for _, of_one in halves]
            assert getattr(sums, name).tolist() == np.add(*values).tolist(), name
        for name in ("prob_e", "entropy", "z"):
            values = [getattr(of_one, name) for _, of_one in halves]
            assert_close(getattr(sums, name), np.add(*values))
        fullest = np.max(sums.rows_h.reshape(-1, whole.num_devices, 2), axis=1)
        assert exchange == "capacity" or (sums.bound_h[0] <= fullest.max(axis=0)).all()
        assert (exchange == "capacity") == (sums.dropped.sum() > 0)
        assert int(sums.rows_h.sum() + sums.dropped.sum()) == forced_btk.size


@ALSO
@pytest.mark.slow
def test_two_parts_are_two_halves():
    """Given parts are not cut again; each equals a call of its own."""
    topology = MESHES["expert8"]
    layout = layer_layout(topology, "owned", halves=True)
    mesh = make_mesh(topology)
    graph, params, rest = split_modules(mesh, MOE)
    setup = LayerSetup(MOE, Router(), WIDTH, layout, mesh)
    placement = placed(ExpertPlan.home_in(layout, 1), layout)
    x_btd = np.random.default_rng(0).normal(size=(2 * BATCH, SEQ, WIDTH))
    x_pbtd = x_btd.astype(np.float32).reshape(2, BATCH, SEQ, WIDTH)
    x_pbtd = [jax.device_put(x, sharding(mesh, BATCH_AXES)) for x in x_pbtd]
    forced = skewed(0), None

    @compiled
    def both(params, x_pbtd):
        layer = nnx.merge(graph, params, rest)["moe"]
        jitter = None, 1.1 * jnp.ones_like(x_pbtd[1])
        inputs = tuple(map(LayerInputs, x_pbtd, jitter, forced))
        y_pbtd, sums = layer.of_parts(inputs, placement, setup)
        alone = [
            layer(x, placement, setup, jitter_btd=j, forced_btk=f) for x, j, f in inputs
        ]
        return y_pbtd, sums, alone

    y_pbtd, sums, alone = jax.device_get(both(params, x_pbtd))
    assert sums.rows_h.shape == (8, 2)
    for h, (y_btd, of_one) in enumerate(alone):
        assert_close(y_pbtd[h], y_btd)
        assert of_one.rows_h.shape == (8, 2), "a single part is cut"
        assert sums.rows_h[:, h].tolist() == of_one.rows_h.sum(axis=1).tolist()


def test_an_odd_number_of_tokens_is_refused_in_one_line():
    mesh = jax.make_mesh((8,), ("expert",))
    moe = Moe(num_experts=EXPERTS, top_k=TOP_K, d_expert=8, halves=True)
    words = r"cuts the 3 tokens .* Moe\.halves = False"
    with pytest.raises(ValueError, match=words):
        set_up(moe, mesh, (8, 3, WIDTH))
    setup = set_up(moe, mesh, (8, 4, WIDTH))
    x_btd = jax.ShapeDtypeStruct((8, 3, WIDTH), jnp.float32)
    with pytest.raises(ValueError, match=words):
        setup.check(x_btd, setup.place().layer(0))


def test_the_buffer_of_a_half_has_half_the_rows():
    fields = {"num_experts": EXPERTS, "num_devices": 8, "assignments_per_device": 512}
    whole, half = (Layout.home(**fields, halves=halves) for halves in (False, True))
    assert (whole.num_exchanges, half.num_exchanges) == (1, 2)
    assert 2 * half.rows_per_peer == whole.rows_per_peer
    assert not half.has_loops(8 * half.rows_per_peer // 8)
