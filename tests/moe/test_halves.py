"""An MoE layer whose tokens are exchanged in two independent halves (Layout.halves) is
the whole layer applied to each half. test_equals_reference.py compares it with the
reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.axes import BATCH_AXES, make_mesh, sharding
from moejax.balance.policies.micromoe.symmetric import symmetric
from moejax.config import Moe, Router
from moejax.moe.layer import LayerInputs, moe_layer_of_parts
from moejax.moe.setup import LayerSetup
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.resolve.layer import set_up
from tests.support.close import assert_close
from tests.support.layers import (
    EXPERTS,
    MESHES,
    MOE,
    SEQ,
    TOP_K,
    WIDTH,
    compiled,
    layer_layout,
    make_layer,
    on_mesh,
    placed,
    skewed_choices,
    split_layer,
    zipf_choices,
)
from tests.support.random_plans import owners_alone, random_owners, random_plan

BATCH = 8
"""One sequence for each device."""
HALF = BATCH * SEQ * TOP_K // 8 // 2
"""Rows of one half of a device's tokens."""


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


CASES = [
    ("expert8", "even", "capacity", HALF // 2),
    ("data2_expert4", "local_first", "exact", 2),
    ("expert8", "water_filling", "capacity", HALF // 2),
    ("data2_expert4", "water_filling", "exact", HALF),
    ("expert8", "dynamic", "exact", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_name", "split", "exchange", "rows"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.long) for case in CASES[1:])],
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
    in_halves = make_layer(topology, dataclasses.replace(whole, halves=True))
    of_half = make_layer(topology, whole)
    x_btd = np.random.default_rng(0).normal(size=(BATCH, SEQ, WIDTH))
    x_btd = x_btd.astype(np.float32)
    for seed in range(2):
        forced_btk = zipf_choices(seed, 1.2)[:BATCH]
        y_btd, sums = forward(in_halves, plan, x_btd, forced_btk)
        pairs = zip(in_own_halves(x_btd), in_own_halves(forced_btk))
        halves = [forward(of_half, plan, *pair) for pair in pairs]
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


def forward(layer, plan: ExpertPlan, *args):
    """Return the output and the sums of a layer."""
    return jax.device_get(layer.forward(*on_mesh(layer, plan, args)))


@pytest.mark.long
@pytest.mark.slow
def test_two_parts_are_two_halves():
    """Given parts are not cut again; each equals a call of its own."""
    topology = MESHES["expert8"]
    layout = layer_layout(topology, "owned", halves=True)
    mesh = make_mesh(topology)
    graph, params, rest = split_layer()
    setup = LayerSetup(MOE, Router(), WIDTH, layout, mesh)
    placement = placed(ExpertPlan.home_in(layout, 1), layout)
    x_btd = np.random.default_rng(0).normal(size=(2 * BATCH, SEQ, WIDTH))
    x_pbtd = x_btd.astype(np.float32).reshape(2, BATCH, SEQ, WIDTH)
    x_pbtd = [jax.device_put(x, sharding(mesh, BATCH_AXES)) for x in x_pbtd]
    forced = skewed_choices("zipf")[:BATCH], None

    @compiled
    def both(params, x_pbtd):
        layer = nnx.merge(graph, params, rest)
        jitter = None, 1.1 * jnp.ones_like(x_pbtd[1])
        inputs = tuple(map(LayerInputs, x_pbtd, jitter, forced))
        y_pbtd, sums = moe_layer_of_parts(layer.params(), inputs, placement, setup)
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
