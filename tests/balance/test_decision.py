"""Test decisions: what the log line, the record and the JSON say of a change."""

import dataclasses
import json

import pytest

from moejax.balance import codec
from moejax.balance.decision import Decision, duration
from moejax.plan.expert_plan import ExpertPlan
from tests.support.balanced_run import LAYOUT, L

SWAP = Decision(
    kind="swap", step=4200, adopt_step=4210, plan=ExpertPlan.home_in(LAYOUT, L),
    layout=LAYOUT, policy="flexmoe", device_max_over_mean_before=1.834,
    device_max_over_mean_after=1.0666, num_moves=6, modelled_gain_sec=3.14e-3,
    modelled_cost_sec=0.0412, why="it pays", digest_before="7c1f", layout_before=LAYOUT,
)  # fmt: skip


def test_a_line_has_the_figures_of_its_kind():
    """A keep has the reason, and a change what it changes, its price and its step."""
    line = SWAP.line("presumed")
    for words in (f"swap 7c1f->{SWAP.plan.digest}", "1.83->1.07", "moves 6", "3.1 ms",
                  "41 ms", "step 4210", "presumed"):  # fmt: skip
        assert words in line
    keep = dataclasses.replace(SWAP, kind="keep", why="no reason").line()
    assert "keep 7c1f" in keep
    assert "no reason" in keep
    assert "->" not in keep


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ({"slots_per_device": 2, "copies_per_device": 2}, ["slots 2->3"]),
        ({"rows_per_peer": 96, "store": "transient"},
         ["rows_per_peer 96->1024", "store transient->resident"]),
        ({"copies_per_device": 2}, ["copies_per_device 2->1"]),
    ],
)  # fmt: skip
def test_budgets_are_named_where_nothing_else_changes(before, words):
    other = dataclasses.replace(LAYOUT, **before)
    relayout = dataclasses.replace(SWAP, kind="relayout", layout_before=other)
    assert relayout._describe_changes() == words
    record = json.loads(json.dumps(relayout.record()))
    after = {name: getattr(LAYOUT, name) for name in before}
    assert record["changes"] == {n: [x, after[n]] for n, x in before.items()}
    assert (record["digest"], record["kind"]) == (SWAP.plan.digest, "relayout")
    assert codec.loads(codec.dumps(relayout)) == relayout


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (3.14e-3, "3.1 ms"), (4e-3, "4.0 ms"), (0.0412, "41 ms"),
     (0.412, "412 ms"), (3.1e-5, "0.031 ms"), (1, "1.0 s"), (8.12, "8.1 s"),
     (float("inf"), "inf s")],
)  # fmt: skip
def test_durations_have_two_digits_or_more(seconds, text):
    assert duration(seconds) == text
