"""FlexMoE's scheduler (SIGMOD'23, arXiv 2304.03946, Eq. 5-9, Alg. 1-2).

Starting from the current plan, the scheduler changes replicas of experts one by one:

    Expand    put a replica of the most loaded expert into an empty slot
    Shrink    remove a replica of the least loaded expert, and Expand into its slot
    Migrate   exchange the contents of two slots on two devices (one may be empty)
    Displace  do all three: move the expert in an Expand's way to the slot of a Shrink

An expert's rows are split evenly over its replicas. The search compares steps by a
smooth maximum of the devices' times. It returns the cheapest plan on its way by Eq. 5
with the synchronisation of the cost model. docs/decisions/0009 lists the choices made
where the paper could not be read.
"""

import numpy as np

from moejax.balance.policies.flexmoe.replicas import (
    Replicas,
    is_freed,
    may_exchange,
    may_hold,
    put,
    start,
)
from moejax.perf.cost_model import CostModel
from moejax.perf.traffic import max_over_mean
from moejax.plan.expert_plan import EMPTY, ExpertPlan
from moejax.plan.layout import Layout

THRESHOLD = 1.1
"""Balance ratio (Eq. 6) up to which a layer is not changed."""
STUCK = 1.2
"""Balance ratio above which a plan counts as a local optimum, and a search from home is
tried too."""
POWER = 8
"""Power of the norm of device times that steps lower. A plain maximum would not change
where two devices are equally full."""
MIN_GAIN = 5e-3
"""Share of the norm that a step must save, which bounds the number of steps."""


def plan(
    load_lwe: np.ndarray, layout: Layout, cost: CostModel, current: ExpertPlan
) -> ExpertPlan:
    """Return the cheapest plan of each layer on the search's way from `current`, which
    has the layout's size.

    The search starts from home where `current` exceeds the layout's budgets. Where the
    way from `current` ends uneven, a second search starts from home too.
    """
    max_offers, max_copies = limits = max_budgets(layout)
    offers, copies = current.needs(layout.num_devices)[:2]
    if not current.is_logical or offers > max_offers or copies > max_copies:
        current = ExpertPlan.home_in(layout, len(load_lwe))
    sync_oc = sync_table(layout, cost, limits)
    exchange_sec = cost.bytes_per_row / cost.bytes_per_sec
    per_row_sec = np.array([3 * expert_sec(1, cost), 4 * exchange_sec])
    home_p = ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0]
    rows = []
    for load_we, row_p in zip(load_lwe, current.slot_to_expert_lp, strict=True):

        def replicas(row_p, load_we=load_we):
            return start(load_we, row_p, per_row_sec, sync_oc)

        best_p = adjust(replicas(row_p), layout)
        if max_over_mean(replicas(best_p).rows_kw[0]) > STUCK:
            fresh_p = adjust(replicas(home_p), layout)
            best_p = min(best_p, fresh_p, key=lambda row_p: plan_sec(replicas(row_p)))
        rows.append(best_p)
    return ExpertPlan(np.stack(rows), layout.num_experts)


def expert_sec(num_rows: float, cost: CostModel) -> float:
    """Return the forward time of rows: rows over rows per second (TPS), Eq. 7."""
    return num_rows * cost.flops_per_row / cost.flops_per_sec


def sync_sec(num_experts: float, cost: CostModel) -> float:
    """Return the time to send experts one way: |W| / BPS for each of them (Eq. 9)."""
    return num_experts * cost.bytes_per_expert / cost.bytes_per_sec


def max_budgets(layout: Layout) -> tuple[int, int]:
    """Return the maximum number of experts that a device may offer to others, and of
    copies that it may hold.

    A sharded store has no budgets: all own experts can be offered, and all slots can
    hold copies.
    """
    if layout.store == "sharded":
        return layout.experts_per_device, layout.slots_per_device
    return layout.offers_per_device, layout.copies_per_device


def sync_table(layout: Layout, cost: CostModel, limits: tuple[int, int]) -> np.ndarray:
    """Return the time of synchronisation by offers and copies, float [o, c] (Eq. 9).

    It counts slices sent and received, of weights and of gradients. A plan is charged
    for the copies that it needs, not for the room in the layout, since a relayout
    removes spare room. Sharded slots travel whatever the plan is, and cost nothing.
    """
    table_oc = np.add.outer(*(np.arange(limit + 1.0) for limit in limits))
    w = layout.num_devices
    if layout.store == "sharded" or w == 1:
        return np.zeros_like(table_oc)
    one_way_sec = sync_sec((w - 1) / w, cost)
    table_oc[1:] *= one_way_sec
    table_oc[0, 1:] *= one_way_sec
    table_oc.reshape(-1)[1:] += 2 * cost.latency_sec
    return 2 * (cost.micro_batches if layout.store == "transient" else 1) * table_oc


