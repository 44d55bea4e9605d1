"""Plans at random, plans that only a mistake makes, and plans of every policy."""

import dataclasses

import numpy as np

from moejax.balance.policies import POLICIES
from moejax.perf.cost_model import NOTES
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout


def random_plan(rng, layout: Layout, num_layers: int) -> ExpertPlan:
    """Every expert somewhere, the other slots anything or empty; owners at random.

    For layouts with room for all copies: offers of every expert, copies in every slot.
    """
    rows = [_random_row(rng, layout) for _ in range(num_layers)]
    owned_le = random_owners(rng, layout.num_experts, num_layers)
    if layout.store == "owned":
        return ExpertPlan(owned_le, layout.num_experts, owned_le)
    if layout.split == "dynamic":
        return owners_alone(layout, owned_le)
    if layout.store == "sharded":
        owned_le = None
    return ExpertPlan(np.stack(rows), layout.num_experts, owned_le)


def owners_alone(layout: Layout, owned_le: np.ndarray) -> ExpertPlan:
    """Own experts in the first slots, the others empty: dynamic replication fills
    them."""
    w, own = layout.num_devices, layout.experts_per_device
    table_lws = np.full((len(owned_le), w, layout.slots_per_device), -1, np.int32)
    table_lws[:, :, :own] = owned_le.reshape(len(owned_le), w, own)
    table_lp = table_lws.reshape(len(owned_le), -1)
    return ExpertPlan(table_lp, layout.num_experts, owned_le)


def random_owners(rng, num_experts: int, num_layers: int) -> np.ndarray:
    order = [rng.permutation(num_experts) for _ in range(num_layers)]
    return np.stack(order).astype(np.int32)


def odd_plans(layout: Layout, num_layers: int) -> dict[str, ExpertPlan]:
    """A hot expert on all devices; all replicas on one, which is not the owner and
    has nothing else; a device that computes nothing."""
    w, s, own = (
        layout.num_devices,
        layout.slots_per_device,
        layout.experts_per_device,
    )
    home_ws = ExpertPlan.home_in(layout, 1).slot_to_expert_lp.reshape(w, s)
    hot_ws, crowd_ws, idle_ws = home_ws.copy(), home_ws.copy(), home_ws.copy()
    hot_ws[1:, own] = 0
    crowd_ws[w - 1] = 0  # its own experts go to the free slots of others
    crowd_ws[0, 0] = -1
    crowd_ws[:own, own] = home_ws[w - 1, :own]
    idle_ws[w - 1] = -1
    idle_ws[:own, own] = home_ws[w - 1, :own]
    tables = {
        "hot expert on all devices": hot_ws,
        "all replicas on one device": crowd_ws,
        "idle device": idle_ws,
    }
    return {
        name: ExpertPlan(
            np.tile(table_ws.reshape(-1), (num_layers, 1)), layout.num_experts
        ).validate(layout)
        for name, table_ws in tables.items()
    }


def policy_plans(layout: Layout, num_layers: int) -> dict[str, ExpertPlan]:
    """What each policy makes of a skewed load, brought to this layout."""
    rng = np.random.default_rng(7)
    w, e = layout.num_devices, layout.num_experts
    share_le = rng.permuted(np.tile(2.0 ** -np.arange(e), (num_layers, 1)), axis=1)
    load_lwe = np.round(400 * share_le[:, None] * rng.uniform(0.5, 1.5, (1, w, e)))
    plans = {}
    for name, policy in POLICIES.items():
        if layout.store == "owned" and "owned" not in policy.stores:
            continue
        native = layout
        if layout.store not in policy.stores:
            native = _with_store(layout, policy.stores[0])
        current = ExpertPlan.home_in(native, num_layers)
        plan = policy.plan(load_lwe, native, NOTES, current)
        plans[name] = plan if native == layout else plan.resized(layout)
        plans[name].validate(layout)
    return plans


def _with_store(layout: Layout, store: str) -> Layout:
    """The same slots under another store, and room for every copy."""
    own, copies = layout.experts_per_device, layout.slots_per_device
    has_copies = store in ("transient", "resident")
    return dataclasses.replace(
        layout,
        store=store,
        slots_per_device=own if store == "owned" else copies,
        offers_per_device=own if has_copies else 0,
        copies_per_device=copies if has_copies else 0,
        prefetch=False,
    )


def _random_row(rng, layout: Layout) -> np.ndarray:
    every_e = np.arange(layout.num_experts)
    rest = rng.integers(-1, layout.num_experts, layout.num_slots - len(every_e))
    return rng.permutation(np.r_[every_e, rest]).astype(np.int32)
