"""Test laws of every policy: plans are valid, deterministic, made layer by layer, never
slower than before, and made quickly."""

import dataclasses
import itertools

import numpy as np
import pytest

from moejax.balance.policies import POLICIES, prophet
from moejax.balance.policies.flexmoe import policy as flexmoe
from moejax.balance.policies.flexmoe.replicas import put, start
from moejax.perf.cost_model import NOTES, tight
from moejax.perf.traffic import (
    device_rows,
    max_over_mean,
    pair_rows,
    rows_by_slot,
)
from moejax.plan.expert_plan import EMPTY, ExpertPlan
from moejax.plan.layout import Layout
from tests.support.close import assert_close

NAMES = sorted(POLICIES)
FREE = dataclasses.replace(NOTES, bytes_per_expert=0.0)
ENDLESS = dataclasses.replace(NOTES, bytes_per_expert=float("inf"))
CASES = [(n, s) for n in NAMES for s in POLICIES[n].stores]


def make_layout(name, store, sizes=(16, 4), spare=2, budgets=None) -> Layout:
    """Return a layout that a policy plans for.

    A policy with replicas gets `spare` more slots than experts. Budgets (offers,
    copies) admit everything unless they are given.
    """
    policy, (num_experts, w) = POLICIES[name], sizes
    own = num_experts // w
    slots = own + (spare if policy.has_replicas else 0)
    offers, copies = budgets or (own, slots)
    if store not in ("transient", "resident"):
        offers = copies = 0
    return Layout(
        num_experts, w, slots, 64, "ragged" if w > 1 else "local", store=store,
        split=policy.split, prefetch=policy.prefetches(store),
        offers_per_device=offers, copies_per_device=copies,
    )  # fmt: skip


def loads(num_layers=3, sizes=(16, 4)) -> dict[str, np.ndarray]:
    """Return loads [l, w, e] by name: random ones, and extreme cases."""
    rng = np.random.default_rng(5)
    num_experts, w = sizes
    zipf_e = 1 / np.arange(1, num_experts + 1) ** 1.2
    shuffled_le = np.stack([rng.permutation(zipf_e) for _ in range(num_layers)])
    one_hot = np.zeros((num_layers, w, num_experts))
    one_hot[:, :, 3] = 4000
    one_source = np.zeros((num_layers, w, num_experts))
    one_source[:, 1] = 20000 * shuffled_le
    few = np.zeros((num_layers, w, num_experts))
    few[:, 2, 5] = 1
    return {
        "zipf": rng.poisson(20000 * shuffled_le[:, None], (num_layers, w, num_experts)),
        "fractions": rng.random((num_layers, w, num_experts)) ** 8,
        "one hot": one_hot,
        "one source": one_source,
        "one row": few,
        "none": np.zeros((num_layers, w, num_experts)),
    }


def home_plan(layout: Layout, num_layers: int = 3) -> ExpertPlan:
    """Return the home plan of a layout."""
    return ExpertPlan.home_in(layout, num_layers)


def layer_ratio(load_we, row_p, layout) -> float:
    """Return max/mean of the devices in one layer."""
    rows_wp = rows_by_slot(load_we, row_p, layout.num_devices, layout.split)
    return max_over_mean(device_rows(rows_wp))


def own_sec(cost, load_we, plan, layer, layout) -> float:
    """Return the modelled time of one layer, with the budgets that this layer needs."""
    alone = ExpertPlan(
        plan.slot_to_expert_lp[layer : layer + 1],
        plan.num_experts,
        plan.owned_le[layer : layer + 1],
    )
    return cost.layer_sec(load_we, alone.slot_to_expert_lp[0], tight(layout, alone))


@pytest.mark.parametrize("budgets", [None, (0, 0), (2, 1)])
@pytest.mark.parametrize(("name", "store"), CASES)
def test_every_plan_is_valid_and_the_same_again(name, store, budgets):
    """Plans are valid for their layout and its budgets, from home and from the plan
    before; the same arguments give the same plan."""
    layout = make_layout(name, store, budgets=budgets)
    make_plan, current = POLICIES[name].plan, home_plan(layout)
    for load_lwe in loads().values():
        plan = make_plan(load_lwe, layout, FREE, current).validate(layout)
        assert plan == make_plan(load_lwe.copy(), layout, FREE, current)
        current = plan


