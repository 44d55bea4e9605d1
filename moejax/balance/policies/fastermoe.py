"""FasterMoE's dynamic shadowing (PPoPP'22, Eq. 7-8, Alg. 1): copy hot experts to all.

    own experts | shadows           2 own experts, shadows of experts 0 and 5
    0   1       | -  5              device 0 owns expert 0, so shadow 0 is empty there
    2   3       | 0  5
    4   5       | 0  -

A device computes its own rows of a shadowed expert (split 'local_first').
"""

import numpy as np

from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import EMPTY, ExpertPlan
from moejax.plan.layout import Layout

PATIENCE = 2
"""The paper stops at the first shadow that does not pay (1). With several experts a
device the second fullest device is often next to the fullest, and one is too soon."""


def plan(
    load_lwe: np.ndarray, layout: Layout, cost: CostModel, current: ExpertPlan
) -> ExpertPlan:
    """Per layer, shadow experts from the hottest down while Eq. 8 says it pays."""
    everywhere_w = np.ones(layout.num_devices, bool)
    rows = [
        shadow_row([(e, everywhere_w) for e in search(load_we, layout, cost)], layout)
        for load_we in load_lwe
    ]
    return ExpertPlan(np.stack(rows), layout.num_experts)


def search(
    load_we: np.ndarray, layout: Layout, cost: CostModel, patience: int = PATIENCE
) -> list[int]:
    """Alg. 1: the experts to shadow in one layer, until `patience` in a row have not
    paid. Next is always the fullest device's most loaded expert, which with one expert
    a device is the paper's order."""
    own = layout.experts_per_device
    load_e = load_we.sum(axis=0)
    rows_w = load_e.reshape(-1, own).sum(axis=1)
    best_sec = imbalance_sec(cost, rows_w)
    shadows, best = [], 0
    while len(shadows) < best + patience:
        expert = next_expert(rows_w, load_e, shadows, layout)
        if expert is None:
            break
        shadows.append(expert)
        rows_w = rows_w + load_we[:, expert]
        rows_w[expert // own] -= load_e[expert]
        sec = shadow_sec(cost, len(shadows), rows_w)
        if sec < best_sec:
            best_sec, best = sec, len(shadows)
    return shadows[:best]


def next_expert(
    rows_w: np.ndarray, load_e: np.ndarray, shadows: list[int], layout: Layout
) -> int | None:
    """The most loaded expert that the fullest device owns, is not shadowed yet, and
    the slots and budgets of the layout have room for; ties go to the lowest index."""
    own = layout.experts_per_device
    owned = range(int(rows_w.argmax()) * own, (int(rows_w.argmax()) + 1) * own)
    limit = min(layout.slots_per_device - own, layout.copies_per_device)
    offered = sum(expert in owned for expert in shadows)
    left = [expert for expert in owned if expert not in shadows]
    if not left or len(shadows) >= limit or offered >= layout.offers_per_device:
        return None
    return max(left, key=lambda expert: (load_e[expert], -expert))


def imbalance_sec(cost: CostModel, rows_w: np.ndarray) -> float:
    """Eq. 7, no shadows: max over devices of 3 B F / P + 4 B H / W, with B rows, F
    forward FLOPs per row and H bytes per row."""
    per_row_sec = 3 * cost.flops_per_row / cost.flops_per_sec
    per_row_sec += 4 * cost.bytes_per_row / cost.bytes_per_sec
    return float(rows_w.max()) * per_row_sec


def shadow_sec(cost: CostModel, num_shadows: int, rows_w: np.ndarray) -> float:
    """Eq. 8, r shadows: max over devices of 3 B' F / P, and 2 r |expert| / W in each
    micro-batch."""
    copy_sec = cost.micro_batches * cost.bytes_per_expert / cost.bytes_per_sec
    sync_sec = 2 * num_shadows * copy_sec if num_shadows else 0.0
    return 3 * cost.compute_sec(rows_w) + sync_sec


def shadow_row(shadows: list[tuple[int, np.ndarray]], layout: Layout) -> np.ndarray:
    """Slots of one layer: own experts, then shadow j on each device of its bool [w]
    that does not own it."""
    own = layout.experts_per_device
    row_ws = ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0]
    row_ws = row_ws.reshape(layout.num_devices, -1).copy()
    for j, (expert, holds_w) in enumerate(shadows):
        row_ws[:, own + j] = np.where(holds_w, expert, EMPTY)
        row_ws[expert // own, own + j] = EMPTY
    return row_ws.reshape(-1)
