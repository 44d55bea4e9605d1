"""The balancer over many steps: it neither nags, nor starves a change, nor repeats one
that cannot be had."""

import dataclasses
import itertools

import numpy as np
import pytest

from moejax.balance import candidates, controller
from moejax.balance.candidates import Candidate
from moejax.plan.expert_plan import ExpertPlan
from tests.support.balanced_run import LAYOUT, BalancedRun, E, hot, settings

pytestmark = pytest.mark.usefixtures("policies_of_tests")


def test_where_nothing_pays_the_question_rests_for_the_cooldown():
    run = BalancedRun.of(settings(every_steps=1, margin=0.9, cooldown_steps=25))
    run.go(range(200), lambda step: hot(0, 0.5))
    assert set(run.kinds()) == {"keep"}
    settled = [d.step for d in run.decisions if d.step > 25]
    assert len(settled) >= 5
    assert all(b - a == 25 for a, b in itertools.pairwise(settled))


def test_swaps_do_not_put_a_relayout_off_for_ever(monkeypatch):
    """Always both pay, and the relayout more. A swap may follow a relayout at once and
    another one may be preferred; then the relayout's time has come."""
    run = BalancedRun.of(settings(every_steps=1, cooldown_steps=10))
    wide = dataclasses.replace(LAYOUT, slots_per_device=4)

    def candidate(plan, layout, gain_sec):
        return Candidate(plan, layout, 1.0, gain_sec, 1e-9, 0.0, 0.0, 1)

    def swaps(question):
        table_lp = np.roll(question.plan.slot_to_expert_lp, LAYOUT.slots_per_device, 1)
        return [candidate(ExpertPlan(table_lp, E), question.layout, 1.0)]

    def relayouts(question, _):
        layout = wide if question.layout == LAYOUT else LAYOUT
        return [candidate(question.plan.resized(layout), layout, 2.0)]

    monkeypatch.setattr(candidates, "swap", swaps)
    monkeypatch.setattr(candidates, "relayouts", relayouts)
    run.go(range(120), lambda step: hot(0, 0.5))
    settled = run.kinds()[2:]  # at first too little was seen for a relayout
    assert len(settled) >= 4
    assert set(settled) == {"swap", "relayout"}
    triples = zip(settled, settled[1:], settled[2:])
    assert all(triple != ("swap",) * 3 for triple in triples)


def test_a_layout_that_is_refused_is_not_proposed_again():
    """Not compiled, or too large: the run goes on, and something else may be tried."""
    layout = dataclasses.replace(LAYOUT, slots_per_device=2)
    run = BalancedRun.of(settings(cooldown_steps=10, lag_steps=1000, every_steps=1),
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
