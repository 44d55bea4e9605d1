"""FasterMoE's dynamic shadowing (PPoPP'22, Eq. 7-8, Alg. 1).

The hottest experts are copied to all devices; their copies are called shadows.

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
"""Number of shadows in a row that do not pay after which the search stops. The paper
stops after one. With several experts per device, the second fullest device is often
almost as full as the fullest one, so that one is too few."""


def plan(
    load_lwe: np.ndarray, layout: Layout, cost: CostModel, current: ExpertPlan
) -> ExpertPlan:
    """Return a plan that shadows experts in each layer while that pays by Eq. 8."""
    rows = [shadow_row(search(load_we, layout, cost), layout) for load_we in load_lwe]
    return ExpertPlan(np.stack(rows), layout.num_experts)


def search(
    load_we: np.ndarray, layout: Layout, cost: CostModel, patience: int = PATIENCE
) -> list[int]:
    """Return the experts to shadow in one layer (Alg. 1).

    The next candidate is always the most loaded expert of the fullest device; with one
    expert per device that is the paper's order. The search ends when `patience` shadows
    in a row have not paid.
    """
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
    """Return the most loaded expert of the fullest device that is not shadowed yet, or
    None if slots and budgets of the layout have no room for it.

    Ties go to the lowest index.
    """
    own = layout.experts_per_device
    owned = range(int(rows_w.argmax()) * own, (int(rows_w.argmax()) + 1) * own)
    max_shadows = min(layout.slots_per_device - own, layout.copies_per_device)
    num_offers = sum(expert in owned for expert in shadows)
    rest = [expert for expert in owned if expert not in shadows]
    is_full = len(shadows) >= max_shadows or num_offers >= layout.offers_per_device
    if not rest or is_full:
        return None
    return max(rest, key=lambda expert: (load_e[expert], -expert))


def imbalance_sec(cost: CostModel, rows_w: np.ndarray) -> float:
    """Return the time of a layer without shadows (Eq. 7).

    It is the max over devices of 3 B F / P + 4 B H / W, with B rows, F forward FLOPs
    per row, H bytes per row, P FLOP/s and W bytes/s.
    """
    per_row_sec = 3 * cost.flops_per_row / cost.flops_per_sec
    per_row_sec += 4 * cost.bytes_per_row / cost.bytes_per_sec
    return float(rows_w.max()) * per_row_sec


def shadow_sec(cost: CostModel, num_shadows: int, rows_w: np.ndarray) -> float:
    """Return the time of a layer with r shadows (Eq. 8).

    It is the max over devices of 3 B' F / P, and 2 r |expert| / W in each micro-batch.
    """
    copy_sec = cost.micro_batches * cost.bytes_per_expert / cost.bytes_per_sec
    sync_sec = 2 * num_shadows * copy_sec if num_shadows else 0.0
    return 3 * cost.compute_sec(rows_w) + sync_sec


def shadow_row(shadows: list[int], layout: Layout) -> np.ndarray:
    """Return the slots of one layer, int32 [p]: own experts, then the shadows.

    The slot of a shadow stays empty on the owner.
    """
    own = layout.experts_per_device
    row_ws = ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0]
    row_ws = row_ws.reshape(layout.num_devices, -1).copy()
    for j, expert in enumerate(shadows):
        row_ws[:, own + j] = expert
        row_ws[expert // own, own + j] = EMPTY
    return row_ws.reshape(-1)
