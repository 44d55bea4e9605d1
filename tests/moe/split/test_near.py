"""Water-filling that weighs rows on wires: near the linear program of MicroMoE's
equation 4 (HiGHS), never worse than without, both margins exact; a node step keeps rows
in their node."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from scipy.optimize import linprog

from moejax.axes import BATCH_AXES, sharding
from moejax.config import Balance, Config, Mesh, Moe
from moejax.kernels.water_fill.near import POWER, PULL_UNITS, even_costs, tier_cost
from moejax.moe.split import near
from moejax.moe.split.deal import active, deal
from moejax.moe.split.divide import water_filling
from moejax.moe.split.water_filling import cells, fill
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.wire import WIRE_UNITS, Wire
from tests.moe.split.test_deal import any_rows
from tests.moe.split.test_splits_in_layer import (
    ALONE,
    EIGHT,
    choices,
    layout_of,
    make_layer,
    plan_of,
)
from tests.moe.test_layer import WIDTH
from tests.moe.weights.test_stores import PULL_BTD, in_order, make_reference
from tests.plan.test_water_filling import optimum
from tests.support.close import assert_close
from train import layouts

NEAR, FAR = 0.125, 1.0
SHAPES = ((8, 4, 2, 16), (8, 2, 4, 8), (16, 4, 3, 16))
"""Devices, those of a node, replicas and experts."""


def instance(seed: int):
    """counts_we, slots and the layout; 256 rows a device, which has favourites."""
    rng = np.random.default_rng(seed)
    w, per_node, replicas, e = SHAPES[seed % len(SHAPES)]
    rounds = np.stack([rng.permutation(e) for _ in range(replicas)])
    row_p = rounds.reshape(replicas, w, -1).swapaxes(0, 1).reshape(-1).astype(np.int32)
    share_e = rng.permutation((1.0 + np.arange(e)) ** -rng.uniform(0.2, 1.2))
    share_e = share_e / share_e.sum()
    counts_we = [rng.multinomial(256, rng.dirichlet(4 * e * share_e)) for _ in range(w)]
    wire = Wire(per_node, NEAR, FAR)
    layout = Layout(
        e, w, len(row_p) // w, 2**20, store="sharded", split="water_filling", wire=wire
    )
    return np.array(counts_we, np.int32), row_p, layout


def placed(row_p: np.ndarray, layout: Layout) -> Placement:
    plan = ExpertPlan(row_p[None], layout.num_experts).validate(layout)
    return Placement.of_plan(plan, layout).layer(0)


@functools.cache
def compiled(function, layout: Layout):
    return jax.jit(functools.partial(function, layout=layout))


def dealt(counts_we, row_p, layout: Layout) -> np.ndarray:
    """Rows from each source to each slot by number."""
    placement = placed(row_p, layout)
    division = compiled(water_filling, layout)(counts_we, placement)
    assert int(division.bound) == optimum(counts_we.sum(axis=0), row_p, len(counts_we))
    quota_wq = np.asarray(division.quota_wq)
    quota_wp = np.empty_like(quota_wq)
    quota_wp[:, placement.slot_lq] = quota_wq
    return quota_wp


def weights_ww(layout: Layout) -> np.ndarray:
    device_w = np.arange(layout.num_devices)
    node_w = device_w // layout.wire.devices_per_node
    weight_ww = np.where(node_w[:, None] == node_w, NEAR, FAR)
    return np.where(device_w[:, None] == device_w, 0, weight_ww)


def objective(pair_ww: np.ndarray, weight_ww: np.ndarray) -> float:
    """Equation 4: rows from sources to devices, and what their ways weigh."""
    paid_ww = pair_ww * weight_ww
    most = max(paid_ww.sum(axis=0).max(), paid_ww.sum(axis=1).max())
    return pair_ww.sum(axis=0).max() + most


def least(counts_we, row_p, layout: Layout) -> float:
    """The optimum of equation 4 over flows from sources to replicas, by HiGHS."""
    w, weight_ww = layout.num_devices, weights_ww(layout)
    device_p = np.arange(len(row_p)) // layout.slots_per_device
    source_x, slot_x = np.nonzero(counts_we[:, row_p])
    number, device_x = np.arange(len(source_x)), device_p[slot_x]
    weight_x, one_x = weight_ww[source_x, device_x], np.ones(len(source_x))
    end = len(source_x)  # then come the fullest device, and the most on wires
    limits = scipy.sparse.csr_matrix(
        (
            np.r_[one_x, weight_x, weight_x, -np.ones(3 * w)],
            (
                np.r_[device_x, w + device_x, 2 * w + source_x, np.arange(3 * w)],
                np.r_[number, number, number, np.repeat([end, end + 1, end + 1], w)],
            ),
        )
    )
    row_x = source_x * layout.num_experts + row_p[slot_x]
    shape = (counts_we.size, end + 2)
    sums = scipy.sparse.csr_matrix((one_x, (row_x, number)), shape=shape)
    found = linprog(
        np.r_[np.zeros(end), 1, 1], A_ub=limits, b_ub=np.zeros(3 * w), A_eq=sums,
        b_eq=counts_we.reshape(-1), method="highs-ipm",
    )  # fmt: skip
    assert found.status == 0, found.message
    return found.fun


def pairs(quota_wp: np.ndarray) -> np.ndarray:
    return quota_wp.reshape(len(quota_wp), len(quota_wp), -1).sum(axis=2)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [20, pytest.param(60, marks=pytest.mark.long)])
def test_objective_is_near_the_linear_program_and_never_over_the_plain_split(seeds):
    ratios, far_rows = [], []
    for seed in range(seeds):
        counts_we, row_p, layout = instance(seed)
        weight_ww = weights_ww(layout)
        plain = dealt(counts_we, row_p, dataclasses.replace(layout, wire=None))
        quota_wp = dealt(counts_we, row_p, layout)
        assert quota_wp.min() >= 0
        for expert in range(layout.num_experts):
            from_w = quota_wp[:, row_p == expert].sum(axis=1)
            assert np.array_equal(from_w, counts_we[:, expert])
        found = [objective(pairs(q_wp), weight_ww) for q_wp in (quota_wp, plain)]
        ratios.append(np.array([*found, found[0]]) / least(counts_we, row_p, layout))
        ratios[-1][2] = found[0] / found[1]
        is_far_ww = weight_ww == FAR
        far_rows.append([pairs(q_wp)[is_far_ww].sum() for q_wp in (quota_wp, plain)])
    ours, without, to_plain = np.array(ratios).T
    assert to_plain.max() <= 1
    assert to_plain.mean() < 0.98
    assert ours.mean() < 1.06 < without.mean()
    assert ours.max() < 1.15
    of_us, of_plain = np.sum(far_rows, axis=0)
    assert of_us < 0.8 * of_plain


@pytest.mark.long
def test_sweeps_lessen_the_sum_of_powers():
    for seed in range(6):
        counts_we, row_p, layout = instance(seed)
        costs = [after(counts_we, placed(row_p, layout), layout, n) for n in range(5)]
        power_n = [np.sum((cost_w / costs[0].max()) ** POWER) for cost_w in costs]
        rounding = power_n[0] / PULL_UNITS
        assert np.all(np.diff(power_n) <= rounding)
        assert power_n[-1] < power_n[0] - rounding
        assert costs[-1].max() <= costs[0].max()


def after(counts_we, placement: Placement, layout: Layout, sweeps: int) -> np.ndarray:
    """What devices pay in the model of the sweeps, after so many from water-filling."""
    filled = compiled(fill, layout)(counts_we.sum(axis=0), placement, tolerance=0)
    result = swept(layout)(counts_we, filled.rows_q, placement, sweeps)
    return np.asarray(result.cost_w)


@functools.cache
def swept(layout: Layout, prices=None):
    @jax.jit
    def run(counts_we, rows_q, placement, sweeps):
        _, device_q, is_active_q = active(placement, layout)
        expert_q = jnp.maximum(placement.expert_lq, 0)
        room_jq, costs = near.rooms(counts_we, placement, layout), layout.wire.costs
        cost_q = jnp.where(is_active_q, tier_cost(rows_q, room_jq, prices or costs), 0)
        return even_costs(
            cells(expert_q, placement, layout, empty=-1),
            cells(rows_q, placement, layout),
            jnp.stack([cells(room_q, placement, layout) for room_q in room_jq]),
            jnp.zeros(layout.num_devices, jnp.int32).at[device_q].add(cost_q),
            prices or costs,
            placement.num_colours_l,
            sweeps,
        )

    return run


def test_with_equal_prices_the_fullest_device_has_no_more_than_plain():
    equal = (WIRE_UNITS,) * 3
    for seed in range(6):
        counts_we, row_p, layout = instance(seed)
        placement, load_e = placed(row_p, layout), counts_we.sum(axis=0)
        plain = compiled(fill, layout)(load_e, placement, tolerance=0)
        result = swept(layout, equal)(counts_we, plain.rows_q, placement, 8)
        cost_w = np.asarray(result.cost_w)
        assert cost_w.sum() == WIRE_UNITS * load_e.sum()
        assert cost_w.max() == WIRE_UNITS * optimum(load_e, row_p, len(cost_w))


@pytest.mark.parametrize("rows_per_peer", [8, 2**20])
def test_rows_stay_in_their_node_as_far_as_both_margins_allow(rows_per_peer):
    for seed in range(6):
        counts_we, row_p, layout = instance(seed)
        layout = dataclasses.replace(layout, rows_per_peer=rows_per_peer)
        placement, rows_p = placed(row_p, layout), any_rows(counts_we, row_p, seed)
        rows_q = rows_p[placement.slot_lq].astype(np.int32)
        quota_wq = np.asarray(compiled(deal, layout)(counts_we, rows_q, placement))
        assert quota_wq.min() >= 0
        assert np.array_equal(quota_wq.sum(axis=0), rows_q)
        per_node = layout.wire.devices_per_node
        node_q = placement.slot_lq // layout.slots_per_device // per_node
        for expert in range(layout.num_experts):
            is_its_q = placement.expert_lq == expert
            assert np.array_equal(
                quota_wq[:, is_its_q].sum(axis=1), counts_we[:, expert]
            )
            for node in range(layout.num_devices // per_node):
                here, its_q = slice(node * per_node, (node + 1) * per_node), is_its_q
                its_q = its_q & (node_q == node)
                most = min(counts_we[here, expert].sum(), rows_q[its_q].sum())
                assert quota_wq[here, its_q].sum() == most


@pytest.mark.long
def test_the_layer_is_its_definition():
    wire = Wire(4, NEAR, FAR)
    layout = layout_of(EIGHT, ALONE, "resident", "water_filling", wire=wire)
    mesh, step, params = make_layer(EIGHT, layout)
    plan = plan_of(layout)
    placement = Placement.of_plan(plan.validate(layout), layout).layer(0)
    x_btd = np.random.default_rng(0).normal(size=PULL_BTD.shape).astype(np.float32)
    args = jax.device_put((x_btd, choices(0, 1.0)), sharding(mesh, BATCH_AXES))
    params_owned = in_order(params, plan.owned_le[0])
    (_, (y_btd, _)), grads = step(params_owned, placement, *args)
    (_, y_nd), expected = make_reference()(params, *args)
    assert_close(y_btd.reshape(-1, WIDTH), y_nd)
    expected = (in_order(expected[0], plan.owned_le[0]), expected[1])
    assert_close(jax.device_get(grads), jax.device_get(expected))


def run_config(**moe) -> Config:
    return Config(
        mesh=Mesh(expert=4), moe=Moe(**moe), balance=Balance(policy="micromoe")
    )


def test_a_run_has_a_wire_where_a_weight_is_set_and_a_checkpoint_keeps_it():
    assert layouts.layout_of(run_config(devices_per_node=2)).wire is None
    layout = layouts.layout_of(run_config(far_weight=FAR))
    assert layout.wire == Wire(4, 0.0, FAR)
    assert Layout(**json.loads(json.dumps(dataclasses.asdict(layout)))) == layout


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        ({"near_weight": 0.1, "far_weight": 1.0}, ["near_weight=0.1", "1/16", "0.125"]),
        ({"near_weight": 2.0, "far_weight": 1.0}, ["near_weight=2.0", "near <= far"]),
        ({"far_weight": 16.0}, ["far_weight=16.0", "<= 15"]),
        ({"far_weight": -1.0}, ["far_weight=-1.0", "at least 0"]),
        ({"far_weight": 1.0, "devices_per_node": 3}, ["=3 must divide", "axis (4)"]),
        ({"far_weight": 1.0, "devices_per_node": 0}, ["devices_per_node=0"]),
        ({"far_weight": 1.0, "split": "even"}, ["split='water_filling'", "'even'"]),
    ],
)
def test_complaint_names_the_rule_the_value_and_what_to_do(moe, words):
    with pytest.raises(ValueError) as error:
        layouts.layout_of(run_config(**moe))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_wire_without_weights_is_refused():
    with pytest.raises(ValueError, match=r"far_weight=0\.0 .* far above 0"):
        Wire(2, 0.0, 0.0)
