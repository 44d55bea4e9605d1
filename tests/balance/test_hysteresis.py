"""Test the balancer over many steps.

It does not ask too often, does not postpone a relayout for ever, and does not propose a
refused layout again.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from moejax.balance import candidates, codec, controller
from moejax.balance.candidates import Candidate
from moejax.plan.expert_plan import ExpertPlan
from tests.support.balanced_run import LAYOUT, BalancedRun, E, hot, settings

pytestmark = pytest.mark.usefixtures("policies_of_tests")


def test_after_a_keep_no_decision_is_made_within_the_cooldown():
    run = BalancedRun.start(settings(every_steps=1, margin=0.9, cooldown_steps=25))
    run.go(range(200), lambda step: hot(0, 0.5))
    assert set(run.kinds()) == {"keep"}
    later_steps = [d.step for d in run.decisions if d.step > 25]
    assert len(later_steps) >= 5
    assert all(b - a == 25 for a, b in itertools.pairwise(later_steps))


def test_swaps_do_not_postpone_a_relayout_for_ever(monkeypatch):
    """There are never three swaps in a row if both kinds always pay and a relayout pays
    more.

    A swap may follow a relayout at once, and a second swap may be preferred. The next
    change is then a relayout.
    """
    run = BalancedRun.start(settings(every_steps=1, cooldown_steps=10))
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
    kinds = run.kinds()[2:]  # before, too few steps were observed for a relayout
    kinds = [kind for kind in kinds if kind != "keep"]  # at the last call of a relayout
    assert len(kinds) >= 4
    assert set(kinds) == {"swap", "relayout"}
    triples = zip(kinds, kinds[1:], kinds[2:])
    assert all(triple != ("swap",) * 3 for triple in triples)


def test_a_layout_that_is_refused_is_not_proposed_again():
    """A layout that could not be compiled or was too large is not proposed again; other
    layouts may be."""
    layout = dataclasses.replace(LAYOUT, slots_per_device=2)
    run = BalancedRun.start(settings(cooldown_steps=10, lag_steps=1000, every_steps=1),
                 layout=layout)  # fmt: skip
    layouts = []
    for step in range(0, 300, 30):
        run.go(range(step, step + 30), lambda step: hot(0, 0.5))
        if run.state.relayout is not None:
            layouts.append(run.state.relayout.layout)
            run.state = controller.refuse(run.state)
            again = codec.loads(codec.dumps(run.state))
            assert again.refused == tuple(layouts)
            assert again.layout == layout
    assert layouts
    assert len(set(layouts)) == len(layouts)
