"""Test what a screen is told of the balancer's decisions."""

import dataclasses

from moejax.balance.adoptions import Adoptions
from moejax.balance.decision import Decision
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from train.balance.history import NUM_KEPT, History

LAYOUT = Layout(num_experts=4, num_devices=2, slots_per_device=2, rows_per_peer=8)
PLAN = ExpertPlan.home_in(LAYOUT, 1)
SWAP = Decision(
    kind="swap",
    step=20,
    adopt_step=24,
    plan=PLAN,
    layout=LAYOUT,
    policy="flexmoe",
    device_max_over_mean_before=1.5,
    device_max_over_mean_after=1.1,
    num_moves=2,
    modelled_gain_sec=1e-3,
    modelled_cost_sec=0.0,
    why="pays",
    digest_before=PLAN.digest,
    layout_before=LAYOUT,
)
IDLE = Adoptions(LAYOUT, PLAN, (), None)


def decide(kind: str, step: int, adopt_step: int) -> Decision:
    return dataclasses.replace(SWAP, kind=kind, step=step, adopt_step=adopt_step)


def make_history(*decisions: Decision, adopted=()) -> History:
    history = History(adopted_steps=set(adopted))
    history.decisions.extend((decision, decision.record()) for decision in decisions)
    return history


def fates(history: History, now: Adoptions) -> dict[int, str]:
    return {shown.record["step"]: shown.fate for shown in history.shown(now)}


def test_a_decision_waits_and_is_adopted():
    waiting = dataclasses.replace(IDLE, swaps=(SWAP,))
    assert fates(make_history(SWAP), waiting) == {20: "adoption at step 24"}
    assert fates(make_history(SWAP, adopted=[20]), IDLE) == {20: "adopted at step 24"}


def test_a_relayout_is_planned_anew_or_given_up():
    first, anew = decide("relayout", 90, 190), decide("relayout", 186, 190)
    waiting = dataclasses.replace(IDLE, relayout=anew)
    assert fates(make_history(first, anew), waiting) == {
        90: "planned anew at step 186",
        186: "adoption at step 190",
    }
    keep = decide("keep", 186, 190)
    assert fates(make_history(first, keep), IDLE) == {90: "given up", 186: ""}


def test_what_waits_since_before_a_resume_is_shown_first():
    old, new = decide("relayout", 90, 190), decide("keep", 110, 114)
    waiting = dataclasses.replace(IDLE, relayout=old)
    assert fates(make_history(new), waiting) == {90: "adoption at step 190", 110: ""}


def test_the_last_decisions_are_kept():
    many = [decide("keep", step, step + 4) for step in range(NUM_KEPT + 3)]
    shown = make_history(*many).shown(IDLE)
    assert [x.record["step"] for x in shown] == list(range(3, NUM_KEPT + 3))
