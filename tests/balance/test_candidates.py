"""Test the balancer's candidates: where a change pays, what it costs, and the sizes of
buffers."""

import dataclasses

import numpy as np
import pytest

from moejax.balance import candidates, controller
from moejax.balance.policies import POLICIES, Policy
from moejax.perf.traffic import pair_rows, rows_by_slot
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.parallel import Domain
from tests.support.balanced_run import (
    COST,
    EVEN,
    LAYOUT,
    OWN,
    PADDED,
    BalancedRun,
    E,
    L,
    W,
    hot,
    noisy,
    permute,
    settings,
    worst,
)

pytestmark = pytest.mark.usefixtures("policies_of_tests")


def test_a_layer_is_replanned_only_where_that_pays():
    """Only the uneven layer 0 is replanned; layer 1 is even under an unusual plan and
    keeps it."""
    home = ExpertPlan.home_in(LAYOUT, L).slot_to_expert_lp.copy()
    home[1, [0, 3]] = home[1, [3, 0]]
    odd = ExpertPlan(home, E)
    load_lwe = np.stack([hot(0, 0.5)[0], EVEN[0]])
    run = BalancedRun.start(settings(), plan=odd, layout=LAYOUT)
    run.go([0], lambda step: load_lwe)
    (swap,) = run.decisions
    assert swap.kind == "swap"
    assert np.array_equal(swap.plan.slot_to_expert_lp[1], odd.slot_to_expert_lp[1])
    assert not np.array_equal(swap.plan.slot_to_expert_lp[0], home[0])
    assert "changes 1 of 2 layers" in swap.why


@pytest.mark.parametrize(("margin", "num_layers"), [(0.0, 2), (0.05, 1), (0.4, 1)])
def test_the_margin_is_of_what_a_swap_changes(margin, num_layers):
    """The margin is a share of the time of the layers that a swap changes.

    A swap can save half of layer 0's time, a third of both layers' time, and 1 % of
    layer 1's time.
    """
    load_lwe = np.stack([hot(0, 0.5)[0], hot(0, 0.18)[0]])
    run = BalancedRun.start(settings(margin=margin)).go([0], lambda step: load_lwe)
    assert run.kinds() == ["swap"]
    assert f"changes {num_layers} of 2 layers" in run.decisions[0].why


def test_where_one_expert_exceeds_a_devices_share_more_slots_pay():
    """A relayout adds a slot if the rows of one expert exceed a device's share.

    Two slots hold the own experts and no copy, so that one of four devices has half of
    all rows. With three slots, every device holds the hot expert.
    """
    two = Layout(E, W, 2, 1024, store="resident", offers_per_device=1,
                 copies_per_device=1)  # fmt: skip
    run = BalancedRun.start(settings(), layout=two)
    run.go(range(60), lambda step: hot(0, 0.5))
    assert run.kinds() == ["keep", "relayout"], "no relayout before a half life"
    relayout = run.decisions[1]
    assert relayout.changes["slots_per_device"] == (2, 3)
    assert relayout.modelled_cost_sec == COST.compile_sec
    assert relayout.modelled_gain_sec * 500 > COST.compile_sec
    assert run.state.layout.slots_per_device == 3
    assert worst(run.state, hot(0, 0.5)) < 1.2
    relayout.plan.validate(relayout.layout)
    capped = BalancedRun.start(settings(max_slots_per_device=2), layout=two)
    capped.go(range(60), lambda step: hot(0, 0.5))
    assert all("slots_per_device" not in d.changes for d in capped.decisions)


def test_owners_move_in_the_layers_where_that_pays():
    """Owners move in layer 0 alone if a move costs less than layer 0 gains within the
    horizon, and more than layer 1 gains. Infinitely dear ones stay."""
    owned = Layout(E, W, 2, 1024, "ragged")
    load_lwe = EVEN.copy()
    load_lwe[0, :, :2] *= 4
    load_lwe[1, :, :2] = load_lwe[1, :, :2] * 3 // 2
    home = ExpertPlan.home_in(owned, L)
    new = permute(load_lwe, owned, COST, home)
    tables = zip(load_lwe, home.slot_to_expert_lp, new.slot_to_expert_lp)
    sec = COST.layer_sec
    gain_l = [sec(x, a, owned) - sec(x, b, owned) for x, a, b in tables]
    one_move = dataclasses.replace(COST, bytes_per_move=COST.bytes_per_sec)
    moves = one_move.move_sec(home, new, owned) / L  # both layers move alike
    assert gain_l[0] > 2 * gain_l[1]
    for share, expected_l in (
        (0.5, [True, True]), (2.0, [True, False]), (np.inf, [False, False]),
    ):  # fmt: skip
        move_sec = share * gain_l[1] * 500 / moves
        cost = dataclasses.replace(COST, bytes_per_move=move_sec * COST.bytes_per_sec)
        chosen = settings(policy="permute", margin=0.0, act_above=1.1)
        run = BalancedRun.start(chosen, cost, owned).go([0], lambda step: load_lwe)
        (decision,) = run.decisions
        is_moved_l = (decision.plan.owned_le != home.owned_le).any(axis=1)
        assert is_moved_l.tolist() == expected_l


