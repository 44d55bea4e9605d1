"""Units: what a plan balances, a device or, with domains, all devices of one.

The devices of a domain gather one another's slots, so that each of them can compute any
row of its domain, and rows travel between domains (moejax.moe.weights.domains). A
policy that balances units therefore sees a group of `Layout.exchanged.num_devices`
devices. Here are the ways there and back:

    unit_loads(load_lwe, layout)      rows from a unit to each expert
    unit_plan(plan, layout)           what each unit holds
    device_plan(made, layout, ..)     the slots of its devices, from those of a unit

In a unit's plan experts have other numbers: those that a unit owns under the home plan
are consecutive, as they are for devices. Unit 0 owns experts 0 1 2 3, unit 1 owns 4 5 6
7, and so on, whichever devices are its members. `unit_order` translates.
"""

import numpy as np

from moejax.plan.expert_plan import EMPTY, ExpertPlan
from moejax.plan.layout import Layout


def device_order(layout: Layout) -> np.ndarray:
    """Return the numbers of the group's devices, unit after unit, int [w]."""
    if layout.domain is None:
        return np.arange(layout.num_devices)
    return np.array(layout.domain.members()).reshape(-1)


def as_gathered(values_lx: np.ndarray, layout: Layout) -> np.ndarray:
    """Return values [.., x] that lie device after device in the order in which the
    devices of each domain gather them, unit after unit."""
    if layout.domain is None:
        return values_lx
    by_device = values_lx.reshape(*values_lx.shape[:-1], layout.num_devices, -1)
    return by_device[..., device_order(layout), :].reshape(values_lx.shape)


def unit_order(layout: Layout) -> np.ndarray:
    """Return the expert that has each number in a unit's plan, int [e]."""
    return as_gathered(np.arange(layout.num_experts), layout)


def unit_loads(load_lwe: np.ndarray, layout: Layout) -> np.ndarray:
    """Return the rows from each unit to each expert, as one of its devices has them:
    the mean over its devices, [.., u, e]. Experts have the numbers of a unit's plan.

    Rows travel between devices at the same place of their domains, so that a domain of
    several devices takes part in as many exchanges, between as many devices as there
    are domains. Their mean is what a policy balances.
    """
    if layout.domain is None:
        return load_lwe
    *rest, _, e = load_lwe.shape
    members = load_lwe[..., device_order(layout), :][..., unit_order(layout)]
    return members.reshape(*rest, -1, layout.domain_size, e).mean(axis=-2)


def unit_slots(row_p: np.ndarray, layout: Layout) -> np.ndarray:
    """Return the expert in each slot of each unit, with the numbers of a unit's plan,
    int32 [.., p]; -1 is an empty slot."""
    if layout.domain is None:
        return row_p
    return _renamed(as_gathered(row_p, layout), _inverse(unit_order(layout)))


def unit_plan(plan: ExpertPlan, layout: Layout) -> ExpertPlan:
    """Return a plan of the group's devices as one of its units, for the layout
    `layout.exchanged`."""
    if layout.domain is None:
        return plan
    return ExpertPlan(
        unit_slots(plan.slot_to_expert_lp, layout),
        plan.num_experts,
        unit_slots(plan.owned_le, layout),
    )


def device_plan(made: ExpertPlan, layout: Layout, current: ExpertPlan) -> ExpertPlan:
    """Return a plan of units as one of the group's devices.

    Owners are the devices at the same place. In the stores that have copies, a device
    holds those of its own experts that its unit holds, and the members of a unit share
    out its copies. A layer in which a device would hold more copies than the budget of
    `layout` allows keeps the slots and owners of `current`.
    """
    if layout.domain is None:
        return made
    expert_e = unit_order(layout)
    owned_le = _as_on_devices(_renamed(made.owned_le, expert_e), layout)
    table_lp = _as_on_devices(_renamed(made.slot_to_expert_lp, expert_e), layout)
    if not layout.has_copies:
        owned_le = None if layout.store == "sharded" else owned_le
        return ExpertPlan(table_lp, made.num_experts, owned_le)
    members, rows, owners = device_order(layout), [], []
    members = members.reshape(-1, layout.domain_size)
    for layer, (row_p, owned_e) in enumerate(zip(table_lp, owned_le)):
        row_ws = row_p.reshape(layout.num_devices, -1)
        owned_wi = owned_e.reshape(layout.num_devices, -1)
        shared = [_shared_out(row_ws[w], owned_wi[w], layout) for w in members]
        if any(part is None for part in shared):
            rows.append(current.slot_to_expert_lp[layer])
            owners.append(current.owned_le[layer])
            continue
        new_ws = np.empty_like(row_ws)
        for w, part in zip(members, shared):
            new_ws[w] = part
        rows.append(new_ws.reshape(-1))
        owners.append(owned_e)
    return ExpertPlan(np.stack(rows), made.num_experts, np.stack(owners))


def _shared_out(
    held_ms: np.ndarray, owned_mi: np.ndarray, layout: Layout
) -> np.ndarray | None:
    """Return the slots of a unit's members, [m, s], that together hold what `held_ms`
    does. None where a member would hold more copies than its budget allows.

    Own experts are first; each copy goes to the member with the fewest full slots.
    """
    left = held_ms[held_ms != EMPTY].tolist()
    members: list[list[int]] = []
    for owned_i in owned_mi.tolist():
        own = [expert for expert in owned_i if expert in left]
        for expert in own:
            left.remove(expert)
        members.append(own)
    copies = [0] * len(members)
    for expert in left:
        with_room = [
            (len(held), m)
            for m, held in enumerate(members)
            if len(held) < layout.slots_per_device
            and (copies[m] < layout.copies_per_device or expert in owned_mi[m])
        ]
        if not with_room:
            return None
        _, m = min(with_room)
        members[m].append(expert)
        copies[m] += expert not in owned_mi[m]
    row_ms = np.full(held_ms.shape, EMPTY, np.int32)
    for row_s, held in zip(row_ms, members):
        row_s[: len(held)] = held
    return row_ms


def _as_on_devices(values_lx: np.ndarray, layout: Layout) -> np.ndarray:
    """Return values that lie unit after unit device after device: the reverse of
    `as_gathered`."""
    by_device = values_lx.reshape(*values_lx.shape[:-1], layout.num_devices, -1)
    back_w = _inverse(device_order(layout))
    return by_device[..., back_w, :].reshape(values_lx.shape)


def _inverse(order_x: np.ndarray) -> np.ndarray:
    """Return the place of each number in a permutation."""
    place_x = np.empty_like(order_x)
    place_x[order_x] = np.arange(len(order_x))
    return place_x


def _renamed(table_lx: np.ndarray, name_e: np.ndarray) -> np.ndarray:
    """Return a table of experts with other numbers; -1 stays."""
    return np.where(table_lx < 0, EMPTY, name_e[table_lx]).astype(np.int32)
