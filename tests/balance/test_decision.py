"""Test decisions: the exact text of the log line, the record, and the JSON."""

import dataclasses
import json

import numpy as np
import pytest

from moejax.balance import codec
from moejax.balance.decision import Decision, duration
from moejax.balance.policies import POLICIES
from moejax.plan.expert_plan import ExpertPlan
from tests.support.balanced_run import (
    COST,
    LAYOUT,
    POLICIES_OF_TESTS,
    BalancedRun,
    L,
    hot,
    settings,
)


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    """Add the small policies of balanced_run to POLICIES."""
    for name, policy in POLICIES_OF_TESTS.items():
        monkeypatch.setitem(POLICIES, name, policy)


HOME = ExpertPlan.home_in(LAYOUT, L)
GOLDEN = Decision(
    kind="swap", step=4200, adopt_step=4210, plan=HOME, layout=LAYOUT,
    policy="flexmoe", device_max_over_mean_before=1.834,
    device_max_over_mean_after=1.0666, num_moves=6, modelled_gain_sec=3.14e-3,
    modelled_cost_sec=0.0412, why="it pays", digest_before="7c1f", layout_before=LAYOUT,
)  # fmt: skip


def test_log_lines_have_one_form():
    after = HOME.digest
    assert GOLDEN.line() == (
        f"step 4200  swap 7c1f->{after}  flexmoe  device max/mean 1.83->1.07  "
        "moves 6  modelled gain 3.1 ms/step  modelled cost 41 ms  adoption at step 4210"
    )
    presumed = GOLDEN.line("presumed")
    assert presumed == GOLDEN.line() + "  presumed speeds"
    two = dataclasses.replace(LAYOUT, slots_per_device=2)
    relayout = dataclasses.replace(
        GOLDEN, kind="relayout", step=4400, layout_before=two, num_moves=9,
        modelled_gain_sec=4e-3, modelled_cost_sec=8.12,
    )  # fmt: skip
    assert relayout.line() == (
        f"step 4400  relayout 7c1f->{after}  flexmoe  slots 2->3  "
        "device max/mean 1.83->1.07  moves 9  modelled gain 4.0 ms/step  "
        "modelled cost 8.1 s  adoption at step 4210"
    )
    others = dataclasses.replace(
        two, slots_per_device=3, rows_per_peer=96, store="transient"
    )
    line = dataclasses.replace(relayout, layout_before=others).line()
    assert "  rows_per_peer 96->1024  store transient->resident  " in line
    roomier = dataclasses.replace(LAYOUT, copies_per_device=2)
    line = dataclasses.replace(relayout, layout_before=roomier).line()
    assert "  copies_per_device 2->1  device max/mean" in line
    keep = dataclasses.replace(
        GOLDEN, kind="keep", device_max_over_mean_before=1.41, why="no reason"
    )
    assert (
        keep.line() == "step 4200  keep 7c1f  flexmoe  device max/mean 1.41  no reason"
    )


def test_a_kept_plan_says_why():
    """The log line of a keep says why nothing changes.

    A row takes a millisecond. Device 0 has 1600 rows of expert 0 and 228 of expert 1.
    With a replica of expert 0 on each device, the fullest device has 400 + 2 * 228. A
    step takes three times the forward pass, in two layers, so that a relayout saves
    6 * (1.828 - 0.856) s.
    """
    dear = dataclasses.replace(COST, compile_sec=1e4)
    capped = dataclasses.replace(LAYOUT, slots_per_device=2)
    run = BalancedRun.start(settings(), dear, capped).go(
        range(9), lambda step: hot(0, 0.5)
    )
    early, late = run.decisions
    head = f"keep {early.digest_before}  spread  device max/mean 2.29  "
    assert early.line() == (
        f"step 0  {head}no plan for this layout is cheaper, and no relayout before "
        "loads were seen for a half life"
    )
    assert late.line() == (
        f"step 5  {head}relayout saves 5.8 s/step, too little in 500 steps for 10000 s "
        "(modelled)"
    )


def test_a_record_is_plain_and_a_decision_survives_json():
    run = BalancedRun.start(
        settings(), layout=dataclasses.replace(LAYOUT, slots_per_device=2)
    )
    (decision,) = run.go(range(9), lambda step: hot(0, 0.5)).changes()
    record = json.loads(json.dumps(decision.record()))
    assert record["changes"]["slots_per_device"] == [2, 3]
    assert (record["digest"], record["kind"]) == (decision.plan.digest, "relayout")
    assert codec.loads(codec.dumps(decision)) == decision


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (3.14e-3, "3.1 ms"), (4e-3, "4.0 ms"), (0.0412, "41 ms"),
     (0.412, "412 ms"), (3.1e-5, "0.031 ms"), (8.12, "8.1 s"), (np.inf, "inf s")],
)  # fmt: skip
def test_durations_have_two_digits_or_more(seconds, text):
    assert duration(seconds) == text
