"""Laws of every policy: valid, deterministic, layer by layer, never dearer, quick."""

import dataclasses
import time

import numpy as np
import pytest

from moejax.balance.policies import POLICIES, check_policy, prophet
from moejax.perf.cost_model import NOTES, tight
from moejax.perf.traffic import device_rows, max_over_mean, rows_by_slot
from moejax.plan.expert_plan import EMPTY, ExpertPlan, find_copies
from moejax.plan.layout import Layout

NAMES = sorted(POLICIES)
FREE = dataclasses.replace(NOTES, bytes_per_expert=0.0)
ENDLESS = dataclasses.replace(NOTES, bytes_per_expert=float("inf"))
CASES = [(n, s) for n in NAMES for s in POLICIES[n].stores]


def layout_of(name, store, sizes=(16, 4), spare=2, budgets=None) -> Layout:
    """What `name` plans for: `spare` slots more than experts where it has replicas, and
    budgets (offers, copies) that bind nothing unless given."""
    policy, (num_experts, w) = POLICIES[name], sizes
    own = num_experts // w
    slots = own + (spare if policy.has_replicas else 0)
    offers, copies = budgets or (own, slots)
    if store not in ("transient", "resident"):
        offers = copies = 0
    return Layout(
        num_experts,
        w,
        slots,
        64,
        transport="ragged",
        store=store,
        split=policy.split,
        prefetch=policy.prefetch and store == "transient",
        offers_per_device=offers,
        copies_per_device=copies,
    )


def loads(num_layers=3, sizes=(16, 4)) -> dict[str, np.ndarray]:
    """Load_lwe by name: drawn, and the extremes."""
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


def home_of(layout: Layout, num_layers: int = 3) -> ExpertPlan:
    return ExpertPlan.home_in(layout, num_layers)


def layer_ratio(load_we, row_p, layout) -> float:
    rows_wp = rows_by_slot(load_we, row_p, layout.num_devices, layout.split)
    return max_over_mean(device_rows(rows_wp))


def own_sec(cost, load_we, plan, layer, layout) -> float:
    """One layer's modelled time, with budgets of what that layer needs."""
    alone = ExpertPlan(
        plan.slot_to_expert_lp[layer : layer + 1],
        plan.num_experts,
        plan.owned_le[layer : layer + 1],
    )
    return cost.layer_sec(load_we, alone.slot_to_expert_lp[0], tight(layout, alone))


@pytest.mark.parametrize("budgets", [None, (0, 0), (1, 1), (2, 1)])
@pytest.mark.parametrize(("name", "store"), CASES)
def test_every_plan_is_valid_and_the_same_again(name, store, budgets):
    """For its layout, budgets too; a plan from a plan is valid as well."""
    layout = layout_of(name, store, budgets=budgets)
    plan_of, current = POLICIES[name].plan, home_of(layout)
    for load_lwe in loads().values():
        plan = plan_of(load_lwe, layout, FREE, current).validate(layout)
        assert plan == plan_of(load_lwe.copy(), layout, FREE, current)
        current = plan


@pytest.mark.parametrize("sizes", [(6, 3), (8, 8), (12, 2), (4, 1)])
@pytest.mark.parametrize(("name", "store"), CASES)
def test_plans_of_other_sizes_are_valid(name, store, sizes):
    rng = np.random.default_rng(6)
    for spare in (0, 1, 9):
        layout = layout_of(name, store, sizes, spare)
        load_lwe = rng.pareto(0.7, (2, sizes[1], sizes[0]))
        home = home_of(layout, 2)
        POLICIES[name].plan(load_lwe, layout, FREE, home).validate(layout)


@pytest.mark.parametrize(("name", "store"), CASES)
def test_layers_are_planned_alone(name, store):
    layout = layout_of(name, store)
    load_lwe, home = loads()["zipf"], home_of(layout)
    plan = POLICIES[name].plan(load_lwe, layout, NOTES, home)
    for layer in range(3):
        alone = POLICIES[name].plan(
            load_lwe[layer : layer + 1], layout, NOTES, home_of(layout, 1)
        )
        assert np.array_equal(alone.slot_to_expert_lp[0], plan.slot_to_expert_lp[layer])
        assert np.array_equal(alone.owned_le[0], plan.owned_le[layer])


