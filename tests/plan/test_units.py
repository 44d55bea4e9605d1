"""Plans of domains: the way to units and back, and every policy in every domain."""

import dataclasses

import numpy as np
import pytest

from moejax.balance.policies import POLICIES, make_valid_plan
from moejax.moe.types import Placement
from moejax.perf.cost_model import NOTES
from moejax.perf.traffic import device_rows, layer_rows, max_over_mean
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.parallel import Domain
from moejax.plan.units import (
    as_gathered,
    device_plan,
    unit_loads,
    unit_order,
    unit_plan,
)
from tests.support.random_plans import random_plan, roomy

SIZES, E, SLOTS = (2, 4), 32, 6
DOMAINS = ((1, 1), (2, 1), (1, 2), (1, 4), (2, 2))
POLICY_STORES = [(name, s) for name, p in POLICIES.items() for s in p.stores]


def make_layout(shared, store, split="even") -> Layout:
    """Return a layout of 2 x 4 devices with this domain, and room for any plan."""
    layout = Layout(
        E, 8, E // 8 if store == "owned" else SLOTS, 64, store=store, split=split,
        axes=("dc", "expert"), domain=Domain(SIZES, shared), num_nodes=2,
    )  # fmt: skip
    return roomy(layout)


def held_by_units(plan: ExpertPlan, layout: Layout) -> list[set[int]]:
    """Return the experts in the slots of each unit of the first layer."""
    row_ws = plan.slot_to_expert_lp[0].reshape(8, -1)
    members = layout.domain.members()
    return [set(row_ws[devices].ravel()) - {-1} for devices in members]


@pytest.mark.parametrize("store", ["owned", "sharded", "resident"])
@pytest.mark.parametrize("shared", DOMAINS)
def test_a_plan_is_the_same_after_the_way_to_units_and_back(shared, store):
    """A unit holds each expert once. In stores with copies its members may hold these
    in other slots."""
    rng, layout = np.random.default_rng(0), make_layout(shared, store)
    home = ExpertPlan.home_in(layout, 1)
    at_home = unit_plan(home, layout)
    assert np.array_equal(at_home.owned_le[0], np.arange(E)), "consecutive owners"
    for _ in range(5):
        plan = random_plan(rng, layout, 1)
        there = unit_plan(plan, layout).validate(layout.exchanged)
        row_us = there.slot_to_expert_lp.reshape(layout.exchanged.num_devices, -1)
        for row_s in row_us:
            full = row_s[row_s >= 0]
            assert len(full) == len(set(full.tolist()))
        back = device_plan(there, layout, home).validate(layout)
        assert held_by_units(back, layout) == held_by_units(plan, layout)
        assert np.array_equal(back.owned_le, plan.owned_le)
        if store == "owned":
            assert back == plan


@pytest.mark.parametrize("shared", DOMAINS)
def test_rows_of_a_device_are_those_for_its_domain_from_its_place(shared):
    """By definition: a device computes the rows of its domain's experts that come from
    devices at the same place of their domains. A unit has the mean of its devices."""
    load_we = np.random.default_rng(1).random((8, E))
    layout = make_layout(shared, "owned")
    members = layout.domain.members()
    plan = ExpertPlan.home_in(layout, 1)
    rows = np.zeros((len(members), layout.domain_size))
    for unit, place in np.ndindex(*rows.shape):
        experts = np.r_[*(plan.slot_to_expert_lp[0].reshape(8, -1)[members[unit]])]
        sources = [devices[place] for devices in members]
        rows[unit, place] = load_we[np.ix_(sources, experts)].sum()
    found_u = device_rows(layer_rows(load_we, plan.slot_to_expert_lp[0], layout))
    assert np.allclose(found_u, rows.mean(axis=1))
    load_ue = unit_loads(load_we, layout)
    assert np.allclose(load_ue.sum(axis=0), load_we.sum(0)[unit_order(layout)] / len(
        members[0]))  # fmt: skip


@pytest.mark.parametrize("shared", DOMAINS)
@pytest.mark.parametrize(("name", "store"), POLICY_STORES)
def test_every_policy_plans_for_every_domain(name, store, shared):
    """The plan of each policy is valid, the same for the same load, and not less even
    than home. A policy of replicas makes an uneven load clearly more even."""
    policy = POLICIES[name]
    layout = make_layout(shared, store, policy.split)
    rng = np.random.default_rng(3)
    share_e = 1 / (1 + rng.permutation(E))
    load_lwe = np.stack([rng.poisson(4000 * share_e, (8, E)) for _ in range(2)])
    home = ExpertPlan.home_in(layout, 2)
    plan = make_valid_plan(name, policy, load_lwe.astype(float), layout, NOTES, home)
    again = make_valid_plan(name, policy, load_lwe.astype(float), layout, NOTES, home)
    assert plan == again

    def ratio(plan, split) -> float:
        there = dataclasses.replace(layout, split=split)
        rows = zip(load_lwe, plan.slot_to_expert_lp)
        return max(max_over_mean(device_rows(layer_rows(*x, there))) for x in rows)

    if policy.split == "local_first":
        return  # it keeps rows where they are, which may be less even
    before, after = ratio(home, "even"), ratio(plan, policy.split)
    assert after <= before + 1e-9
    if policy.has_replicas:
        assert after < max(1.1, 1 + 0.7 * (before - 1))