def test_a_plan_that_saves_time_but_is_less_even_is_not_taken(monkeypatch):
    """A plan with a higher max/mean is refused although it is faster.

    Rows cost time only when they are sent. Moving expert 2 to the source that uses it
    saves all of that time, and makes that device fuller than any was before.
    """
    load_we = np.zeros((W, E), np.int64)
    load_we[[0, 1, 2, 3], [0, 3, 4, 6]] = 200, 100, 200, 200
    load_we[0, 2] = 150
    row_e = np.array([[0, 2, 1, 3, 4, 5, 6, 7]], np.int32)
    near = ExpertPlan(row_e, E, row_e)
    stay = Policy(lambda *_: near, ("owned",), has_replicas=False)
    monkeypatch.setitem(POLICIES, "near", stay)
    cost = dataclasses.replace(COST, flops_per_row=0.0, bytes_per_move=0.0)
    owned = Layout(E, W, 2, 1024, "ragged")
    home = ExpertPlan.home_in(owned, 1)
    near_sec = cost.layer_sec(load_we, near.slot_to_expert_lp[0], owned)
    assert near_sec < cost.layer_sec(load_we, home.slot_to_expert_lp[0], owned)
    chosen = settings(policy="near", act_above=1.1)
    state = controller.init(chosen, owned, home, 1)
    state = controller.observe(chosen, state, 0, load_we[None], np.zeros(1, int))
    _, keep = controller.decide(chosen, cost, state, 0)
    assert "/step, but device max/mean would be 1.65 (modelled), and no" in keep.why
    worse = candidates.Candidate(near, owned, 1.65, 1.0, 1.0, 0.0, 0.0, 1, "policy")
    load_lwe = load_we[None].astype(float)
    ask = candidates.Question(
        load_lwe, np.ones(1), True, 1.18, home, owned, cost, stay, 0.05, 500, 500, 2
    )
    assert "device max/mean would be 1.65" in candidates.objection(ask, worse)
    assert candidates.objection(ask, dataclasses.replace(worse, ratio=1.18)) == ""


def full_pairs(step):
    """Return the fullest pair of each layer: 240 rows in step 10, 160 in others."""
    return np.full(L, 240 if step == 10 else 160)


@pytest.mark.parametrize(
    ("fields", "cost", "becomes"),
    [
        ({"rows_per_peer": 64}, {}, 160),
        ({"rows_per_peer": 512}, {}, 160),
        ({"rows_per_peer": 160}, {}, 160),
        ({"rows_per_peer": 192}, {}, 192),
        ({"rows_per_peer": 64, "overflow": "redo"}, {}, 240),
        # Another program does not pay, or would change which rows are dropped.
        ({"rows_per_peer": 64}, {"compile_sec": np.inf}, 64),
        ({"rows_per_peer": 512, "exchange": "capacity"}, {}, 512),
    ],
)
def test_buffers_are_fitted_to_the_fullest_pair(fields, cost, becomes):
    """Buffers that are too small grow to the fullest pair, and much larger ones shrink
    to it.

    The load is even. Each device has 200 rows for each other in a step, which is 100 in
    each of two micro-batches. The fullest pair that is reported has 160, and 240 in one
    step, which later rounds carry, unless a step that overflows runs again.
    """
    cost = dataclasses.replace(COST, micro_batches=2, latency_sec=1e-3, **cost)
    layout = dataclasses.replace(PADDED, **fields)
    run = BalancedRun.start(settings(margin=0.0, horizon_steps=10**6), cost, layout)
    run.go(range(40), lambda step: EVEN, full_pairs)
    assert run.state.layout.rows_per_peer == becomes
    is_changed = becomes != layout.rows_per_peer
    assert len(run.changes()) == len(run.decisions) == is_changed


def test_a_layout_that_drops_rows_stays_as_it_is():
    layout = dataclasses.replace(PADDED, exchange="capacity", slots_per_device=2)
    run = BalancedRun.start(settings(), layout=layout)
    assert "relayout" not in run.go(range(40), lambda step: hot(0, 0.5)).kinds()


