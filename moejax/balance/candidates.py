"""Candidate changes for a load: plans for the current layout and for its neighbours,
priced in seconds.

    swap        the policy's plan for the current layout, in the layers where it pays
    relayout    a layout that differs in one respect (slots per device by one, store,
                room for copies, rows per peer, communication schedule, domain), and
                the policy's plan for it; or the layout and the plan of another method
                (`moejax.balance.methods`)
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from moejax.balance import methods
from moejax.balance.decision import duration
from moejax.balance.methods import Method
from moejax.balance.policies import Policy, make_valid_plan
from moejax.perf.cost_model import CostModel, layers_of, tight
from moejax.perf.traffic import (
    Sent,
    device_rows,
    layer_rows,
    max_over_mean,
    pair_rows,
    ratios_of,
    sent_rows,
)
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import ROW_MULTIPLE, Layout, Store
from moejax.plan.layout_checks import GATHERED_ONCE

MAX_LAYERS = 4
"""Number of layers in which methods and ways are compared: plans of all layers can take
longer than the steps until they are asked for."""
UNSEEN_PEAK = 1.25
"""Rows of the fullest pair of devices over those of the forecast, for which a method's
buffers have room where pairs were not observed yet. Home's buffers may be several times
as large, and smaller ones would need another compilation."""
MAX_WAYS = 2
"""Number of other communication schedules and domains that become candidates: the
second one where the first cannot be compiled."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A forecast load, with all that is needed to propose and to judge candidates."""

    load_lwe: np.ndarray
    """Forecast load at the adoption of a change, in rows per step."""
    peak_l: np.ndarray
    """Rows of the fullest pair of devices, at the 95th percentile of recent steps, over
    those of the fullest pair under the mean load; 1 at least."""
    has_pairs: bool
    """Whether fullest pairs are known well enough to fit buffers to them."""
    ratio: float
    """Device max/mean of the load in the worst layer, under the current plan."""
    plan: ExpertPlan
    """Current plan."""
    layout: Layout
    """Current layout."""
    cost: CostModel
    policy: Policy
    margin: float
    """Copy of Balance.margin: the smallest gain, as a share of the changed layers' time
    per step."""
    swap_steps: int
    """Number of steps over which the gain of a swap is summed: Balance.horizon_steps,
    but no more than the plan is in use."""
    relayout_steps: int
    """The same of a relayout, which is adopted later."""
    max_slots_per_device: int
    ways: tuple[Layout, ...] = ()
    """Layouts of the run's first step under each communication schedule and domain that
    may be chosen."""
    methods: Mapping[Method, Policy] = dataclasses.field(default_factory=dict)
    """Methods that may take the place of the current one, which is among them, and
    their policies."""
    policy_name: str = "policy"
    """Name of the policy."""
    together_lee: np.ndarray | None = None
    """Tokens that choose both of two experts (`moejax.plan.together`); None where they
    are not counted."""
    stale_share: float = 0.0
    """Share of steps in which plans meet `stale_lwe` (moejax.balance.loads.stale)."""
    stale_lwe: np.ndarray | None = None
    """Load before the last jump; None where there was none."""
    swapped: ExpertPlan | None = None
    """Best known plan for the current layout, if that is not the current one: a
    relayout must save more than the swap to it."""

    @property
    def best_plan(self) -> ExpertPlan:
        """Best known plan for the current layout."""
        return self.swapped or self.plan

    @property
    def max_ratio(self) -> float:
        """Largest device max/mean that a change may lead to."""
        return max(self.ratio, self.policy.max_ratio)

    @functools.cached_property
    def sec_l(self) -> np.ndarray:
        """Seconds of each layer in one step, under the current plan and layout."""
        return sec_by_layer(self, self.plan, self.layout)

    @functools.cached_property
    def best_sec_l(self) -> np.ndarray:
        """The same of the best known plan; where loads jump as they did, if methods are
        open."""
        return relayout_sec_by_layer(self, self.best_plan, self.layout)

    @functools.cached_property
    def planned(self) -> ExpertPlan:
        """The policy's plan for the current layout, in all layers; the current plan if
        the policy does not plan for the layout's store."""
        if self.layout.store not in self.policy.stores:
            return self.plan
        # This layout's copies travel whether a plan uses them or not: they are free.
        sunk = dataclasses.replace(self.cost, bytes_per_expert=0.0)
        return _plan(self, self.layout, sunk, self.plan)

    def counted_steps(self, layout: Layout) -> int:
        """Return the number of steps over which the gain of a change to `layout` is
        summed."""
        return self.swap_steps if layout == self.layout else self.relayout_steps

    def net_sec(self, candidate: "Candidate") -> float:
        """Return the time that a change saves over these steps, less its cost."""
        num_steps = self.counted_steps(candidate.layout)
        return candidate.gain_sec * num_steps - candidate.cost_sec


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan and a layout for it, compared with the current ones."""

    plan: ExpertPlan
    layout: Layout
    ratio: float
    """Forecast device max/mean of the worst layer with the change."""
    gain_sec: float
    """Time that the change saves in each step."""
    base_sec: float
    """Current time per step of the layers that change; in a relayout all layers do."""
    move_sec: float
    """Time to move master parameters and moments, once."""
    compile_sec: float
    """Time to compile the step of another layout, once; 0 for a swap."""
    num_layers: int
    """Number of layers whose slots or owners change."""
    policy: str
    """Name of the policy that plans from then on."""

    @property
    def cost_sec(self) -> float:
        """Time that the change costs once."""
        return self.move_sec + self.compile_sec


def ratio_by_layer(
    load_lwe: np.ndarray, plan: ExpertPlan, layout: Layout
) -> np.ndarray:
    """Return the device max/mean of each layer, float [l]."""
    rows = zip(load_lwe, plan.slot_to_expert_lp)
    return np.array(
        [max_over_mean(device_rows(layer_rows(x, p, layout))) for x, p in rows]
    )


def fullest_pair_by_layer(
    load_lwe: np.ndarray,
    plan: ExpertPlan,
    layout: Layout,
    together_lee: np.ndarray | None = None,
) -> np.ndarray:
    """Return the maximum number of rows that one device sends to one other in a step,
    float [l]."""
    pair_l = pairs_by_layer(load_lwe, plan, layout, layout.source_share)
    sent_l = sent_by_layer(pair_l, plan, layout, together_lee)
    return np.array([sent.fullest for sent in sent_l])


def pairs_by_layer(
    load_lwe: np.ndarray, plan: ExpertPlan, layout: Layout, share: float
) -> list[np.ndarray]:
    """Return the choices from each source at each device in each layer, [u, u], for a
    share of the loads."""
    rows = zip(load_lwe, plan.slot_to_expert_lp)
    return [share * pair_rows(layer_rows(x, p, layout)) for x, p in rows]


def sent_by_layer(
    pair_l: list[np.ndarray],
    plan: ExpertPlan,
    layout: Layout,
    together_lee: np.ndarray | None,
) -> list[Sent]:
    """Return the rows that travel in each layer for the choices of pairs of devices."""
    view = layout.exchanged.topped_up
    tables = pair_l, plan.slot_to_expert_lp, layers_of(together_lee, plan)
    return [
        sent_rows(pair_uu, view, ratios_of(together_ee, row_p, layout))
        for pair_uu, row_p, together_ee in zip(*tables)
    ]


def sec_by_layer(question: Question, plan: ExpertPlan, layout: Layout) -> np.ndarray:
    """Return the seconds of each layer in one step, float [l].

    They are the cost model's, and the time by which the exchange of rows takes longer
    because observed pairs of devices are fuller than those of the mean load.
    """
    cost = question.cost
    sec_l = np.zeros(plan.num_layers)
    together_l = layers_of(question.together_lee, plan)
    for layer, row_p in enumerate(plan.slot_to_expert_lp):
        load_we, peak = question.load_lwe[layer], question.peak_l[layer]
        sec_l[layer] = cost.layer_sec(load_we, row_p, layout, together_l[layer])
        if layout.transport != "local" and peak > 1:
            ratios = ratios_of(together_l[layer], row_p, layout)
            pair_uu = pair_rows(layer_rows(load_we, row_p, layout))
            peak_sec = cost.rows_sec(peak * pair_uu, layout, ratios)
            sec_l[layer] += peak_sec - cost.rows_sec(pair_uu, layout, ratios)
    return sec_l


def expected_sec_by_layer(
    question: Question, plan: ExpertPlan, layout: Layout
) -> np.ndarray:
    """Return the seconds of each layer in one step, float [l], of which some meet the
    load before the last jump. Methods are compared by these: a split that makes its
    replicas in the step has none for another load."""
    sec_l, share = sec_by_layer(question, plan, layout), question.stale_share
    if not share:
        return sec_l
    stale = dataclasses.replace(question, load_lwe=question.stale_lwe)
    return (1 - share) * sec_l + share * sec_by_layer(stale, plan, layout)


def relayout_sec_by_layer(
    question: Question, plan: ExpertPlan, layout: Layout
) -> np.ndarray:
    """Return the seconds of each layer in one step, float [l], by which a relayout is
    judged: where methods are open, those expected over loads that jump."""
    if question.methods:
        return expected_sec_by_layer(question, plan, layout)
    return sec_by_layer(question, plan, layout)


def swap(question: Question) -> list[Candidate]:
    """Return the policy's plan for the current layout, in the layers where it pays: one
    candidate, or none."""
    plan, layout = question.plan, question.layout
    if layout.store not in question.policy.stores:
        return []
    margin = question.margin
    merged = _merge_where_cheaper(question, plan, question.planned, layout, margin)
    return [] if merged == plan else [price(question, merged, layout)]


def relayouts(question: Question) -> list[Candidate]:
    """Return the policy's plans for the neighbours of the current layout.

    Each of them is a candidate with the current rows per peer, and another one with
    rows per peer that fit it.
    """
    if question.layout.exchange == "capacity":
        return []  # the layout decides which rows are dropped, and must not change
    now, best_plan = question.layout, question.best_plan
    if question.policy.needs_together:
        best_plan = question.planned  # may pay in buffers that fit it
    pairs = [(question.plan, now), (best_plan, now), *_other_ways(question, best_plan)]
    for roomy in _neighbours(question):
        base = question.plan.resized(roomy)
        new = _plan(question, roomy, question.cost, base)
        plan = _merge_where_cheaper(question, base, new, roomy, 0.0)
        pairs.append((plan, _with_slack(plan, roomy, question.policy)))
    pairs += [(plan, fitted(question, plan, layout)) for plan, layout in pairs]
    return [price(question, plan, layout) for plan, layout in pairs if layout != now]


def refits(question: Question) -> list[Candidate]:
    """Return the current plan with rows per peer that fit the observed pairs, and where
    these need more rows the policy's plan, with rows per peer that fit it.

    However even the load is, that may send fewer rows: where a data centre is one
    domain, those for an expert of which both have copies stay.
    """
    if question.layout.exchange == "capacity":
        return []
    now, plan = question.layout, question.plan
    pairs = [(plan, fitted(question, plan, now))]
    if pairs[0][1].rows_per_peer > now.rows_per_peer:
        pairs.append((question.planned, fitted(question, question.planned, now)))
    return [price(question, plan, layout) for plan, layout in pairs if layout != now]


def other_ways(question: Question) -> list[Candidate]:
    """Return a candidate for each other communication schedule and domain, with the
    rows per peer of a first step, and another one with rows per peer that fit it."""
    if question.layout.exchange == "capacity":
        return []
    pairs = list(_other_ways(question, question.plan))
    pairs += [(plan, fitted(question, plan, layout)) for plan, layout in pairs]
    return [price(question, plan, layout) for plan, layout in pairs]


def _other_ways(
    question: Question, plan: ExpertPlan
) -> Iterator[tuple[ExpertPlan, Layout]]:
    """Yield a plan and a layout for the best other communication schedules and domains.

    `plan` is the best known one for the current layout, which stays where units do. For
    other units the policy plans anew; a domain has room for each expert once. Ways are
    compared in a few layers, as methods are.
    """
    if question.layout.store not in question.policy.stores:
        return
    layers, sec = _fullest_layers(question), {}
    few, few_plan = _at_layers(question, layers), plan_at_layers(plan, layers)
    for layout in _way_layouts(question):
        there = _way_plan(few, few_plan, layout)
        sec[layout] = float(sec_by_layer(few, there, layout).sum())
    for layout in sorted(sec, key=sec.get)[:MAX_WAYS]:
        yield _way_plan(question, plan, layout), layout


def _way_layouts(question: Question) -> Iterator[Layout]:
    """Yield the current layout with each other communication schedule and domain."""
    now = question.layout
    for way in question.ways:
        if (way.tensor, way.domain) == (now.tensor, now.domain):
            continue
        most = now.num_experts // way.domain_size
        slots = max(min(now.slots_per_device, most), now.experts_per_device)
        layout = dataclasses.replace(
            now,
            tensor=way.tensor,
            domain=way.domain,
            transport=way.transport,
            rows_per_peer=way.rows_per_peer,
            rows_per_device=way.rows_per_device,
            num_nodes=way.num_nodes,
            rows_per_node=way.rows_per_node,
            prefetch=way.prefetch,
            slots_per_device=slots,
            copies_per_device=min(now.copies_per_device, slots),
        )
        yield dataclasses.replace(layout, **question.policy.between_nodes(layout))


def _way_plan(question: Question, plan: ExpertPlan, layout: Layout) -> ExpertPlan:
    """Return the plan for another schedule or domain: `plan` where units stay."""
    if layout.domain == question.layout.domain:
        return plan
    starts = question.plan, question.plan.resized(layout)
    home = ExpertPlan.home_in(layout, question.plan.num_layers)
    base = next((plan for plan in starts if _fits(plan, layout)), home)
    return _plan(question, layout, question.cost, base)


def other_methods(question: Question) -> list[Candidate]:
    """Return the change to the best of the other methods: one candidate, or none.

    They are compared in a few layers, those with most rows on their fullest device.
    Where several are near the best, the race decides (`methods.first_of_the_race`).
    """
    if question.layout.exchange == "capacity":
        return []
    now, few = question.layout, _at_layers(question, _fullest_layers(question))
    sec = {
        method: float(expected_sec_by_layer(few, plan, layout).sum())
        for method, (plan, layout) in method_changes(few).items()
    }
    best = methods.first_of_the_race(sec) if sec else None
    if best is None or best.is_in_use(question.policy_name, now):
        return []
    return [price(question, *_method_change(question, best), best.policy)]


def _fullest_layers(question: Question) -> np.ndarray:
    """Return the numbers of the MAX_LAYERS layers that have most rows on their fullest
    device."""
    rows = zip(question.load_lwe, question.plan.slot_to_expert_lp)
    full_l = [device_rows(layer_rows(*x, question.layout)).max() for x in rows]
    return np.sort(np.argsort(np.negative(full_l), kind="stable")[:MAX_LAYERS])


def _at_layers(question: Question, layers: np.ndarray) -> Question:
    """Return the question for these layers alone."""
    together_lee, stale_lwe = question.together_lee, question.stale_lwe
    return dataclasses.replace(
        question,
        load_lwe=question.load_lwe[layers],
        stale_lwe=None if stale_lwe is None else stale_lwe[layers],
        peak_l=question.peak_l[layers],
        plan=plan_at_layers(question.plan, layers),
        swapped=question.swapped and plan_at_layers(question.swapped, layers),
        together_lee=None if together_lee is None else together_lee[layers],
    )


def plan_at_layers(plan: ExpertPlan, layers: np.ndarray | slice) -> ExpertPlan:
    """Return the plan of some layers alone."""
    table_lp, owned_le = plan.slot_to_expert_lp[layers], plan.owned_le[layers]
    return ExpertPlan(table_lp, plan.num_experts, owned_le)


def method_changes(question: Question) -> dict[Method, tuple[ExpertPlan, Layout]]:
    """Return the plan and the layout of each method that goes together with the current
    layout; of the method in use the current ones."""
    found, name = {}, question.policy_name
    for method in question.methods:
        if method.is_in_use(name, question.layout):
            found[method] = question.best_plan, question.layout
            continue
        try:
            found[method] = _method_change(question, method)
        except ValueError:  # it does not go together with today's domain
            continue
    return found


def _method_change(question: Question, method: Method) -> tuple[ExpertPlan, Layout]:
    """Return the plan and the layout of another method, with the rows per peer of a
    first step or, where these are cheaper, with rows per peer that fit the plan."""
    layout = method.applied(question.layout)
    plan = _method_plan(question, method, layout)
    sizes = layout, fitted(with_pairs(question), plan, layout)
    sec = [expected_sec_by_layer(question, plan, layout).sum() for layout in sizes]
    return plan, sizes[int(np.argmin(sec))]


def with_pairs(question: Question) -> Question:
    """Return the question with a guess of the fullest pairs of devices, where they are
    not known."""
    if question.has_pairs:
        return question
    peak_l = np.full_like(question.peak_l, UNSEEN_PEAK)
    return dataclasses.replace(question, has_pairs=True, peak_l=peak_l)


def _method_plan(question: Question, method: Method, layout: Layout) -> ExpertPlan:
    """Return the plan of another method for its layout, made from the home plan."""
    home = ExpertPlan.home_in(layout, question.plan.num_layers)
    policy = question.methods[method]
    if layout.store not in policy.stores:  # the step makes the replicas
        return home
    args = question.load_lwe, layout, question.cost, home, question.together_lee
    return make_valid_plan(method.policy, policy, *args)


def _fits(plan: ExpertPlan, layout: Layout) -> bool:
    """Return whether a plan is valid for a layout."""
    try:
        plan.validate(layout)
    except ValueError:
        return False
    return True


def fitted(question: Question, plan: ExpertPlan, layout: Layout) -> Layout:
    """Return the layout with buffers large enough for the rows that any device is
    expected to send to another under the plan, and to compute."""
    if layout.transport == "local" or not question.has_pairs:
        return layout
    view, windows = layout.exchanged.topped_up, layout.num_windows
    share = layout.source_share / question.cost.micro_batches / layout.num_exchanges
    pairs = pairs_by_layer(question.load_lwe, plan, layout, share)
    sent_l = sent_by_layer(pairs, plan, layout, question.together_lee)
    tokens = share * question.load_lwe.sum(axis=2).max() / layout.top_k
    tokens = math.ceil(round(float(tokens), 6))
    sources = view.num_sources / view.num_devices  # of each device or domain

    def room(most_l: list[float], limit: int) -> int:
        fullest = float((question.peak_l * np.array(most_l)).max())
        rows = math.ceil(round(fullest / ROW_MULTIPLE, 6)) * ROW_MULTIPLE
        return max(1, min(rows, limit))

    rows = room([sent.fullest for sent in sent_l], view.num_relayed * tokens)
    most = view.num_sources * tokens * view.max_choices
    to_node = room([sent.to_node for sent in sent_l], tokens)
    return dataclasses.replace(
        layout,
        rows_per_peer=-(-rows // windows) * windows,
        rows_per_device=room([sources * x.sum(axis=0).max() for x in pairs], most),
        rows_per_node=to_node if view.has_levels else 0,
    )


def objection(question: Question, candidate: Candidate) -> str:
    """Return the reason against a candidate, or '' if it pays."""
    is_other = candidate.policy != question.policy_name
    margin = max(question.margin, methods.MIN_GAIN * is_other)
    gain_sec, min_sec = candidate.gain_sec, margin * candidate.base_sec
    saved = f"{duration(max(gain_sec, 0.0))}/step"
    if not gain_sec > min_sec:
        return f"saves {saved}, the margin is {duration(min_sec)}"
    if not question.net_sec(candidate) > 0:
        num_steps = question.counted_steps(candidate.layout)
        price = duration(candidate.cost_sec)
        return f"saves {saved}, too little in {num_steps} steps for {price}"
    has_other_units = candidate.layout.domain != question.layout.domain
    is_free = is_other or has_other_units
    if candidate.ratio > question.max_ratio and not is_free:
        return f"saves {saved}, but device max/mean would be {candidate.ratio:.2f}"
    return ""


def num_moves(before: ExpertPlan, after: ExpertPlan, num_devices: int) -> int:
    """Count the experts that devices receive by a change of plans, that is hold after
    it and not before, over all layers and devices."""
    rows = zip(before.slot_to_expert_lp, after.slot_to_expert_lp)
    sizes = (before.num_experts, num_devices)
    return sum(
        int((_device_holds(new_p, *sizes) & ~_device_holds(old_p, *sizes)).sum())
        for old_p, new_p in rows
    )


def _device_holds(row_p: np.ndarray, num_experts: int, num_devices: int) -> np.ndarray:
    """Return whether each device holds each expert, bool [w, e]."""
    held_we = np.zeros((num_devices, num_experts), bool)
    slot_p = np.flatnonzero(row_p >= 0)
    held_we[slot_p // (len(row_p) // num_devices), row_p[slot_p]] = True
    return held_we


def _plan(
    question: Question, layout: Layout, cost: CostModel, current: ExpertPlan
) -> ExpertPlan:
    """Return the policy's plan for a layout; raise ValueError where it is invalid."""
    name, policy, load_lwe = question.policy_name, question.policy, question.load_lwe
    args = load_lwe, layout, cost, current, question.together_lee
    return make_valid_plan(name, policy, *args)


