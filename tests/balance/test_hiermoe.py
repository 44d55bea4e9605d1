"""HierMoE's expert swap: what it saves, what it may not worsen, and how the controller
comes to it."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from moejax.balance import adoptions, codec, controller
from moejax.balance.policies import POLICIES, hiermoe, make_valid_plan
from moejax.balance.settings import Settings
from moejax.moe.types import Placement
from moejax.perf.cost_model import NOTES
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from moejax.plan.parallel import Domain
from moejax.plan.together import Shares
from tests.support.calibrations import calibration, line
from tests.support.chosen import (
    clique_choices,
    count_together,
    met_of_choices,
    topic_choices,
)
from tests.support.manifests import make_manifest

N, E, W, K = 4096, 64, 8, 8
LEVELS = {"axes": ("dc", "expert"), "num_nodes": 2, "rows_per_node": N // W}
LAYOUTS = {
    "padded": Layout(E, W, E // W, N // W, "padded", top_k=K, counts_together=True),
}
LAYOUTS["ragged"] = dataclasses.replace(LAYOUTS["padded"], transport="ragged")
LAYOUTS["levels"] = dataclasses.replace(
    LAYOUTS["padded"], transport="hierarchical", **LEVELS
)
LINKS = dataclasses.replace(
    calibration(dc=line(1e9), expert=line(1e10)), mesh={"dc": 2, "expert": 4}
)
COSTS = dict.fromkeys(LAYOUTS, NOTES) | {
    "levels": dataclasses.replace(NOTES, calibration=LINKS)
}
CHOICES = {"cliques": clique_choices, "topics": topic_choices}


@functools.cache
def choices(name: str, seed: int = 0, top_k: int = K) -> np.ndarray:
    return CHOICES[name](N, E, top_k, seed)


def loads(expert_nk: np.ndarray) -> np.ndarray:
    """Return the load [1, w, e] of tokens that lie on the devices in order."""
    by_device = expert_nk.reshape(W, -1)
    load_we = np.stack([np.bincount(x, minlength=E) for x in by_device])
    return load_we[None].astype(float)


def counts(expert_nk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the load of tokens, and those that choose both of two experts."""
    return loads(expert_nk), count_together(expert_nk, E)[None]


def plan_for(expert_nk, name: str, current=None) -> ExpertPlan:
    layout, (load_lwe, together_lee) = LAYOUTS[name], counts(expert_nk)
    current = current or ExpertPlan.home_in(layout, 1)
    args = load_lwe, layout, COSTS[name], current, together_lee
    return make_valid_plan("hiermoe", POLICIES["hiermoe"], *args)


def rows_and_ratio(expert_nk, plan: ExpertPlan) -> tuple[float, float]:
    """Return the rows of a token, and the device max/mean, by definition."""
    expert_we = plan.owned_le[0].reshape(W, -1)
    load_e = np.bincount(expert_nk.ravel(), minlength=E)
    load_w = load_e[expert_we].sum(axis=1)
    met_nw = met_of_choices(expert_nk, expert_we)
    return met_nw.sum() / len(met_nw), load_w.max() / load_w.mean()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LAYOUTS)
def test_planted_cliques_halve_the_rows(name, seed):
    """A token sends less than half of the rows of the home plan, on devices that are
    even to 2 %; all of it counted on tokens that the plan was not made for."""
    drawn = clique_choices(2 * N, E, K, seed)
    seen_nk, later_nk = drawn[:N], drawn[N:]
    plan = plan_for(seen_nk, name)
    before, _ = rows_and_ratio(later_nk, ExpertPlan.home_in(LAYOUTS[name], 1))
    after, ratio = rows_and_ratio(later_nk, plan)
    assert after < 0.5 * before, (before, after)
    assert ratio < 1.02, ratio


