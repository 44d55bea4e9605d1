"""Build random plans, odd plans that no good policy makes, and plans of every
policy."""

import dataclasses

import numpy as np

from moejax.balance.policies import POLICIES
from moejax.perf.cost_model import NOTES
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout


def random_plan(rng, layout: Layout, num_layers: int) -> ExpertPlan:
    """Return a random plan in which every expert has a slot and an owner; the other
    slots hold any expert or none.

    The layout must have room for all copies: its budgets admit an offer of every expert
    and a copy in every slot. Store 'owned' and split 'dynamic' get plans without
    copies.
    """
    rows = [_random_row(rng, layout) for _ in range(num_layers)]
    owned_le = random_owners(rng, layout.num_experts, num_layers)
    if layout.store == "owned":
        return ExpertPlan(owned_le, layout.num_experts, owned_le)
    if layout.makes_replicas:
        return owners_alone(layout, owned_le)
    if layout.store == "sharded":
        owned_le = None
    return ExpertPlan(np.stack(rows), layout.num_experts, owned_le)


def roomy(layout: Layout) -> Layout:
    """Return the layout with budgets for any plan: an offer of each own expert, and a
    copy in each slot, from any node."""
    if not layout.has_copies or layout.makes_replicas:
        return layout
    full = dataclasses.replace(
        layout,
        offers_per_device=layout.experts_per_device,
        copies_per_device=layout.slots_per_device,
    )
    return dataclasses.replace(full, **full.most_between_nodes)


def owners_alone(layout: Layout, owned_le: np.ndarray) -> ExpertPlan:
    """Return a plan with own experts in the first slots of each device and the others
    empty, for dynamic replication to fill."""
    w, own = layout.num_devices, layout.experts_per_device
    table_lws = np.full((len(owned_le), w, layout.slots_per_device), -1, np.int32)
    table_lws[:, :, :own] = owned_le.reshape(len(owned_le), w, own)
    table_lp = table_lws.reshape(len(owned_le), -1)
    return ExpertPlan(table_lp, layout.num_experts, owned_le)


def random_owners(rng, num_experts: int, num_layers: int) -> np.ndarray:
    """Return experts in a random order of owners for each layer, int32 [l, e]."""
    order = [rng.permutation(num_experts) for _ in range(num_layers)]
    return np.stack(order).astype(np.int32)


def odd_plans(layout: Layout, num_layers: int) -> dict[str, ExpertPlan]:
    """Return three extreme plans by name.

    In the first every device has a replica of one hot expert. In the second all
    replicas of an expert are on one device, which is not its owner and holds nothing
    else. In the third a device computes nothing.
    """
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
    """Return the plan of each policy for a skewed load, converted to this layout."""
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
    """Return the layout with another store, the same slots, and budgets for every copy;
    store 'owned' has no slots for copies."""
    own, slots = layout.experts_per_device, layout.slots_per_device
    alone = dataclasses.replace(
        layout,
        store=store,
        slots_per_device=own if store == "owned" else slots,
        offers_per_device=0,
        copies_per_device=0,
        prefetch=False,
    )
    return roomy(alone)


def _random_row(rng, layout: Layout) -> np.ndarray:
    """Return the experts of all slots of one layer: each expert once, then any or none,
    in random order."""
    every_e = np.arange(layout.num_experts)
    rest = rng.integers(-1, layout.num_experts, layout.num_slots - len(every_e))
    return rng.permutation(np.r_[every_e, rest]).astype(np.int32)