@pytest.mark.parametrize("shared", DOMAINS)
def test_plans_keep_to_the_budgets_of_nodes(shared):
    """The two experts that a data centre may send to the other are enough for each
    load, where units lie in data centres: no layer keeps the plan of another load.
    Domains that span both have copies inside them, or any budget."""
    rng = np.random.default_rng(5)
    layout = make_layout(shared, "resident", "water_filling")
    layout = dataclasses.replace(
        layout, slots_per_device=5, offers_per_device=4, copies_per_device=1
    )
    policy = POLICIES["micromoe"]
    layout = dataclasses.replace(layout, **policy.between_nodes(layout))
    budgets = layout.offers_per_node, layout.copies_per_node
    assert budgets == {(2, 1): (0, 0), (2, 2): (4, 4)}.get(shared, (2, 2))
    plan = ExpertPlan.home_in(layout, 1)
    for _ in range(6):
        load_1we = rng.poisson(4000 / (1 + rng.permutation(E)), (1, 8, E)) + 0.0
        plan = make_valid_plan("micromoe", policy, load_1we, layout, NOTES, plan)
        rows = layer_rows(load_1we[0], plan.slot_to_expert_lp[0], layout)
        assert max_over_mean(device_rows(rows)) < 1.02


@pytest.mark.parametrize("shared", DOMAINS[1:])
def test_a_plan_of_devices_is_a_start_for_domains(shared):
    """A relayout to a domain begins with the plan that runs, in which devices of one
    domain may hold the same expert. Budgets are tight."""
    rng, few = (
        np.random.default_rng(4),
        {"offers_per_device": 1, "copies_per_device": 1},
    )
    alone = dataclasses.replace(make_layout((1, 1), "resident"), domain=None, **few)
    there = dataclasses.replace(alone, domain=Domain(SIZES, shared))
    policy = POLICIES["flexmoe"]
    for _ in range(20):
        plan = ExpertPlan.home_in(alone, 1)
        for layout in (alone, there):
            load_1we = rng.poisson(500 / (1 + rng.permutation(E)), (1, 8, E)) + 0.0
            plan = make_valid_plan("flexmoe", policy, load_1we, layout, NOTES, plan)


def test_a_layer_that_no_device_has_room_for_keeps_its_plan():
    """Two members of a unit may hold one copy each, and one of them has lost an expert
    whose place it cannot fill with a second copy."""
    layout = dataclasses.replace(
        make_layout((1, 2), "resident"), slots_per_device=5, copies_per_device=1
    )
    home = ExpertPlan.home_in(layout, 1)
    made = unit_plan(home, layout)
    rows = made.slot_to_expert_lp.copy()
    row_us = rows[0].reshape(layout.exchanged.num_devices, -1)
    row_us[1, 4] = 0  # expert 0 moves to the other unit, in place of an empty slot
    row_us[0, [0, 4, 9]] = 8, 9, 10  # three copies in two devices
    crowded = ExpertPlan(rows, E, made.owned_le)
    assert device_plan(crowded, layout, home) == home
    row_us[0, 0] = -1
    fits = device_plan(ExpertPlan(rows, E, made.owned_le), layout, home)
    assert fits.validate(layout) != home


def test_budgets_of_a_unit_are_those_that_any_members_can_meet():
    layout = make_layout((2, 2), "resident")
    for offers in (1, E // 8):
        one = dataclasses.replace(layout, offers_per_device=offers, copies_per_device=2)
        view = one.exchanged
        assert (view.num_devices, view.slots_per_device) == (2, 4 * SLOTS)
        assert view.copies_per_device == 8
        assert view.offers_per_device == (16 if offers == E // 8 else offers)


@pytest.mark.parametrize(
    ("shared", "is_late"), [((2, 1), True), ((1, 2), False), ((2, 2), False)]
)
def test_copies_cross_no_slow_axis_that_domains_span(shared, is_late):
    """Domains that span both data centres and one device each get copies after the
    gather: tables are those of 4 domains, which find every copy at its owner."""
    layout = dataclasses.replace(make_layout(shared, "resident"), num_nodes=1)
    assert layout.copies_after_gather == is_late
    rng = np.random.default_rng(5)
    plan = random_plan(rng, layout, 1)
    placement = Placement.from_plan(plan, layout).layer(0)
    w = 4 if is_late else 8
    assert len(placement.fill_lws) == len(placement.want_lwc) == w
    owned_we = plan.owned_le[0].reshape(8, -1)
    if is_late:
        owned_we = owned_we[np.array(layout.domain.members())].reshape(w, -1)
    offered = np.take_along_axis(owned_we, np.maximum(placement.offer_lwo, 0), axis=1)
    copies_wc = offered.reshape(-1)[placement.want_lwc]
    held = np.concatenate([owned_we, copies_wc], axis=1)
    filled_ws = np.take_along_axis(held, np.maximum(placement.fill_lws, 0), axis=1)
    row_p = plan.slot_to_expert_lp[0]
    expected_ws = (as_gathered(row_p, layout) if is_late else row_p).reshape(w, -1)
    assert np.array_equal(np.where(placement.fill_lws < 0, -1, filled_ws), expected_ws)