def adjust(state: Replicas, layout: Layout) -> np.ndarray:
    """Return the slots of one layer after the search (Alg. 1).

    Steps are made while the balance ratio is above the threshold. The number of copies
    that a device may hold grows by one while that pays, so that all devices may hold
    one copy before any may hold two.
    """
    first = max_copies = state.sync_oc.shape[1] - 1
    if layout.store != "sharded":
        first = max(int(state.copies_w.max()), min(1, max_copies))
    best_sec, best_ws = plan_sec(state), state.row_ws.copy()
    for num_copies in range(first, max_copies + 1):
        before_sec = best_sec
        while max_over_mean(state.rows_kw[0]) > THRESHOLD and (
            expand(state, num_copies)
            or migrate(state, num_copies)
            or shrink(state, num_copies)
            or displace(state, num_copies)
        ):
            sec = plan_sec(state)
            if sec < best_sec:
                best_sec, best_ws = sec, state.row_ws.copy()
        if best_sec == before_sec:
            break
    return best_ws.reshape(-1)


def plan_sec(state: Replicas) -> float:
    """Return the time of a layer: compute and exchanges of the slowest devices (Eq. 5),
    and synchronisation (Eq. 9)."""
    max_k = state.rows_kw.max(axis=1)
    sync = state.sync_oc[state.offers_w.max(), state.copies_w.max()]
    compute_sec, exchange_sec = state.row_sec
    return float(compute_sec * max_k[0] + exchange_sec * max(max_k[1], max_k[2]) + sync)


def expand(state: Replicas, num_copies: int) -> bool:
    """Put a replica of a hot expert into an empty slot, and return whether that paid.

    Where it does not pay, nothing changes.
    """
    has_room_w = state.held_ew[EMPTY] > 0
    if not has_room_w.any():
        return False
    hot_x = hottest(state)
    time_xcw = state.time_w + _change(state, hot_x, 1)
    allowed_xc = has_room_w & may_hold(state, hot_x, num_copies)
    return _put_best(state, time_xcw, allowed_xc, hot_x, np.full(len(hot_x), EMPTY))


def shrink(state: Replicas, num_copies: int) -> bool:
    """Replace a replica of a cold expert by a hot one, and return whether that paid.

    Where it does not pay, nothing changes.
    """
    cold = coldest(state)
    hot_x = hottest(state)
    hot_x = hot_x[hot_x != cold]
    if state.replicas_e[cold] == 1 or len(hot_x) == 0:
        return False
    cold_x = np.full(len(hot_x), cold)
    time_xcw = state.time_w + _change(state, hot_x, 1) + _change(state, cold_x, -1)
    allowed_xc = may_hold(state, hot_x, num_copies, is_freed(state, cold_x))
    allowed_xc &= state.held_ew[cold_x] > 0
    return _put_best(state, time_xcw, allowed_xc, hot_x, cold_x)


