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
    `layout.exchanged`. A unit holds each expert once: further slots of it are empty."""
    if layout.domain is None:
        return plan
    slots_lp = unit_slots(plan.slot_to_expert_lp, layout)
    slots_lus = slots_lp.reshape(len(slots_lp), layout.exchanged.num_devices, -1)
    is_equal = slots_lus[..., None] == slots_lus[..., None, :]
    is_again_lus = np.tril(is_equal, k=-1).any(axis=-1)
    return ExpertPlan(
        np.where(is_again_lus, EMPTY, slots_lus).reshape(slots_lp.shape),
        plan.num_experts,
        unit_slots(plan.owned_le, layout),
    )


def device_plan(made: ExpertPlan, layout: Layout, current: ExpertPlan) -> ExpertPlan:
    """Return a plan of units as one of the group's devices.

    Owners are the devices at the same place. In the stores that have copies, a device
    holds those of its own experts that its unit holds, and the members of a unit share
    out its copies. A layer in which a device would hold or offer more copies than the
    budgets of `layout` allow keeps the slots and owners of `current`.
    """
    if layout.domain is None:
        return made
    expert_e = unit_order(layout)
    owned_le = _as_on_devices(_renamed(made.owned_le, expert_e), layout)
    table_lp = _as_on_devices(_renamed(made.slot_to_expert_lp, expert_e), layout)
    if not layout.has_copies:
        owned_le = None if layout.store == "sharded" else owned_le
        return ExpertPlan(table_lp, made.num_experts, owned_le)
    rows, owners = [], []
    for layer, (row_p, owned_e) in enumerate(zip(table_lp, owned_le)):
        spread_p = _spread(row_p, owned_e, layout)
        is_kept = spread_p is None
        rows.append(current.slot_to_expert_lp[layer] if is_kept else spread_p)
        owners.append(current.owned_le[layer] if is_kept else owned_e)
    return ExpertPlan(np.stack(rows), made.num_experts, np.stack(owners))


def _spread(
    row_p: np.ndarray, owned_e: np.ndarray, layout: Layout
) -> np.ndarray | None:
    """Return the slots of one layer's devices, in which each unit holds what it does in
    `row_p`. None where that breaks a budget of the layout.

    Own experts are first; each copy goes to the member with the fewest copies, of equal
    ones with the fewest full slots.
    """
    w = layout.num_devices
    row_ws, owned_wi = row_p.reshape(w, -1), owned_e.reshape(w, -1).tolist()
    held_w: list[list[int]] = [[] for _ in range(w)]
    for members in device_order(layout).reshape(-1, layout.domain_size).tolist():
        left = [expert for expert in row_ws[members].ravel().tolist() if expert >= 0]
        for member in members:
            held_w[member] = [expert for expert in owned_wi[member] if expert in left]
            for expert in held_w[member]:
                left.remove(expert)
        num_own = {member: len(held_w[member]) for member in members}
        for expert in left:
            with_room = [m for m in members if len(held_w[m]) < row_ws.shape[1]]
            sizes = [
                (len(held_w[m]) - num_own[m], len(held_w[m]), m) for m in with_room
            ]
            held_w[min(sizes)[-1]].append(expert)
    spread_ws = np.full(row_ws.shape, EMPTY, np.int32)
    for row_s, held in zip(spread_ws, held_w):
        row_s[: len(held)] = held
    spread_p = spread_ws.reshape(-1)
    spread = ExpertPlan(spread_p[None], len(owned_e), owned_e[None])
    return spread_p if spread.needs(w, layout.num_copy_nodes).fit(layout) else None


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