@pytest.mark.parametrize("name", ["prophet", "flexmoe"])
def test_the_modelled_time_never_rises(name):
    """At the budgets that each plan needs; for flexmoe from any current plan."""
    for store in POLICIES[name].stores:
        layout = layout_of(name, store)
        current = home_of(layout)
        for load_lwe in loads().values():
            plan = POLICIES[name].plan(load_lwe, layout, NOTES, current)
            for layer, load_we in enumerate(load_lwe):
                before = own_sec(NOTES, load_we, current, layer, layout)
                after = own_sec(NOTES, load_we, plan, layer, layout)
                assert after <= before * (1 + 1e-9)
            current = plan if name == "flexmoe" else current


def test_smartmoe_never_fills_the_fullest_device_further():
    layout = layout_of("smartmoe", "owned")
    current = home_of(layout)
    for load_lwe in loads().values():
        plan = POLICIES["smartmoe"].plan(load_lwe, layout, NOTES, current)
        for layer, load_we in enumerate(load_lwe):
            was_p, is_p = (x.slot_to_expert_lp[layer] for x in (current, plan))
            before, after = (layer_ratio(load_we, p, layout) for p in (was_p, is_p))
            assert after < before or np.array_equal(was_p, is_p)
        current = plan


@pytest.mark.parametrize("name", ["fastermoe", "prophet", "flexmoe"])
def test_copies_that_cost_without_end_are_not_made(name):
    layout = layout_of(name, POLICIES[name].stores[0])
    for load_lwe in loads().values():
        home = home_of(layout)
        assert POLICIES[name].plan(load_lwe, layout, ENDLESS, home) == home


@pytest.mark.parametrize("name", ["fastermoe", "prophet", "flexmoe", "eplb"])
def test_free_copies_balance_a_hot_expert(name):
    """One expert with all rows, of every source the same: every device a fourth."""
    layout = layout_of(name, POLICIES[name].stores[0])
    load_lwe = loads()["one hot"]
    plan = POLICIES[name].plan(load_lwe, layout, FREE, home_of(layout))
    for load_we, row_p in zip(load_lwe, plan.slot_to_expert_lp):
        assert layer_ratio(load_we, row_p, layout) == pytest.approx(1)


@pytest.mark.parametrize(("name", "store"), CASES)
def test_a_balanced_load_changes_nothing(name, store):
    layout = layout_of(name, store)
    load_lwe, home = np.full((3, 4, 16), 50.0), home_of(layout)
    plan = POLICIES[name].plan(load_lwe, layout, NOTES, home)
    assert name == "eplb" or plan == home
    assert POLICIES[name].plan(load_lwe, layout, NOTES, plan) == plan


@pytest.mark.parametrize("name", ["fastermoe", "prophet"])
def test_a_shadow_has_one_slot_on_every_device_but_its_owner(name):
    layout = layout_of(name, "transient", spare=4)
    plan = POLICIES[name].plan(loads()["zipf"], layout, FREE, home_of(layout))
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


def test_prophet_excludes_devices_and_prefetches_more():
    layout = layout_of("prophet", "transient", spare=4)
    load_lwe, home = loads()["zipf"], home_of(layout)
    plan = prophet.plan(load_lwe, layout, FREE, home, num_excluded=1).validate(layout)
    for row_p in plan.slot_to_expert_lp:
        expert_s = row_p.reshape(4, 8)[:, 4:].max(axis=0)
        held_s = np.bincount(row_p[row_p >= 0], minlength=16)[expert_s]
        assert np.array_equal(held_s[expert_s >= 0], np.full(sum(expert_s >= 0), 3))
    dear = dataclasses.replace(NOTES, bytes_per_expert=3 * NOTES.bytes_per_expert)
    exposed = dataclasses.replace(layout, prefetch=False)
    hidden, seen = (prophet.plan(load_lwe, x, dear, home) for x in (layout, exposed))
    count = [np.sum(p.slot_to_expert_lp >= 0) for p in (hidden, seen)]
    assert count[0] > count[1]


@pytest.mark.parametrize("name", ["fastermoe", "prophet"])
def test_fuller_budgets_bind(name):
    """One offer a device, two copies: no owner gives two, no device holds three."""
    layout = layout_of(name, "transient", spare=4, budgets=(1, 2))
    plan = POLICIES[name].plan(loads()["zipf"], layout, FREE, home_of(layout))
    assert plan.validate(layout).needs(4) == (1, 2)


@pytest.mark.parametrize("store", ["resident", "sharded"])
def test_flexmoe_separates_two_hot_experts_by_exchange(store):
    """As many slots as experts, so nothing to expand: 0 and 1 part, and cold ones
    come in exchange."""
    layout = layout_of("flexmoe", store, sizes=(8, 4), spare=0)
    load_lwe = np.full((1, 4, 8), 10.0)
    load_lwe[..., :2] = 20000
    plan = POLICIES["flexmoe"].plan(load_lwe, layout, NOTES, home_of(layout, 1))
    row_p = plan.validate(layout).slot_to_expert_lp[0]
    assert sorted(row_p) == list(range(8))
    device_p = np.arange(8) // 2
    assert device_p[row_p == 0] != device_p[row_p == 1]
    assert layer_ratio(load_lwe[0], row_p, layout) < 2.01  # from 4