@pytest.mark.parametrize("sizes", [(6, 3), (8, 8), (4, 1)])
@pytest.mark.parametrize(("name", "store"), CASES)
def test_plans_of_other_sizes_are_valid(name, store, sizes):
    rng = np.random.default_rng(6)
    for spare in (0, 1, 9):
        layout = make_layout(name, store, sizes, spare)
        load_lwe = rng.pareto(0.7, (2, sizes[1], sizes[0]))
        home = home_plan(layout, 2)
        POLICIES[name].plan(load_lwe, layout, FREE, home).validate(layout)


@pytest.mark.parametrize(("name", "store"), CASES)
def test_layers_are_planned_alone(name, store):
    layout = make_layout(name, store)
    load_lwe, home = loads()["zipf"], home_plan(layout)
    plan = POLICIES[name].plan(load_lwe, layout, NOTES, home)
    for layer in range(3):
        alone = POLICIES[name].plan(
            load_lwe[layer : layer + 1], layout, NOTES, home_plan(layout, 1)
        )
        assert np.array_equal(alone.slot_to_expert_lp[0], plan.slot_to_expert_lp[layer])
        assert np.array_equal(alone.owned_le[0], plan.owned_le[layer])


@pytest.mark.parametrize("name", ["prophet", "flexmoe"])
def test_the_modelled_time_never_rises(name):
    """The modelled time of a plan, at the budgets that it needs, is at most that of the
    plan before; for flexmoe this holds from any current plan."""
    for store in POLICIES[name].stores:
        layout = make_layout(name, store)
        current = home_plan(layout)
        for load_lwe in loads().values():
            plan = POLICIES[name].plan(load_lwe, layout, NOTES, current)
            for layer, load_we in enumerate(load_lwe):
                before = own_sec(NOTES, load_we, current, layer, layout)
                after = own_sec(NOTES, load_we, plan, layer, layout)
                assert after <= before * (1 + 1e-9)
            current = plan if name == "flexmoe" else current


def test_smartmoe_never_fills_the_fullest_device_further():
    layout = make_layout("smartmoe", "owned")
    current, num_moved = home_plan(layout), 0
    for load_lwe in loads().values():
        plan = POLICIES["smartmoe"].plan(load_lwe, layout, NOTES, current)
        for layer, load_we in enumerate(load_lwe):
            old_p, new_p = (x.slot_to_expert_lp[layer] for x in (current, plan))
            before, after = (layer_ratio(load_we, p, layout) for p in (old_p, new_p))
            assert after < before or np.array_equal(old_p, new_p)
            num_moved += after < before
        current = plan
    assert num_moved > 3


@pytest.mark.parametrize("name", ["fastermoe", "prophet", "flexmoe", "eplb", "laer"])
def test_free_copies_balance_a_hot_expert_and_infinitely_dear_ones_are_not_made(name):
    """If copies are free and one expert has all rows, every device computes the same
    number of rows. EPLB and LAER count no cost of copies, for theirs travel anyway."""
    layout = make_layout(name, POLICIES[name].stores[0])
    home = home_plan(layout)
    for load_lwe in loads().values():
        dear = POLICIES[name].plan(load_lwe, layout, ENDLESS, home)
        assert dear == home or name in ("eplb", "laer")
    load_lwe = loads()["one hot"]
    plan = POLICIES[name].plan(load_lwe, layout, FREE, home)
    for load_we, row_p in zip(load_lwe, plan.slot_to_expert_lp):
        assert layer_ratio(load_we, row_p, layout) == pytest.approx(1)


@pytest.mark.parametrize(("name", "store"), CASES)
def test_a_balanced_load_changes_nothing(name, store):
    layout = make_layout(name, store)
    load_lwe, home = np.full((3, 4, 16), 50.0), home_plan(layout)
    plan = POLICIES[name].plan(load_lwe, layout, NOTES, home)
    assert name in ("eplb", "laer") or plan == home
    assert POLICIES[name].plan(load_lwe, layout, NOTES, plan) == plan