def _neighbours(question: Question) -> Iterator[Layout]:
    """Yield the layouts one change away, with as much room for copies as possible."""
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
            most = now.num_experts // now.domain_size  # each expert once in a domain
            room = min(question.max_slots_per_device, max(own, most))
            room = own if store == "owned" else room
            if is_one_change and own <= s <= room:
                layout = _roomy(question, store, s)
                if layout not in seen:
                    seen.add(layout)
                    yield layout


def _roomy(question: Question, store: Store, slots_per_device: int) -> Layout:
    """Return the layout of this store and number of slots, with budgets for any plan
    that its slots can hold."""
    now, has_copies = question.layout, store in ("transient", "resident")
    is_gathered = question.cost.gather_sec > 0  # over data, whatever the store
    is_prefetched = question.policy.prefetches(store)
    if now.store == store or is_gathered:
        is_prefetched = now.prefetch
    roomy = dataclasses.replace(
        now,
        store=store,
        slots_per_device=slots_per_device,
        offers_per_device=now.experts_per_device if has_copies else 0,
        copies_per_device=slots_per_device if has_copies else 0,
        prefetch=is_prefetched,
        gather=now.gather if store in GATHERED_ONCE else "layer",
    )
    return dataclasses.replace(roomy, **question.policy.between_nodes(roomy))