@pytest.mark.parametrize("store", ["resident", "sharded"])
def test_flexmoe_gives_slots_of_a_cooled_expert_to_the_hot_one(store):
    """All slots are full of expert 0, which was hot; now it is 5."""
    layout = layout_of("flexmoe", store, sizes=(8, 4), spare=1)
    hot_lwe = np.full((2, 1, 4, 8), 500.0)
    hot_lwe[0, ..., 0] = hot_lwe[1, ..., 5] = 30000
    first = POLICIES["flexmoe"].plan(hot_lwe[0], layout, NOTES, home_of(layout, 1))
    then = POLICIES["flexmoe"].plan(hot_lwe[1], layout, NOTES, first)
    for expert, plan, load_lwe in ((0, first, hot_lwe[0]), (5, then, hot_lwe[1])):
        row_p = plan.validate(layout).slot_to_expert_lp[0]
        assert np.sum(row_p == expert) >= 3
        assert layer_ratio(load_lwe[0], row_p, layout) < 1.4


def test_flexmoe_keeps_a_current_plan_that_is_balanced_and_starts_from_home_else():
    layout = layout_of("flexmoe", "resident")
    load_lwe = loads()["one hot"]
    plan = POLICIES["flexmoe"].plan(load_lwe, layout, FREE, home_of(layout))
    assert plan != home_of(layout)
    assert POLICIES["flexmoe"].plan(load_lwe, layout, NOTES, plan) == plan
    none = dataclasses.replace(layout, offers_per_device=0, copies_per_device=0)
    assert POLICIES["flexmoe"].plan(load_lwe, none, FREE, plan) == home_of(none)


def test_eplb_never_puts_two_replicas_of_one_expert_on_a_device():
    rng = np.random.default_rng(9)
    for spare in (1, 2, 5, 12, 15):
        layout = layout_of("eplb", "sharded", spare=spare)
        load_lwe = rng.pareto(0.6, (20, 4, 16))
        plan = POLICIES["eplb"].plan(load_lwe, layout, NOTES, home_of(layout, 20))
        for row_ws in plan.slot_to_expert_lp.reshape(20 * 4, -1):
            held = row_ws[row_ws >= 0].tolist()
            assert len(set(held)) == len(held)
        # 64 replicas are one of each expert on each of four devices
        filled_l = np.sum(plan.slot_to_expert_lp >= 0, axis=1)
        assert np.array_equal(filled_l, np.full(20, min(4 * (4 + spare), 64)))


def test_smartmoe_moves_owners_with_slots_and_copies_nothing():
    layout = layout_of("smartmoe", "owned")
    load_lwe = loads()["zipf"]
    plan = POLICIES["smartmoe"].plan(load_lwe, layout, NOTES, home_of(layout))
    assert not plan.is_logical
    for row_p, owned_e in zip(plan.slot_to_expert_lp, plan.owned_le):
        assert not find_copies(row_p, owned_e, 4).any()


@pytest.mark.parametrize(("sizes", "limit_msec"), [((64, 16), 4.0), ((256, 64), 40.0)])
@pytest.mark.parametrize(("name", "store"), CASES)
def test_planning_a_layer_is_quick(name, store, sizes, limit_msec):
    """From home, the longest way. CPU time, the least of many, and twice the 2 ms and
    20 ms that are meant: others on a busy machine take its caches, too."""
    layout = layout_of(name, store, sizes, spare=2)
    load_lwe, home = loads(1, sizes)["zipf"] / 16, home_of(layout, 1)
    quickest_sec = np.inf
    for _ in range(30):
        begin_sec = time.thread_time()
        POLICIES[name].plan(load_lwe, layout, NOTES, home)
        quickest_sec = min(quickest_sec, time.thread_time() - begin_sec)
        if 1e3 * quickest_sec < limit_msec:
            break
    assert 1e3 * quickest_sec < limit_msec


def test_an_unknown_policy_names_the_nearest():
    assert check_policy("eplb") is POLICIES["eplb"]
    with pytest.raises(ValueError, match="did you mean 'flexmoe'") as error:
        check_policy("flexmo")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="use one of them"):
        check_policy("quux")