@pytest.mark.parametrize("name", ["fastermoe", "prophet"])
def test_a_shadow_has_one_slot_on_every_device_but_its_owner(name):
    """Budgets are used: with one offer and two copies, an owner offers one expert and a
    device holds two copies."""
    layout = make_layout(name, "transient", spare=4)
    plan = POLICIES[name].plan(loads()["zipf"], layout, FREE, home_plan(layout))
    num_shadows = 0
    for row_p in plan.slot_to_expert_lp:
        row_ws = row_p.reshape(4, 8)
        assert np.array_equal(row_ws[:, :4].reshape(-1), np.arange(16))
        for column_w in row_ws[:, 4:].T:
            expert = column_w.max()
            if expert != EMPTY:
                want_w = np.where(np.arange(4) == expert // 4, EMPTY, expert)
                assert np.array_equal(column_w, want_w)
                num_shadows += 1
    assert num_shadows > 3
    tight_layout = make_layout(name, "transient", spare=4, budgets=(1, 2))
    plan = POLICIES[name].plan(
        loads()["zipf"], tight_layout, FREE, home_plan(tight_layout)
    )
    assert plan.validate(tight_layout).needs(4)[:2] == (1, 2)


def test_prophet_copies_more_where_copies_are_prefetched():
    layout = make_layout("prophet", "transient", spare=4)
    load_lwe, home = loads()["zipf"], home_plan(layout)
    dear = dataclasses.replace(NOTES, bytes_per_expert=3 * NOTES.bytes_per_expert)
    exposed = dataclasses.replace(layout, prefetch=False)
    hidden, seen = (prophet.plan(load_lwe, x, dear, home) for x in (layout, exposed))
    count = [np.sum(p.slot_to_expert_lp >= 0) for p in (hidden, seen)]
    assert count[0] > count[1]


@pytest.mark.parametrize("store", ["resident", "sharded"])
def test_flexmoe_separates_two_hot_experts_by_exchange(store):
    """With as many slots as experts, hot experts 0 and 1 are separated by exchanging
    one of them for a cold expert."""
    layout = make_layout("flexmoe", store, sizes=(8, 4), spare=0)
    load_lwe = np.full((1, 4, 8), 10.0)
    load_lwe[..., :2] = 20000
    plan = POLICIES["flexmoe"].plan(load_lwe, layout, NOTES, home_plan(layout, 1))
    row_p = plan.validate(layout).slot_to_expert_lp[0]
    assert sorted(row_p) == list(range(8))
    device_p = np.arange(8) // 2
    assert device_p[row_p == 0] != device_p[row_p == 1]
    assert layer_ratio(load_lwe[0], row_p, layout) < 2.01  # from 4


@pytest.mark.parametrize("store", ["resident", "sharded"])
def test_flexmoe_gives_slots_of_a_cooled_expert_to_the_hot_one(store):
    """The spare slots hold expert 0, which was hot, and go to expert 5, which is hot
    now."""
    layout = make_layout("flexmoe", store, sizes=(8, 4), spare=1)
    hot_lwe = np.full((2, 1, 4, 8), 500.0)
    hot_lwe[0, ..., 0] = hot_lwe[1, ..., 5] = 30000
    first = POLICIES["flexmoe"].plan(hot_lwe[0], layout, NOTES, home_plan(layout, 1))
    second = POLICIES["flexmoe"].plan(hot_lwe[1], layout, NOTES, first)
    for expert, plan, load_lwe in ((0, first, hot_lwe[0]), (5, second, hot_lwe[1])):
        row_p = plan.validate(layout).slot_to_expert_lp[0]
        assert np.sum(row_p == expert) >= 3
        assert layer_ratio(load_lwe[0], row_p, layout) < 1.4


def test_flexmoe_keeps_a_balanced_plan_and_otherwise_starts_from_home():
    layout = make_layout("flexmoe", "resident")
    load_lwe = loads()["one hot"]
    plan = POLICIES["flexmoe"].plan(load_lwe, layout, FREE, home_plan(layout))
    assert plan != home_plan(layout)
    assert POLICIES["flexmoe"].plan(load_lwe, layout, NOTES, plan) == plan
    none = dataclasses.replace(layout, offers_per_device=0, copies_per_device=0)
    assert POLICIES["flexmoe"].plan(load_lwe, none, FREE, plan) == home_plan(none)


def test_eplb_never_puts_two_replicas_of_one_expert_on_a_device():
    rng = np.random.default_rng(9)
    for spare in (1, 2, 5, 12, 15):
        layout = make_layout("eplb", "sharded", spare=spare)
        load_lwe = rng.pareto(0.6, (20, 4, 16))
        plan = POLICIES["eplb"].plan(load_lwe, layout, NOTES, home_plan(layout, 20))
        for row_ws in plan.slot_to_expert_lp.reshape(20 * 4, -1):
            held = row_ws[row_ws >= 0].tolist()
            assert len(set(held)) == len(held)
        # 64 replicas are one of each expert on each of four devices
        filled_l = np.sum(plan.slot_to_expert_lp >= 0, axis=1)
        assert np.array_equal(filled_l, np.full(20, min(4 * (4 + spare), 64)))


STEPS_OF_FLEXMOE = ("expand", "migrate", "shrink", "displace")


def test_each_step_of_flexmoe_lowers_the_norm_of_device_times(monkeypatch):
    """A step does what it predicts: the norm falls by MIN_GAIN at least, so that the
    search ends."""
    ratios = {name: [] for name in STEPS_OF_FLEXMOE}

    def norm(state):
        return float(flexmoe._power(state.time_w).sum())

    def watched(name, step):
        def take(state, num_copies):
            before = norm(state)
            if is_taken := step(state, num_copies):
                ratios[name].append(norm(state) / before)
                assert ratios[name][-1] < 1, f"{name} raises the norm"
            return is_taken

        return take

    for name in STEPS_OF_FLEXMOE:
        monkeypatch.setattr(flexmoe, name, watched(name, getattr(flexmoe, name)))
    rng = np.random.default_rng(0)
    for own, w, spare in itertools.product((1, 2, 4), (2, 8), (1, 2)):
        slots = min(own + spare, own * w)
        for offers in range(1, own + 1):
            layout = Layout(
                own * w, w, slots, 256, store="resident", offers_per_device=offers,
                copies_per_device=max(slots - own, 1),
            )  # fmt: skip
            plan = ExpertPlan.home_in(layout, 1)
            for _ in range(4):
                share_e = rng.pareto(1.0, own * w)
                load_lwe = rng.poisson(50 * share_e, (1, w, own * w)).astype(float)
                plan = flexmoe.plan(load_lwe, layout, FREE, plan)
    assert flexmoe._power(np.array([2.0])) == 2.0**flexmoe.POWER
    most = (1 - flexmoe.MIN_GAIN) ** flexmoe.POWER * (1 + 1e-9)
    for name, found in ratios.items():
        assert len(found) > 5, f"{name} was hardly taken"
        assert max(found) < most, name


def test_flexmoe_puts_a_hot_expert_in_place_of_a_cold_replica():
    """All slots are full. Expert 1 has few rows and a replica on each device, and
    expert 3, which has most, gets its slot on device 0."""
    load_we = np.array([[10.0, 4, 10, 150], [10, 4, 10, 150]])
    row_p = np.array([0, 1, 2, 2, 3, 1], np.int32)
    state = start(load_we, row_p, np.array([3.0, 0.0]), np.zeros((3, 3)))
    assert flexmoe.shrink(state, 2)
    assert state.row_ws.tolist() == [[0, 3, 2], [2, 3, 1]]


def test_the_state_of_flexmoe_is_that_of_its_slots():
    """Rows that devices compute, receive and send are those of an even split. After
    each change of a slot the state is that of a new start, and knows the plan's needs.
    """
    rng = np.random.default_rng(2)
    load_we, per_row_sec, sync_oc = rng.random((4, 8)), np.array([3.0, 4.0]), np.eye(4)
    row_p = np.array([0, 1, -1, 2, 3, 0, 4, 5, 0, 6, 7, 4], np.int32)
    state = start(load_we, row_p, per_row_sec, sync_oc)
    for _ in range(40):
        device, slot, expert = rng.integers(4), rng.integers(3), rng.integers(-1, 8)
        old = state.row_ws[device, slot]
        if old == EMPTY or (old != expert and state.replicas_e[old] > 1):
            put(state, device, slot, int(expert))
        row_p = state.row_ws.reshape(-1)
        pair_ww = pair_rows(rows_by_slot(load_we, row_p, 4)) * 4 / load_we.sum()
        stay_w, computed_w = np.diag(pair_ww), pair_ww.sum(axis=0)
        rows_kw = [computed_w, computed_w - stay_w, pair_ww.sum(axis=1) - stay_w]
        assert_close(state.rows_kw, np.array(rows_kw))
        needs = state.offers_w.max(), state.copies_w.max()
        assert ExpertPlan(row_p[None], 8).needs(4)[:2] == needs
        fresh = start(load_we, row_p, per_row_sec, sync_oc)
        assert_close(dataclasses.asdict(state), dataclasses.asdict(fresh))
