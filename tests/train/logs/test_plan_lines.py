"""Test that lines of plans.jsonl give each table back."""

import itertools
import json

import numpy as np
import pytest

from moejax.plan.layout import Layout
from tests.support.plan_history import tables
from tests.support.random_plans import random_plan
from tests.support.run_schema import check
from train.logs.plan_lines import swap_line, whole_line

LAYOUT = Layout(
    8, 4, 3, 64, store="transient", offers_per_device=2, copies_per_device=3
)
WIDE = Layout(8, 4, 5, 64, store="transient", offers_per_device=2, copies_per_device=5)


@pytest.mark.parametrize("seed", range(2))
def test_tables_are_those_of_the_plans(seed):
    """Some swaps change few slots, and some change all."""
    rng = np.random.default_rng(seed)
    plans = [random_plan(rng, LAYOUT, 3) for _ in range(3)]
    few = plans[-1].slot_to_expert_lp.copy()
    few[1, 2], few[2, 0] = -1, 5
    plans.append(type(plans[0])(few, 8, plans[-1].owned_le))
    wide = random_plan(rng, WIDE, 3)
    lines = [whole_line(1, "start", plans[0], LAYOUT, {"all_to_all expert rows": 12.0})]
    for step, (before, plan) in enumerate(itertools.pairwise(plans), start=2):
        lines.append(swap_line(step, before, plan, LAYOUT))
    lines.append(whole_line(9, "relayout", wide, WIDE, {}))
    lines = [json.loads(json.dumps(line)) for line in lines]
    for line, table_lp, plan in zip(lines, tables(lines), [*plans, wide], strict=True):
        check("plan", line)
        assert np.array_equal(table_lp, plan.slot_to_expert_lp)
        assert line["digest"] == plan.digest
        assert table_lp.shape[1] == line["num_devices"] * line["slots_per_device"]
    assert len(lines[3]["changed"]) <= 2
    assert "changed" not in lines[1], "the whole table is shorter"
    assert swap_line(9, plans[0], plans[0], LAYOUT)["changed"] == []
    assert "slot_to_expert_lp" in lines[-1]
    assert lines[-1]["layout"]["slots_per_device"] == 5