def test_buffers_are_not_fitted_to_few_observed_pairs():
    layout = dataclasses.replace(PADDED, slots_per_device=2)
    run = BalancedRun.start(settings(lag_steps=2), COST, layout)
    run.go(range(15), lambda step: hot(0, 0.5), full_pairs)
    (relayout,) = run.changes()
    assert "slots_per_device" in relayout.changes
    assert "rows_per_peer" not in relayout.changes


def test_padded_exchanges_are_priced_by_the_observed_pairs():
    """A pair that is observed to be twice as full as the model says is priced with its
    later rounds."""
    cost = dataclasses.replace(COST, latency_sec=1e-3)
    layout = dataclasses.replace(PADDED, rows_per_peer=256)
    plan = ExpertPlan.home_in(layout, L)
    pair_ww = pair_rows(rows_by_slot(EVEN[0], plan.slot_to_expert_lp[0], W))
    assert pair_ww.max() == 200
    ask = candidates.Question(
        EVEN.astype(float), np.array([1.0, 2.0]), True, 1.0, plan, layout, cost,
        POLICIES["spread"], 0.05, 500, 500, 3,
    )  # fmt: skip
    sec_l = candidates.sec_by_layer(ask, plan, layout)
    more = cost.rows_sec(2 * pair_ww, layout) - cost.rows_sec(pair_ww, layout)
    assert more > 0
    assert np.isclose(sec_l[1] - sec_l[0], more)
    assert candidates.fitted(ask, plan, layout).rows_per_peer == 400


def test_rows_that_overflow_bring_a_plan_that_sends_fewer():
    """Two data centres are a domain each, and nearly even: nothing is above act_above.
    Each has copies of cold experts of the other, so that all of its tokens with the
    other's hot expert cross; with a copy of that one they stay."""
    policy, w, e = POLICIES["micromoe"], 8, 16
    layout = Layout(
        e, w, 3, 400, store="resident", split="water_filling", offers_per_device=1,
        copies_per_device=1, offers_per_node=1, copies_per_node=1, num_nodes=2,
        axes=("dc", "expert"), domain=Domain((2, 4), (1, 4)),
    )  # fmt: skip
    cold = ExpertPlan.home_in(layout, 1).slot_to_expert_lp.copy()
    cold[0, [2, 14]] = 9, 1
    plan = ExpertPlan(cold, e).validate(layout)
    share_e = np.full(e, 0.1 / (e - 2))
    share_e[[0, 8]] = 0.48, 0.42
    ask = candidates.Question(
        np.tile(1000 * share_e, (1, w, 1)), np.ones(1), True, 1.06, plan, layout, COST,
        policy, 0.0, 500, 500, 3,
    )  # fmt: skip
    same, other = candidates.refits(ask)
    assert (same.plan, same.layout.rows_per_peer) == (plan, 528)
    assert other.layout.rows_per_peer < 120
    assert other.gain_sec > same.gain_sec


def layout_for(policy, slots_per_device):
    """Return a layout with the policy's first store, its split and its prefetch."""
    store = policy.stores[0]
    budget = 2 if store in ("transient", "resident") else 0
    return Layout(
        E, W, OWN if store == "owned" else slots_per_device, 1024, "ragged",
        store=store, split=policy.split, prefetch=policy.prefetch,
        offers_per_device=budget, copies_per_device=budget,
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_obeys_the_same_laws(name):
    """Every change makes the devices more even and pays within the horizon.

    The hot expert changes every 40 steps. At first both experts of device 1 are hot
    too.
    """
    rng = np.random.default_rng(5)

    def load_of_step(step):
        load_lwe = hot(step // 40 % E, 0.4)
        load_lwe[..., 2:4] *= 1 + (step < 40)
        return noisy(load_lwe, rng)

    layout = layout_for(POLICIES[name], 3)
    run = BalancedRun.start(settings(policy=name), layout=layout)
    run.go(range(200), load_of_step)
    for decision in run.changes():
        decision.plan.validate(decision.layout)
        assert (
            decision.device_max_over_mean_after <= decision.device_max_over_mean_before
        )
        assert decision.modelled_gain_sec * 500 > decision.modelled_cost_sec
    assert bool(run.changes()) == (name != "home")
    assert len(run.changes()) <= 200 // 23 + 1
    even = BalancedRun.start(settings(policy=name), layout=layout)
    assert even.go(range(30), lambda step: EVEN).decisions == []
