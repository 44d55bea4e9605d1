"""Lines of plans.jsonl: which expert each slot holds, from which step on.

    start      the plan in use when an attempt begins: the whole table, and the layout
    swap       another plan: the whole table, or the slots that change if that is
               shorter
    relayout   another layout and a plan for it: the whole table, and the layout

`step` is the first step under the plan. What changes refers to the line before.
"""

import dataclasses
import json
from typing import Any

import numpy as np

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

FILE = "plans.jsonl"


def whole_line(
    step: int, kind: str, plan: ExpertPlan, layout: Layout, sent_bytes: dict[str, float]
) -> dict[str, Any]:
    """Return the line of a `start` or `relayout`, with the layout and the whole table.

    `sent_bytes` are those that a device sends in a step, by collective.
    """
    return _head(step, kind, plan, layout) | {
        "layout": dataclasses.asdict(layout),
        "bytes": {name: round(size) for name, size in sent_bytes.items()},
        "slot_to_expert_lp": plan.slot_to_expert_lp.tolist(),
    }


def swap_line(
    step: int, before: ExpertPlan, plan: ExpertPlan, layout: Layout
) -> dict[str, Any]:
    """Return the line of a swap from the plan `before`."""
    table_lp, before_lp = plan.slot_to_expert_lp, before.slot_to_expert_lp
    layer_n, slot_n = np.nonzero(table_lp != before_lp)
    changes = np.stack([layer_n, slot_n, table_lp[layer_n, slot_n]], axis=1)
    whole = {"slot_to_expert_lp": table_lp.tolist()}
    changed = {"changed": changes.tolist()}
    shorter = min(whole, changed, key=lambda part: len(json.dumps(part)))
    return _head(step, "swap", plan, layout) | shorter


def _head(step: int, kind: str, plan: ExpertPlan, layout: Layout) -> dict[str, Any]:
    """Return the fields that every line has."""
    return {
        "step": step,
        "kind": kind,
        "digest": plan.digest,
        "num_devices": layout.num_devices,
        "slots_per_device": layout.slots_per_device,
        "store": layout.store,
    }
