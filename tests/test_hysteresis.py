"""The balancer over many steps: it neither nags, nor starves a change, nor repeats one
that cannot be had."""

import dataclasses
import itertools

import numpy as np
import pytest
from balanced_run import LAYOUT, POLICIES_OF_TESTS, Run, hot, settings

from moejax.balance import controller
from moejax.balance.cost import NOTES
from moejax.balance.policies import POLICIES
from moejax.layout import Layout
from moejax.plan import ExpertPlan


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    for name, policy in POLICIES_OF_TESTS.items():
        monkeypatch.setitem(POLICIES, name, policy)


def test_where_nothing_pays_the_question_rests_for_the_cooldown():
    run = Run.of(settings(every_steps=1, margin=0.9, cooldown_steps=25))
    run.go(range(200), lambda step: hot(0, 0.5))
    assert set(run.kinds()) == {"keep"}
    settled = [d.step for d in run.decisions if d.step > 25]
    assert len(settled) >= 5
    assert all(b - a == 25 for a, b in itertools.pairwise(settled))


def test_swaps_do_not_put_a_relayout_off_for_ever():
    """Half of the load passes from expert to expert, in another phase in each layer.
    Each time some swap pays, and room for more copies would pay more."""
    layers, experts, devices, rows = 4, 16, 8, 8192
    layout = Layout(
        experts, devices, 3, rows, "ragged", store="resident",
        offers_per_device=1, copies_per_device=1,
    )  # fmt: skip
    wanted = settings(
        policy="flexmoe", every_steps=10, cooldown_steps=20, horizon_steps=1000,
        max_slots_per_device=8,
    )  # fmt: skip
    cost = dataclasses.replace(NOTES, compile_sec=30.0)
    state = controller.init(wanted, layout, ExpertPlan.home_in(layout, layers), layers)
    kinds = []
    for step in range(1, 300):
        place = step / 50
        share_le = np.full((layers, experts), 0.5 / experts)
        for layer in range(layers):
            hot_expert = int(place) + 3 * layer
            share_le[layer, hot_expert % experts] += 0.5 * (1 - place % 1)
            share_le[layer, (hot_expert + 1) % experts] += 0.5 * (place % 1)
        load_lwe = np.repeat(share_le[:, None] * rows, devices, axis=1)
        if state.pending is not None and step >= state.pending.adopt_step:
            state = controller.adopt(state)
        pairs_l = np.full(layers, 3 * rows // devices)
        state = controller.observe(wanted, state, step, load_lwe, pairs_l)
        state, decision = controller.decide(wanted, cost, state, step)
        kinds += [] if decision is None else [decision.kind]
    assert kinds[0] == "swap"
    assert "relayout" in kinds


def test_a_layout_that_is_refused_is_not_proposed_again():
    """Not compiled, or too large: the run goes on, and something else may be tried."""
    layout = dataclasses.replace(LAYOUT, slots_per_device=2)
    run = Run.of(settings(cooldown_steps=10, lag_steps=1000, every_steps=1),
                 layout=layout)  # fmt: skip
    seen = []
    for step in range(0, 300, 30):
        run.go(range(step, step + 30), lambda step: hot(0, 0.5))
        if run.state.pending is not None:
            seen.append(run.state.pending.layout)
            run.state = controller.refuse(run.state)
            again = controller.from_json(controller.to_json(run.state))
            assert again.refused == tuple(seen)
            assert again.layout == layout
    assert seen
    assert len(set(seen)) == len(seen)
