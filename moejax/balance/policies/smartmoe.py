"""SmartMoE's online placement (ATC'23, section 5): experts change owners, no copies.

Experts are placed from the hottest down, each on the device with the fewest rows that
still has room (longest processing time first). Their float32 master parameters and
moments move with them.
"""

import numpy as np

from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout


def plan(
    load_lwe: np.ndarray, layout: Layout, cost: CostModel, current: ExpertPlan
) -> ExpertPlan:
    """Return a plan with new owners in each layer where they leave the fullest device
    fewer rows, and with the current owners elsewhere."""
    w = layout.num_devices
    owned_le = np.stack(
        [
            place(load_we.sum(axis=0), owned_e, w)
            for load_we, owned_e in zip(load_lwe, current.owned_le, strict=True)
        ]
    )
    return ExpertPlan(owned_le, layout.num_experts, owned_le)


def place(load_e: np.ndarray, owned_e: np.ndarray, num_devices: int) -> np.ndarray:
    """Return the new owners of one layer: the expert at each position, int32 [e]."""
    now_we = owned_e.reshape(num_devices, -1)
    held = pack(load_e, owned_e, num_devices)
    if max(load_e[experts].sum() for experts in held) >= load_e[now_we].sum(1).max():
        return owned_e
    return np.concatenate([_reorder(old_e, new) for old_e, new in zip(now_we, held)])


def pack(load_e: np.ndarray, owned_e: np.ndarray, num_devices: int) -> list[list[int]]:
    """Return the experts of each device.

    If several devices are equally full, an expert goes to the one that owns it now,
    else to the one with the lowest index.
    """
    own = len(load_e) // num_devices
    device_e = np.empty(len(load_e), int)
    device_e[owned_e] = np.arange(len(load_e)) // own
    rows = np.zeros(num_devices)
    held = [[] for _ in range(num_devices)]
    for expert in np.argsort(-load_e, kind="stable").tolist():
        device = int(rows.argmin())
        old = device_e[expert]
        if rows[old] == rows[device]:
            device = int(old)
        held[device].append(expert)
        rows[device] += load_e[expert]
        if len(held[device]) == own:
            rows[device] = np.inf
    return held


def _reorder(old_e: np.ndarray, new: list[int]) -> np.ndarray:
    """Return the experts `new` in an order in which those of `old_e` keep their
    positions."""
    arrivals = iter(sorted(set(new) - set(old_e.tolist())))
    return np.array(
        [e if e in new else next(arrivals) for e in old_e.tolist()], np.int32
    )
