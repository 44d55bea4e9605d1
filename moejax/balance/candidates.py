"""What could be done about a load: plans for today's layout and for its neighbours,
priced in seconds.

    swap        the policy's plan for today's layout, in the layers where it pays
    relayout    one thing changed - slots per device by one, the store, the room for
                copies, rows per peer - and the policy's plan for that
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from moejax.balance.decision import duration
from moejax.balance.policies import Policy
from moejax.perf.cost_model import CostModel, tight
from moejax.perf.traffic import device_rows, max_over_mean, pair_rows, rows_by_slot
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import ROW_MULTIPLE, Layout, Store


@dataclasses.dataclass(frozen=True)
class Question:
    """What is weighed: a load, and what may be done about it."""

    load_lwe: np.ndarray
    """As it will be when a change is adopted."""
    peak_l: np.ndarray
    """By how much the fullest pair that is seen, at its 95th percentile, exceeds that
    of the mean load."""
    has_pairs: bool
    """Whether that is known well enough to fit buffers to it."""
    ratio: float
    """Device max/mean of that load in the worst layer, under today's plan."""
    plan: ExpertPlan
    layout: Layout
    cost: CostModel
    policy: Policy
    margin: float
    horizon_steps: int
    max_slots_per_device: int

    @functools.cached_property
    def sec_l(self) -> np.ndarray:
        """Seconds of each layer in one step, today."""
        return sec_by_layer(self, self.plan, self.layout)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan and a layout for it, compared with today's."""

    plan: ExpertPlan
    layout: Layout
    ratio: float
    gain_sec: float
    base_sec: float
    """What the layers cost today, per step, that it changes; for a relayout, all."""
    move_sec: float
    compile_sec: float
    num_layers: int
    """Layers whose slots or owners it changes."""

    @property
    def cost_sec(self) -> float:
        return self.move_sec + self.compile_sec

    def net_sec(self, horizon_steps: int) -> float:
        return self.gain_sec * horizon_steps - self.cost_sec


def ratio_by_layer(
    load_lwe: np.ndarray, plan: ExpertPlan, layout: Layout
) -> np.ndarray:
    """Device max/mean of each layer, float [l]."""
    w, split = layout.num_devices, layout.split
    rows = zip(load_lwe, plan.slot_to_expert_lp)
    return np.array(
        [max_over_mean(device_rows(rows_by_slot(x, p, w, split))) for x, p in rows]
    )


def fullest_pair_by_layer(
    load_lwe: np.ndarray, plan: ExpertPlan, layout: Layout
) -> np.ndarray:
    """Most rows of a step that one source has for one device, float [l]."""
    w, split = layout.num_devices, layout.split
    rows = zip(load_lwe, plan.slot_to_expert_lp)
    max_l = [pair_rows(rows_by_slot(x, p, w, split)).max() for x, p in rows]
    return layout.source_share * np.array(max_l)


def sec_by_layer(question: Question, plan: ExpertPlan, layout: Layout) -> np.ndarray:
    """Seconds of each layer in one step, float [l]: the cost model's, and with padded
    buffers the later rounds of pairs as full as they are seen to be."""
    cost = question.cost
    w, split = layout.num_devices, layout.split
    sec_l = np.zeros(plan.num_layers)
    for layer, row_p in enumerate(plan.slot_to_expert_lp):
        load_we, peak = question.load_lwe[layer], question.peak_l[layer]
        sec_l[layer] = cost.layer_sec(load_we, row_p, layout)
        if layout.transport != "local" and peak > 1:
            pair_ww = pair_rows(rows_by_slot(load_we, row_p, w, split))
            peak_sec = cost.wire_sec(peak * pair_ww, layout)
            sec_l[layer] += cost.num_exchanged * (
                peak_sec - cost.wire_sec(pair_ww, layout)
            )
    return sec_l


def swap(question: Question) -> list[Candidate]:
    """The policy's plan for today's layout, where it pays: one candidate, or none."""
    plan, layout = question.plan, question.layout
    if layout.store not in question.policy.stores:
        return []
    # This layout's copies travel whether a plan uses them or not: they are free to it.
    sunk = dataclasses.replace(question.cost, bytes_per_expert=0.0)
    new = question.policy.plan(question.load_lwe, layout, sunk, plan)
    merged = _cheaper(question, plan, new, layout, question.margin)
    return [] if merged == plan else [_priced(question, merged, layout)]


