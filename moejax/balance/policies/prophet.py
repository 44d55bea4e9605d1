"""Pro-Prophet's locality-based greedy search (arXiv 2411.10003, Eq. 1-8, Alg. 1).

    D devices, E experts, I rows in all; H rows computed, R rows received, per device
    s experts copied, each to all devices

The search copies the hottest expert of the fullest device again and again, even where
that does not pay yet, until the devices are balanced (Eq. 7). It then keeps the
cheapest prefix of the copies. With prefetched copies the cost is that of Eq. 8.
"""

from typing import NamedTuple

import numpy as np

from moejax.balance.policies.fastermoe import next_expert, shadow_row
from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

ALPHA = 0.5
"""Share of an expert's mean load by which two devices of a balanced layer can differ
(Eq. 7)."""


def plan(
    load_lwe: np.ndarray,
    layout: Layout,
    cost: CostModel,
    current: ExpertPlan,
    *,
    alpha: float = ALPHA,
) -> ExpertPlan:
    """Return a plan with the cheapest prefix of shadows in each layer.

    A shadow goes to all devices: n, the number of those that the paper leaves out, is 0
    (docs/decisions/0009-policies.md).
    """
    rows = [
        shadow_row(search(load_we, layout, cost, alpha), layout) for load_we in load_lwe
    ]
    return ExpertPlan(np.stack(rows), layout.num_experts)


class Traffic(NamedTuple):
    """Rows that each device computes."""

    computed_w: np.ndarray
    """Number of rows that a device computes."""
    local_w: np.ndarray
    """Number of these rows that come from the device itself."""


def search(
    load_we: np.ndarray,
    layout: Layout,
    cost: CostModel,
    alpha: float = ALPHA,
) -> list[int]:
    """Return the experts to shadow in one layer (Alg. 1 with cnt = s, the prefix's true
    length)."""
    own, w = layout.experts_per_device, layout.num_devices
    load_e = load_we.sum(axis=0)
    rows_w = load_we.sum(axis=1)
    own_wwo = load_we.reshape(w, w, own)
    traffic = Traffic(
        computed_w=load_e.reshape(w, own).sum(axis=1),
        local_w=own_wwo[np.arange(w), np.arange(w)].sum(axis=1),
    )
    shadows, best = [], 0
    best_sec = plan_sec(cost, layout, traffic, rows_w, shadows)
    while not is_balanced(traffic.computed_w, alpha, layout.num_experts):
        expert = next_expert(traffic.computed_w, load_e, shadows, layout)
        if expert is None:
            break
        traffic = replace_inputs(traffic, load_we[:, expert], expert // own)
        shadows.append(expert)
        sec = plan_sec(cost, layout, traffic, rows_w, shadows)
        if sec < best_sec:
            best_sec, best = sec, len(shadows)
    return shadows[:best]


def plan_sec(
    cost: CostModel,
    layout: Layout,
    traffic: Traffic,
    rows_w: np.ndarray,
    shadows: list[int],
) -> float:
    """Return the time of a layer with these shadows.

    It is that of Eq. 8 where copies are prefetched, else that of Eq. 6. `rows_w` is the
    number of rows that each device routes.
    """
    max_w = np.maximum(traffic.computed_w, rows_w) - traffic.local_w
    a2a, fec = a2a_sec(cost, max_w), cost.compute_sec(traffic.computed_w)
    own = layout.experts_per_device
    owners = [expert // own for expert in shadows]
    num_offers = max(map(owners.count, owners), default=0)
    trans = trans_sec(cost, len(owners), num_offers)
    if layout.prefetch:
        other = cost.micro_batches * cost.other_sec
        return coupled_sec(a2a, fec, trans, trans, other)
    return planner_sec(a2a, fec, trans, trans)


def a2a_sec(cost: CostModel, max_w: np.ndarray) -> float:
    """Return the time of one all_to_all, max R * size(input) / B (Eq. 1).

    `max_w` is the number of rows that each device sends or receives, whichever is more:
    with copies a device may send few rows and receive many, or the other way round.
    """
    wire_sec = float(max_w.max()) * cost.bytes_per_row / cost.bytes_per_sec
    return wire_sec + cost.micro_batches * cost.latency_sec


def trans_sec(cost: CostModel, s: int, num_offers: int = 0) -> float:
    """Return the time to send s experts to all devices, s |expert| / B: Eq. 4 for
    weights, and Eq. 5 for gradients, with n = 0.

    `num_offers` is not in the paper: here an owner first scatters slices of the experts
    that it offers, so that no hot owner sends whole experts to each device.
    """
    if s == 0:
        return 0.0
    one_sec = (s + num_offers) * cost.bytes_per_expert / cost.bytes_per_sec
    return cost.micro_batches * (one_sec + (2 * cost.latency_sec if num_offers else 0))


def planner_sec(a2a: float, fec: float, trans: float, agg: float) -> float:
    """Return the time of a layer without overlap (Eq. 6), with T_BEC = 2 T_FEC (Eq.
    2-3)."""
    return 4 * a2a + 3 * fec + trans + agg


def coupled_sec(
    a2a: float, fec: float, trans: float, agg: float, other: float
) -> float:
    """Return the time of a layer whose copies of experts are prefetched (Eq. 8).

    Weights hide under this block's forward pass (T_FEC + T_FNEC), gradients under its
    backward pass, which takes twice as long. `other` is T_FNEC.
    """
    exposed_trans = max(0.0, trans - fec - other)
    exposed_agg = max(0.0, agg - 2 * fec - 2 * other)
    return planner_sec(a2a, fec, exposed_trans, exposed_agg)


def is_balanced(computed_w: np.ndarray, alpha: float, num_experts: int) -> bool:
    """Return whether max(H) - min(H) < alpha I / E (Eq. 7), or all loads are equal."""
    spread = computed_w.max() - computed_w.min()
    return bool(spread == 0 or spread < alpha * computed_w.sum() / num_experts)


def replace_inputs(traffic: Traffic, load_w: np.ndarray, owner: int) -> Traffic:
    """Return the traffic after an expert of `owner` is copied to all devices, each of
    which computes its own rows."""
    computed_w = traffic.computed_w + load_w
    computed_w[owner] -= load_w.sum()
    local_w = traffic.local_w + load_w
    local_w[owner] -= load_w[owner]
    return Traffic(computed_w, local_w)