def _with_slack(plan: ExpertPlan, roomy: Layout, policy: Policy) -> Layout:
    """Return the layout with budgets for this plan and a few more copies, so that later
    swaps have room."""
    if roomy.store not in ("transient", "resident"):
        return roomy
    snug, own = tight(roomy, plan), roomy.experts_per_device
    slots = roomy.slots_per_device
    slack = dataclasses.replace(
        snug,
        offers_per_device=max(snug.offers_per_device, min(2, own)),
        copies_per_device=max(snug.copies_per_device, min(slots - own + 1, slots)),
    )
    return dataclasses.replace(slack, **policy.between_nodes(slack))


def _merge_where_cheaper(
    question: Question, base: ExpertPlan, new: ExpertPlan, layout: Layout, margin: float
) -> ExpertPlan:
    """Return the plan with the layers of `new` where they pay, else those of `base`.

    A layer pays if it saves more than the margin, and more over the counted steps than
    the move of its owners costs. It must not have a larger max/mean than the worst
    layer of the current plan (`Question.max_ratio`).
    """
    is_current = layout == question.layout
    base_sec_l = question.sec_l if is_current else sec_by_layer(question, base, layout)
    gain_l = base_sec_l - sec_by_layer(question, new, layout)
    ratio_l = ratio_by_layer(question.load_lwe, new, layout)
    pays_l = (gain_l > margin * base_sec_l) & (ratio_l <= question.max_ratio)
    num_steps = question.counted_steps(layout)
    for layer in np.flatnonzero(pays_l):
        here = slice(layer, layer + 1)
        rows = [plan_at_layers(plan, here) for plan in (base, new)]
        move_sec = question.cost.move_sec(*rows, layout)
        pays_l[layer] = gain_l[layer] * num_steps > move_sec
    takes_l1 = pays_l[:, None]
    return ExpertPlan(
        np.where(takes_l1, new.slot_to_expert_lp, base.slot_to_expert_lp),
        base.num_experts,
        np.where(takes_l1, new.owned_le, base.owned_le),
    )