def relayouts(question: Question, swapped: ExpertPlan) -> list[Candidate]:
    """The policy's plans for the neighbours of today's layout, each also with rows per
    peer that fit it; `swapped` is the best known plan for today's."""
    if question.layout.exchange == "capacity":
        return []  # which rows are dropped follows from the layout: it stays
    now = question.layout
    pairs = [(question.plan, now), (swapped, now)]
    for roomy in _neighbours(question):
        base = question.plan.resized(roomy)
        new = question.policy.plan(question.load_lwe, roomy, question.cost, base)
        plan = _cheaper(question, base, new, roomy, 0.0)
        pairs.append((plan, _with_slack(plan, roomy)))
    pairs += [(plan, fitted(question, plan, layout)) for plan, layout in pairs]
    return [_priced(question, plan, layout) for plan, layout in pairs if layout != now]


def refits(question: Question) -> list[Candidate]:
    """Today's plan with rows per peer that fit what is seen: one candidate, or none."""
    if question.layout.exchange == "capacity":
        return []
    layout = fitted(question, question.plan, question.layout)
    if layout == question.layout:
        return []
    return [_priced(question, question.plan, layout)]


def fitted(question: Question, plan: ExpertPlan, layout: Layout) -> Layout:
    """With buffers for the fullest pair that this plan is expected to have."""
    if layout.transport == "local" or not question.has_pairs:
        return layout
    micro_batches = question.cost.micro_batches
    pair_l = fullest_pair_by_layer(question.load_lwe, plan, layout)
    fullest = (question.peak_l * pair_l).max() / micro_batches
    most = math.ceil(round(question.load_lwe.sum(axis=2).max() / micro_batches, 6))
    rows = math.ceil(round(fullest / ROW_MULTIPLE, 6)) * ROW_MULTIPLE
    windows = layout.num_windows
    rows = -(-max(1, min(rows, most)) // windows) * windows
    return dataclasses.replace(layout, rows_per_peer=rows)


def objection(question: Question, candidate: Candidate) -> str:
    """Why a candidate is not adopted; empty when it is."""
    gain_sec, min_sec = candidate.gain_sec, question.margin * candidate.base_sec
    saved = f"{duration(max(gain_sec, 0.0))}/step"
    if not gain_sec > min_sec:
        return f"saves {saved}, the margin is {duration(min_sec)}"
    if not candidate.net_sec(question.horizon_steps) > 0:
        price = duration(candidate.cost_sec)
        return (
            f"saves {saved}, too little in {question.horizon_steps} steps for {price}"
        )
    if candidate.ratio > question.ratio:
        return f"saves {saved}, but max/mean would be {candidate.ratio:.2f}"
    return ""


def num_moves(before: ExpertPlan, after: ExpertPlan, num_devices: int) -> int:
    """Experts that a device holds after and not before, over layers and devices."""
    rows = zip(before.slot_to_expert_lp, after.slot_to_expert_lp)
    e = before.num_experts
    return sum(
        int((_held(new_p, e, num_devices) & ~_held(old_p, e, num_devices)).sum())
        for old_p, new_p in rows
    )


def _held(row_p: np.ndarray, num_experts: int, num_devices: int) -> np.ndarray:
    """Whether a device holds an expert, [w, e] bool."""
    held_we = np.zeros((num_devices, num_experts), bool)
    slot_p = np.flatnonzero(row_p >= 0)
    held_we[slot_p // (len(row_p) // num_devices), row_p[slot_p]] = True
    return held_we


def _neighbours(question: Question) -> Iterator[Layout]:
    """Layouts one change away, with as much room for copies as there can be."""
    now, policy = question.layout, question.policy
    own = now.experts_per_device
    slots = [now.slots_per_device]
    if policy.has_replicas:
        slots += [now.slots_per_device + 1, now.slots_per_device - 1]
    is_new = now.store not in policy.stores
    seen = {now}
    for store in policy.stores:
        for s in slots:
            is_one_change = is_new or store == now.store or s == now.slots_per_device
            room = min(question.max_slots_per_device, now.num_experts)
            room = own if store == "owned" else room
            if is_one_change and own <= s <= room:
                layout = _roomy(question, store, s)
                if layout not in seen:
                    seen.add(layout)
                    yield layout


def _roomy(question: Question, store: Store, slots_per_device: int) -> Layout:
    """With budgets for any plan that these slots can hold."""
    now, has_copies = question.layout, store in ("transient", "resident")
    is_prefetched = now.prefetch if now.store == store else question.policy.prefetch
    return dataclasses.replace(
        now,
        store=store,
        slots_per_device=slots_per_device,
        offers_per_device=now.experts_per_device if has_copies else 0,
        copies_per_device=slots_per_device if has_copies else 0,
        prefetch=is_prefetched and store == "transient",
    )


def _with_slack(plan: ExpertPlan, roomy: Layout) -> Layout:
    """With budgets for this plan, and for a little more: swaps are to come."""
    if roomy.store not in ("transient", "resident"):
        return roomy
    snug, own = tight(roomy, plan), roomy.experts_per_device
    slots = roomy.slots_per_device
    return dataclasses.replace(
        snug,
        offers_per_device=max(snug.offers_per_device, min(2, own)),
        copies_per_device=max(snug.copies_per_device, min(slots - own + 1, slots)),
    )


def _cheaper(
    question: Question, base: ExpertPlan, new: ExpertPlan, layout: Layout, margin: float
) -> ExpertPlan:
    """`new` in the layers that it makes cheaper by the margin, and by more over the
    horizon than its owners cost to move; `base` in the others."""
    is_today = layout == question.layout
    base_sec_l = question.sec_l if is_today else sec_by_layer(question, base, layout)
    gain_l = base_sec_l - sec_by_layer(question, new, layout)
    ratio_l = ratio_by_layer(question.load_lwe, new, layout)
    pays_l = (gain_l > margin * base_sec_l) & (ratio_l <= question.ratio)
    for layer in np.flatnonzero(pays_l):
        rows = [_layer(base, layer), _layer(new, layer)]
        move_sec = question.cost.move_sec(*rows, layout)
        pays_l[layer] = gain_l[layer] * question.horizon_steps > move_sec
    takes_l1 = pays_l[:, None]
    return ExpertPlan(
        np.where(takes_l1, new.slot_to_expert_lp, base.slot_to_expert_lp),
        base.num_experts,
        np.where(takes_l1, new.owned_le, base.owned_le),
    )


def _layer(plan: ExpertPlan, layer: int) -> ExpertPlan:
    here = slice(layer, layer + 1)
    table_1p, owned_1e = plan.slot_to_expert_lp[here], plan.owned_le[here]
    return ExpertPlan(table_1p, plan.num_experts, owned_1e)


def _changed(before: ExpertPlan, after: ExpertPlan) -> np.ndarray:
    """Whether a layer's slots or owners are others, [l] bool."""
    if before.num_slots != after.num_slots:
        return np.ones(before.num_layers, bool)
    slots_lp = before.slot_to_expert_lp != after.slot_to_expert_lp
    return slots_lp.any(axis=1) | (before.owned_le != after.owned_le).any(axis=1)


def _priced(question: Question, plan: ExpertPlan, layout: Layout) -> Candidate:
    now, now_sec_l, cost = question.layout, question.sec_l, question.cost
    sec_l = sec_by_layer(question, plan, layout)
    changed_l = _changed(question.plan, plan)
    is_swap = layout == now
    return Candidate(
        plan,
        layout,
        ratio=float(ratio_by_layer(question.load_lwe, plan, layout).max()),
        gain_sec=float((now_sec_l - sec_l).sum()),
        base_sec=float(now_sec_l[changed_l].sum() if is_swap else now_sec_l.sum()),
        move_sec=float(cost.move_sec(question.plan, plan, layout, now)),
        compile_sec=0.0 if is_swap else float(cost.compile_sec),
        num_layers=int(changed_l.sum()),
    )