def test_the_manifest_sends_the_rows_that_are_counted():
    """On eight devices: the plan's table, the exchange's own counts."""
    layout, expert_nk = LAYOUTS["padded"], choices("cliques")
    home, plan = ExpertPlan.home_in(layout, 1), plan_for(expert_nk, "padded")
    sent_rows = make_manifest(Topology(expert=W), layout, lambda sent, _: sent.rows_uw)
    for each in (home, plan):
        placement = Placement.from_plan(each, layout).layer(0)
        rows_uw = jax.device_get(sent_rows(expert_nk, placement))[0]
        assert rows_uw.sum() == round(N * rows_and_ratio(expert_nk, each)[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_plans_are_never_slower_and_end(name, kind, seed, monkeypatch):
    """Each swap lowers the norm that stands for the time, and all of them together the
    time itself; a plan for the same load from it saves little more."""
    layout, expert_nk = LAYOUTS[name], choices(kind, seed)
    load_lwe, together_lee = counts(expert_nk)
    shares = Shares.of(together_lee[0], K)
    prices = hiermoe.layer_prices(load_lwe[0], layout, COSTS[name])
    assert (prices.node_sec > prices.device_sec / 4) == (name == "levels")
    norms = []

    def watched(owned_e, terms, swap=hiermoe._swapped):
        before = sum(term.sec for term in terms)
        new_e = swap(owned_e, terms)
        args = load_lwe[0].sum(axis=0), shares, new_e, prices, layout
        after = sum(t.sec for t in hiermoe._terms(*args, terms[0].squarings))
        norms.append(after / before)
        return new_e

    monkeypatch.setattr(hiermoe, "_swapped", watched)
    home = ExpertPlan.home_in(layout, 1)
    plan = plan_for(expert_nk, name)
    assert plan == plan_for(expert_nk, name)
    assert max(norms) <= 1
    sec = [
        hiermoe.modelled_sec(load_lwe[0], shares, x.owned_le[0], prices, layout)
        for x in (home, plan, plan_for(expert_nk, name, plan))
    ]
    assert sec[1] < 0.95 * sec[0]
    assert 0.9 * sec[1] < sec[2] <= sec[1]
    limit = max(hiermoe.MAX_RATIO, rows_and_ratio(expert_nk, home)[1])
    assert rows_and_ratio(expert_nk, plan)[1] <= limit + 1e-9


def test_where_links_cost_nothing_it_evens_loads():
    free = dataclasses.replace(NOTES, bytes_per_sec=math.inf)
    load_lwe, together_lee = counts(choices("topics"))
    layout = LAYOUTS["ragged"]
    home = ExpertPlan.home_in(layout, 1)
    plan = hiermoe.plan(load_lwe, layout, free, home, together_lee)
    before, after = (rows_and_ratio(choices("topics"), x)[1] for x in (home, plan))
    assert after < 1.05 < before


def test_domains_are_planned_with_their_experts_numbers():
    """Units of two devices: their plan meets fewer units than home."""
    domain = Domain((W,), (2,))
    layout = dataclasses.replace(LAYOUTS["padded"], domain=domain)
    expert_nk = clique_choices(N, E, K, 3, size=16)
    home, (load_lwe, together_lee) = ExpertPlan.home_in(layout, 1), counts(expert_nk)
    args = load_lwe, layout, NOTES, home, together_lee
    plan = make_valid_plan("hiermoe", POLICIES["hiermoe"], *args)
    rows = []
    for each in (home, plan):
        expert_we = each.owned_le[0].reshape(W, -1)
        members = np.array(domain.members())
        expert_ue = expert_we[members].reshape(len(members), -1)
        rows.append(met_of_choices(expert_nk, expert_ue).mean())
    assert rows[1] < 0.7 * rows[0]


SETTINGS = Settings(
    policy="hiermoe", every_steps=5, lag_steps=3, relayout_lag_steps=4,
    half_life_steps=4.0, horizon_steps=10**6, max_slots_per_device=E // W,
)  # fmt: skip


def controlled(name: str, num_steps: int = 60):
    """Return the last state of the controller, and its decisions, for choices in
    cliques; the fullest pairs of devices are those of the tokens."""
    layout = LAYOUTS[name]
    state = controller.init(SETTINGS, layout, ExpertPlan.home_in(layout, 1), 1)
    decisions, together_lee = [], counts(choices("cliques", 5))[1]
    for step in range(num_steps):
        if adoptions.is_due(state, step):
            state = controller.adopt(state)
        drawn = choices("cliques", 5)[np.random.default_rng(step).permutation(N)]
        load_lwe = loads(drawn)
        expert_we = state.plan.owned_le[0].reshape(W, -1)
        met_uw = met_of_choices(drawn, expert_we).reshape(W, -1, W).sum(axis=1)
        if layout.has_levels:  # passed on by the device of the same index
            met_uw = met_uw.reshape(layout.num_nodes, -1, W).sum(axis=0)
        args = SETTINGS, state, step, load_lwe, np.array([met_uw.max()])
        state = controller.observe(*args, together_lee=together_lee)
        again = codec.loads(codec.dumps(state))
        assert np.array_equal(again.tracker.together_lee, state.tracker.together_lee)
        state, decision = controller.decide(SETTINGS, COSTS[name], state, step)
        same = controller.decide(SETTINGS, COSTS[name], again, step)[1]
        assert (decision and decision.plan) == (same and same.plan)
        decisions += [] if decision is None else [decision]
    return state, decisions


def test_a_swap_is_adopted_where_rows_in_use_travel():
    """The load is even: without the experts that tokens choose together nothing would
    be asked."""
    state, decisions = controlled("ragged")
    kinds = [decision.kind for decision in decisions]
    assert kinds[:1] == ["swap"]
    before, after = (
        rows_and_ratio(choices("cliques", 5), x)[0]
        for x in (ExpertPlan.home_in(LAYOUTS["ragged"], 1), state.plan)
    )
    assert after < 0.5 * before


@pytest.mark.parametrize("name", ["padded", "levels"])
def test_buffers_shrink_with_the_plan_where_they_travel_whole(name):
    """A swap in the same buffers saves nothing: the relayout has the plan, and buffers
    that fit it."""
    before, (state, decisions) = LAYOUTS[name], controlled(name)
    assert "relayout" in [decision.kind for decision in decisions]
    assert state.layout.rows_per_peer < 0.7 * before.rows_per_peer
    if before.has_levels:
        assert state.layout.rows_per_node < before.rows_per_node
    assert state.plan != ExpertPlan.home_in(before, 1)