def _is_changed(before: ExpertPlan, after: ExpertPlan) -> np.ndarray:
    """Return whether the slots or owners of each layer change, bool [l]."""
    if before.num_slots != after.num_slots:
        return np.ones(before.num_layers, bool)
    slots_lp = before.slot_to_expert_lp != after.slot_to_expert_lp
    return slots_lp.any(axis=1) | (before.owned_le != after.owned_le).any(axis=1)


def price(
    question: Question, plan: ExpertPlan, layout: Layout, policy: str | None = None
) -> Candidate:
    """Return a candidate: a plan and its layout, with the predicted gain and costs of
    adopting them. `policy` is that of another method; None: the current one. A
    relayout saves what it takes less than the best known plan for today's layout."""
    now, cost = question.layout, question.cost
    is_swap = layout == now
    if is_swap:
        now_sec_l, sec_l = question.sec_l, sec_by_layer(question, plan, layout)
    else:
        now_sec_l = question.best_sec_l
        sec_l = relayout_sec_by_layer(question, plan, layout)
    changed_l = _is_changed(question.plan, plan)
    return Candidate(
        plan,
        layout,
        ratio=float(ratio_by_layer(question.load_lwe, plan, layout).max()),
        gain_sec=float((now_sec_l - sec_l).sum()),
        base_sec=float(now_sec_l[changed_l].sum() if is_swap else now_sec_l.sum()),
        move_sec=float(cost.move_sec(question.plan, plan, layout, now)),
        compile_sec=0.0 if is_swap else float(cost.compile_sec),
        num_layers=int(changed_l.sum()),
        policy=policy or question.policy_name,
    )