def migrate(state: Replicas, num_copies: int) -> bool:
    """Exchange a slot i of the fullest device with a slot p of another, and return
    whether that paid.

    Where no exchange pays, nothing changes.
    """
    w, s = state.row_ws.shape
    time_w = state.time_w
    full = int(time_w.argmax())
    mine_i, other_p = state.row_ws[full], state.row_ws.reshape(-1)
    device_p = state.device_p
    part_ew = state.time_ew[mine_i] / state.replicas_e[mine_i, None]
    replicas_p = state.replicas_e[other_p]
    comes_p = state.time_ew[other_p, full] / replicas_p
    goes_p = state.time_ew[other_p, device_p] / replicas_p
    here_ip = time_w[full] - part_ew[:, full, None] + comes_p
    there_ip = time_w[device_p] - goes_p + part_ew[:, device_p]
    power_w = _power(time_w)
    norm_ip = _power(here_ip) + _power(there_ip)
    norm_ip += power_w.sum() - power_w[full] - power_w[device_p]
    norm_ip[~may_exchange(state, full, num_copies)] = np.inf
    i, p = divmod(int(norm_ip.argmin()), w * s)
    if not norm_ip[i, p] < _max_norm(state):
        return False
    mine, other = int(mine_i[i]), int(other_p[p])
    put(state, full, i, other)
    put(state, p // s, p % s, mine)
    return True


def displace(state: Replicas, num_copies: int) -> bool:
    """Put a replica of a hot expert into a slot p, and return whether that paid.

    The expert in slot p moves to another device, into an empty slot or that of a cold
    expert. Where it does not pay, nothing changes.
    """
    w, s = state.row_ws.shape
    cold = EMPTY if state.held_ew[EMPTY].any() else coldest(state)
    if cold != EMPTY and state.replicas_e[cold] == 1:
        return False
    to = int(np.where(state.held_ew[cold] > 0, state.time_w, np.inf).argmin())
    time_w = state.time_w
    if cold != EMPTY:
        time_w = time_w + _change(state, np.array([cold]), -1)[0, to]
    device_p, moved_p = state.device_p, state.row_ws.reshape(-1)
    freed_p = is_freed(state, (moved_p, device_p))
    fits_p = may_hold(state, moved_p, num_copies, is_freed(state, cold))[:, to]
    replicas_p = state.replicas_e[moved_p]
    for hot in hottest(state).tolist():
        if hot == cold:
            continue
        allowed_p = (moved_p != EMPTY) & (moved_p != hot) & (moved_p != cold)
        allowed_p &= (device_p != to) & fits_p
        has_room_w = may_hold(state, np.array([hot]), num_copies)[0]
        has_room_p = may_hold(state, np.array([hot]), num_copies, 1)[0, device_p]
        allowed_p &= has_room_w[device_p] | (has_room_p & freed_p)
        time_pw = (time_w + _change(state, np.array([hot]), 1)[0])[device_p]
        all_p = np.arange(w * s)
        time_pw[all_p, device_p] -= state.time_ew[moved_p, device_p] / replicas_p
        time_pw[:, to] += state.time_ew[moved_p, to] / replicas_p
        norm_p = np.where(allowed_p, _power(time_pw).sum(axis=1), np.inf)
        p = int(norm_p.argmin())
        if norm_p[p] < _max_norm(state):
            put(state, to, int((state.row_ws[to] == cold).argmax()), int(moved_p[p]))
            put(state, p // s, p % s, hot)
            return True
    return False


def coldest(state: Replicas) -> int:
    """Return the expert of the least loaded replica, among experts with several."""
    return int(np.where(state.replicas_e > 1, state.share_e, np.inf).argmin())


def hottest(state: Replicas) -> np.ndarray:
    """Return the expert of the most loaded replica, and the one of the most loaded
    replica on the fullest device if it is another."""
    is_here_e = state.held_ew[:, state.time_w.argmax()] > 0
    first = state.share_e.argmax()
    second = (state.share_e * is_here_e).argmax()
    return np.array([first] if first == second else [first, second])


def _change(state: Replicas, expert_x: np.ndarray, by: int) -> np.ndarray:
    """Return the change of device times when device c has `by` more replicas of expert
    x, float [x, c, w]."""
    replicas_x = state.replicas_e[expert_x, None]
    change_x = 1 / (replicas_x + by)
    share_xw = state.held_ew[expert_x] * (change_x - 1 / replicas_x)
    here_cw = by * state.here_ww
    share_xcw = share_xw[:, None] + change_x[..., None] * here_cw
    return state.time_ew[expert_x][:, None] * share_xcw


def _put_best(state: Replicas, time_xcw, allowed_xc, expert_x, old_x) -> bool:
    """Put expert x into a slot of `old_x` on device c, for the best x and c, and return
    whether that saves enough.

    Where it does not, nothing changes.
    """
    norm_xc = np.where(allowed_xc, _power(time_xcw).sum(axis=-1), np.inf)
    x, device = divmod(int(norm_xc.argmin()), norm_xc.shape[1])
    if not norm_xc[x, device] < _max_norm(state):
        return False
    slot = int((state.row_ws[device] == old_x[x]).argmax())
    put(state, device, slot, int(expert_x[x]))
    return True


def _power(time: np.ndarray) -> np.ndarray:
    """Return time ** POWER, by squaring."""
    for _ in range(POWER.bit_length() - 1):
        time = time * time
    return time


def _max_norm(state: Replicas) -> float:
    """Return the norm of device times that a step must fall below."""
    return float(_power(state.time_w).sum()) * (1 - MIN_GAIN) ** POWER
