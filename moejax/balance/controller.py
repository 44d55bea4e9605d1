"""The balancer's loop as pure functions from observed loads to plans and layouts.

    init -> observe, every step -> decide -> adopt, lag_steps after a decision

A swap waits lag_steps for its adoption, a relayout relayout_lag_steps, because it is
compiled meanwhile; with policy 'auto' as many steps as a compilation takes. Several
swaps may wait at once where there is no cool-down; each is planned from the one before.
While a relayout waits, swaps go on in the layout that is in use, if they pay before its
adoption. The load has changed by then, so the relayout is judged anew lag_steps before
its adoption, and where the links have changed: it gets another plan, or is given up.

The balancer looks for a change in five cases:

* The forecast load is uneven. Device max/mean (rows of the fullest device over the mean
  of devices) exceeds `act_above` in the worst layer, or has exceeded it and is not yet
  below `rest_below`.
* Padded buffers do not fit the numbers of rows that have been observed.
* The run leaves communication schedule or domain to be chosen (Settings.ways): others
  are priced, for loads and links as they were observed (moejax.balance.step_clock).
* The policy is 'auto': other methods are priced (moejax.balance.methods).
* The policy plans by the experts that tokens choose together (Policy.needs_together):
  other owners may make fewer rows, however even the load is.

It makes a change that, by the cost model, saves more per step than the margin, and
saves more than it costs: over horizon_steps, or the steps that are left after its
adoption if these are fewer. A relayout is compared with today's layout after the swap,
if there is one: what the swap saves too is not the relayout's. Where both pay, the swap
goes first, once. A relayout whose adoption lies beyond the run's last step is not
considered.

During the cool-down no swap follows a swap, no relayout follows any change, and nothing
is asked after a decision that no change pays. Other methods, schedules and domains wait
twice as long each time that they were priced without a change. A relayout also waits
until loads have been observed for a half life. The state is a value, and JSON keeps it
bit for bit (moejax.balance.codec).
"""

import dataclasses
import math

import numpy as np

from moejax.balance import adoptions, candidates, loads, step_clock
from moejax.balance.adoptions import (
    Adoptions,
    is_asked,
    is_last_call,
    next_adoption,
    pend,
)
from moejax.balance.candidates import Candidate, Question
from moejax.balance.decision import Decision, duration
from moejax.balance.loads import LoadTracker
from moejax.balance.settings import RELAYOUT_LAG_STEPS, Settings, find_policy
from moejax.balance.step_clock import StepClock
from moejax.perf.cost_model import CostModel, layers_of
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

COMPILE_SLACK = 1.5
"""Time of a compilation beside training, over that of the one before the first step."""
MAX_DOUBLINGS = 3
"""Number of times that the wait until other methods and ways are priced again doubles.
On the testbed pricing them took 0.8 s of a step beside training: every fourth step was
twice as long."""
MAX_SPARE = 2.0
"""The balancer looks for smaller buffers when they hold more than this many times the
rows of the fullest pair of devices."""


@dataclasses.dataclass(frozen=True)
class State(Adoptions):
    """Everything that the balancer remembers between steps; checkpoints hold it."""

    tracker: LoadTracker
    """Moving averages of the observed loads."""
    is_active: bool
    """Whether the load counts as uneven: true from the step at which device max/mean
    rises above act_above until it falls below rest_below."""
    last_change_step: int | None
    """Step of the last adoption; None before the first one."""
    last_swap_step: int | None
    """Step of the last adoption of a swap; None before the first one."""
    last_keep_step: int | None
    """Step of the last decision that no change pays; nothing is asked for a cool-down
    after it."""
    is_relayout_due: bool
    """Whether the last decision was for a swap where a relayout pays too; the next one
    prefers the relayout."""
    refused: tuple[Layout, ...]
    """Layouts that could not be compiled or did not fit into memory."""
    clock: StepClock
    """Times of steps, where a relayout may change schedule, domain or method."""
    compile_sec: float | None
    """Time that the compilation before the first step took, with policy 'auto'."""
    others_step: int | None = None
    """Step at which other methods, schedules and domains were priced last, in the
    current layout; None: they were not."""
    num_others: int = 0
    """Number of times that they were priced in this layout."""


def init(
    settings: Settings, layout: Layout, plan: ExpertPlan, num_layers: int
) -> State:
    """Return the balancer's state before the first step.

    Raises ValueError unless plan, layout and settings fit one another.
    """
    plan.validate(layout)
    if plan.num_layers != num_layers:
        raise ValueError(
            f"the plan has {plan.num_layers} layers and the model {num_layers}: plan "
            "each layer once"
        )
    if layout.slots_per_device > settings.max_slots_per_device:
        raise ValueError(
            f"Balance.max_slots_per_device={settings.max_slots_per_device} is less "
            f"than the {layout.slots_per_device} slots of the layout: raise it"
        )
    shape = (num_layers, layout.num_devices, layout.num_experts)
    tracker = loads.init(*shape, settings.half_life_steps)
    return State(
        layout=layout,
        plan=plan,
        policy=settings.first_policy,
        swaps=(),
        relayout=None,
        tracker=tracker,
        is_active=False,
        last_change_step=None,
        last_swap_step=None,
        last_keep_step=None,
        is_relayout_due=False,
        refused=(),
        clock=step_clock.init(),
        compile_sec=None,
    )


def compiled(state: State, compile_sec: float) -> State:
    """Return the state that knows how long a compilation takes. A run that was resumed
    keeps what its first attempt has measured."""
    if state.compile_sec is not None:
        return state
    return dataclasses.replace(state, compile_sec=compile_sec)


def observe(
    settings: Settings,
    state: State,
    step: int,
    tokens_lwe: np.ndarray,
    fullest_pair_l: np.ndarray,
    step_sec: float | None = None,
    cost: CostModel | None = None,
    together_lee: np.ndarray | None = None,
) -> State:
    """Return the state after one step's statistics, which may come some steps late.
    `step_sec` is how long the step took; None: that is not known. It is compared with
    what `cost` predicts. `together_lee` are the tokens that chose both of two experts,
    where the policy plans by them.

    Loads do not depend on the plan. Rows of pairs of devices do, so those of steps
    before the last adoption are forgotten.
    """
    before = dataclasses.replace(
        state.tracker, half_life_steps=settings.half_life_steps
    )
    tracker = loads.observe(before, step, tokens_lwe, fullest_pair_l, together_lee)
    clock, is_before = state.clock, False
    if state.last_change_step is not None and step < state.last_change_step:
        tracker, is_before = loads.forget_pairs(tracker), True
    if cost is not None and step_sec is not None and not is_before:
        there = cost.slowed(state.layout.axes, clock.slowdown)
        args = tokens_lwe, state.plan, state.layout, together_lee
        modelled_sec = there.step_sec(*args)
        clock = step_clock.observe(clock, step_sec, modelled_sec)
    return dataclasses.replace(state, tracker=tracker, clock=clock)


def decide(
    settings: Settings, cost: CostModel, state: State, step: int
) -> tuple[State, Decision | None]:
    """Return the state after the decision, and the decision.

    The decision is None when there was nothing to ask (`is_asked` is false, the load is
    even, or the cool-down lasts), and where nothing pays and the load is even.
    """
    if not is_asked(settings, state, step) or state.tracker.is_empty:
        return state, None
    ahead_steps = step + settings.lag_steps - state.tracker.step
    load_lwe = loads.forecast(state.tracker, ahead_steps)
    was = state.clock.slowdown
    state, cost = _with_seen_links(settings, cost, state, load_lwe)
    has_changed = state.clock.slowdown != was
    if is_last_call(settings, state, step) or (state.relayout and has_changed):
        return _judge_anew(settings, cost, state, load_lwe, step)
    question = _question(settings, cost, state, load_lwe, state.layout, step)
    is_active = question.ratio > settings.act_above or (
        state.is_active and question.ratio >= settings.rest_below
    )
    state = dataclasses.replace(state, is_active=is_active)
    may_swap, may_relayout = _may_change(settings, state, step)
    looks = is_active or question.policy.needs_together
    others_are_open = _asks_others(settings, state, step)
    is_open = looks or _is_misfit(state) or others_are_open
    if not may_swap and not (may_relayout and is_open):
        return state, None
    swaps = candidates.swap(question) if may_swap else []
    proposals, others = list(swaps), []
    if swaps:
        question = dataclasses.replace(question, swapped=swaps[0].plan)
    if may_relayout and others_are_open and state.tracker.is_settled:
        others = candidates.other_methods(question)
        num_others = state.num_others + 1
        state = dataclasses.replace(state, others_step=step, num_others=num_others)
        if not looks:
            others += candidates.other_ways(question)
    if may_relayout and not looks:
        if others or _is_misfit(state):
            proposals += candidates.refits(question) + others
    elif may_relayout and state.tracker.is_settled:
        proposals += others + candidates.relayouts(question)
    proposals = [c for c in proposals if c.layout not in state.refused]
    accepted = [c for c in proposals if not candidates.objection(question, c)]
    if not accepted:
        if (looks or proposals) and state.tracker.is_settled:
            state = dataclasses.replace(state, last_keep_step=step)
        args = settings, state, question, proposals, step
        return state, _keep(*args) if is_active else None
    # What a relayout saves comes on top of the swap. This is in place within a few
    # steps, and the relayout can follow it.
    is_due = state.is_relayout_due
    best = max(accepted, key=lambda c: ((c in swaps) != is_due, question.net_sec(c)))
    is_due = best in swaps and len(accepted) > 1
    decision = _change(settings, state, question, best, step)
    state = dataclasses.replace(state, is_relayout_due=is_due)
    return pend(state, decision), decision


def _sees_links(settings: Settings, cost: CostModel | None) -> bool:
    """Return whether times of steps correct the speeds of links: where schedule or
    domain may change, and the speeds were measured."""
    lines = None if cost is None else cost.calibration
    return len(settings.ways) > 1 and lines is not None and lines.is_measured


def _with_seen_links(
    settings: Settings, cost: CostModel, state: State, load_lwe: np.ndarray
) -> tuple[State, CostModel]:
    """Return the state and the cost model in which the slowest axis of the group is as
    slow as the times of steps say."""
    if not _sees_links(settings, cost):
        return state, cost
    group = state.layout.axes
    slowed = cost.slowed(group, state.clock.slowdown)
    if step_clock.extra_sec(state.clock):
        plan, layout = state.plan, state.layout
        together_l = layers_of(state.tracker.together_lee, plan)
        wires_sec = sum(
            slowed.sec_on_slowest(slowed.predict(load_we, row_p, layout, table), group)
            for load_we, row_p, table in zip(
                load_lwe, plan.slot_to_expert_lp, together_l
            )
        )
        clock = step_clock.settle(state.clock, wires_sec)
        state = dataclasses.replace(state, clock=clock, others_step=None, num_others=0)
        slowed = cost.slowed(group, clock.slowdown)
    return state, slowed


def _judge_anew(
    settings: Settings, cost: CostModel, state: State, load_lwe: np.ndarray, step: int
) -> tuple[State, Decision | None]:
    """Return the state in which the pending relayout has the best known plan for its
    layout, or is given up because it no longer pays; and that decision, None if it
    stays as it is.

    Its compilation counts no more: it is under way, over, or nearly so.
    """
    waits = state.relayout
    args = settings, cost, state, load_lwe, waits.layout, step
    there = _question(*args, waits.plan, waits.policy)
    here = _question(settings, cost, state, load_lwe, state.layout, step)
    swaps = candidates.swap(here)
    here = dataclasses.replace(here, swapped=swaps[0].plan if swaps else None)
    plans = [waits.plan, *(candidate.plan for candidate in candidates.swap(there))]
    args = waits.layout, waits.policy
    priced = [candidates.price(here, plan, *args) for plan in plans]
    best = max(priced, key=lambda c: c.gain_sec)
    best = dataclasses.replace(best, compile_sec=0.0)
    if candidates.objection(here, best):
        state = dataclasses.replace(state, last_keep_step=step)
        decision = _keep(settings, state, here, [best], step)
        decision = dataclasses.replace(decision, gives_up=True)
    elif best.plan == waits.plan:
        return state, None
    else:
        decision = _change(settings, state, here, best, step)
        decision = dataclasses.replace(decision, adopt_step=waits.adopt_step)
    return pend(state, decision), decision


def _may_change(settings: Settings, state: State, step: int) -> tuple[bool, bool]:
    """Return whether a swap, and a relayout, may be decided at `step`, so far as this
    depends on steps. A relayout may also be one of buffers that do not fit, for which
    the load need not be uneven."""
    if not _has_cooled(settings, state.last_keep_step, step):
        return False, False
    waits, last_swap_step = state.relayout, state.last_swap_step
    if state.swaps:
        last_swap_step = state.swaps[-1].adopt_step
    is_ahead = waits is None or step + settings.lag_steps < waits.adopt_step
    may_swap = is_ahead and _has_cooled(settings, last_swap_step, step)
    may_relayout = waits is None and _has_cooled(settings, _last_change(state), step)
    may_swap &= state.is_active or find_policy(settings, state.policy).needs_together
    return may_swap, may_relayout and _is_in_time(settings, state, step)


def _barred(settings: Settings, state: State, step: int) -> str | None:
    """Return why no relayout for an uneven load can be decided at `step`; None where
    one can."""
    if state.relayout is not None:
        return f"a relayout is pending for step {state.relayout.adopt_step}"
    if not _is_in_time(settings, state, step):
        adopt_step = step + _relayout_lag_steps(settings, state)
        return (
            f"a relayout would be adopted at step {adopt_step}, after the last, "
            f"{settings.num_steps}"
        )
    if not _has_cooled(settings, since_step := _last_change(state), step):
        return f"no relayout before step {since_step + settings.cooldown_steps}"
    if not state.tracker.is_settled:
        return "no relayout before loads were seen for a half life"
    return None


def _asks_others(settings: Settings, state: State, step: int) -> bool:
    """Return whether other methods, schedules or domains may be priced at `step`: some
    are open, and the wait since they were priced last is over."""
    if max(len(settings.ways), len(settings.methods)) <= 1:
        return False
    if state.others_step is None:
        return True
    doublings = min(state.num_others - 1, MAX_DOUBLINGS)
    return step >= state.others_step + settings.cooldown_steps * 2**doublings


def _last_change(state: State) -> int | None:
    """Return the step of the last adoption, which may be that of a swap to come."""
    return state.swaps[-1].adopt_step if state.swaps else state.last_change_step


def _has_cooled(settings: Settings, since_step: int | None, step: int) -> bool:
    """Return whether the cool-down after `since_step` is over at `step`, or there is
    none. `since_step` may be that of an adoption to come."""
    steps = settings.cooldown_steps
    return since_step is None or steps == 0 or step - since_step >= steps


def _is_in_time(settings: Settings, state: State, step: int) -> bool:
    """Return whether a relayout that is decided at `step` is adopted before the run
    ends."""
    last_step = settings.num_steps
    return last_step is None or step + _relayout_lag_steps(settings, state) <= last_step


def _relayout_lag_steps(settings: Settings, state: State) -> int:
    """Return the number of steps from the decision for a relayout to its adoption: with
    policy 'auto' those of a compilation, as the run has measured it."""
    if settings.relayout_lag_steps is not None:
        return settings.relayout_lag_steps
    if state.compile_sec is None or not len(state.clock.sec_t):
        return max(RELAYOUT_LAG_STEPS, settings.lag_steps + 1)
    compile_sec = COMPILE_SLACK * state.compile_sec
    steps = math.ceil(compile_sec / float(np.median(state.clock.sec_t)))
    return settings.lag_steps + max(1, steps)


def adopt(state: State) -> State:
    """Return the state with the plan and layout of the next adoption in use.

    What was said of the old layout, that nothing pays, is forgotten with it.
    """
    coming = next_adoption(state)
    is_swap = coming is not None and coming.kind == "swap"
    state = adoptions.adopt(state)
    return dataclasses.replace(
        state,
        tracker=loads.forget_pairs(state.tracker),
        clock=step_clock.forget(state.clock),
        last_change_step=coming.adopt_step,
        last_swap_step=coming.adopt_step if is_swap else state.last_swap_step,
        last_keep_step=state.last_keep_step if is_swap else None,
        others_step=state.others_step if is_swap else None,
        num_others=state.num_others if is_swap else 0,
    )


def refuse(state: State) -> State:
    """Return the state without the pending relayout, which could not be compiled or did
    not fit into memory. Its layout is not proposed again."""
    refused = state.relayout
    assert refused is not None, "no relayout is pending"
    return dataclasses.replace(
        adoptions.refuse(state),
        refused=(*state.refused, refused.layout),
        last_change_step=refused.adopt_step,
    )


def _question(
    settings: Settings,
    cost: CostModel,
    state: State,
    load_lwe: np.ndarray,
    layout: Layout,
    step: int,
    plan: ExpertPlan | None = None,
    policy: str | None = None,
) -> Question:
    """Return the forecast loads, a plan for a layout, by default the coming plan, and
    the limits by which candidates for another plan of a policy, by default the current
    one, are judged at `step`.

    A swap lasts until the run ends or the pending relayout is adopted; a relayout, one
    judged anew included, until the run ends.
    """
    tracker, plan, now = state.tracker, plan or state.coming_plan, state.layout
    policy = policy or state.policy
    if state.compile_sec is not None:
        cost = dataclasses.replace(cost, compile_sec=state.compile_sec)
    waits, end_step = state.relayout, math.inf
    if settings.num_steps is not None:
        end_step = settings.num_steps + 1
    swap_step = relayout_step = step + settings.lag_steps
    swap_end_step = end_step
    if waits is None:
        relayout_step = step + _relayout_lag_steps(settings, state)
    elif layout == state.layout:
        swap_end_step = min(end_step, waits.adopt_step)
    args = tracker.mean_lwe, state.plan, now, tracker.together_lee
    pair_l = candidates.fullest_pair_by_layer(*args)
    num_exchanges = cost.micro_batches * now.num_exchanges
    seen_l = _fullest_pair(state) * num_exchanges
    stale_share, stale_lwe = loads.stale(tracker, load_lwe)
    return Question(
        load_lwe=load_lwe,
        peak_l=np.maximum(seen_l / np.maximum(pair_l, 1.0), 1.0),
        has_pairs=tracker.has_pairs,
        ratio=float(candidates.ratio_by_layer(load_lwe, plan, layout).max()),
        plan=plan,
        layout=layout,
        cost=cost,
        policy=find_policy(settings, policy),
        margin=settings.margin,
        swap_steps=max(0, min(settings.horizon_steps, swap_end_step - swap_step)),
        relayout_steps=max(0, min(settings.horizon_steps, end_step - relayout_step)),
        max_slots_per_device=settings.max_slots_per_device,
        ways=settings.ways,
        methods={m: find_policy(settings, m.policy) for m in settings.methods},
        policy_name=policy,
        together_lee=tracker.together_lee,
        stale_share=stale_share,
        stale_lwe=stale_lwe,
    )


def _fullest_pair(state: State) -> np.ndarray:
    """Return the rows of a micro-batch that buffers should hold, float [l]: those of
    the fullest pair in all recent steps where a step that overflows runs again, and in
    95 % of them where later rounds carry the rest."""
    percentile = 100 if state.layout.overflow == "redo" else 95
    return loads.fullest_pair(state.tracker, percentile)


def _is_misfit(state: State) -> bool:
    """Return whether padded buffers are too small for the fullest pair of devices, or
    more than MAX_SPARE times as large as it needs."""
    seen = _fullest_pair(state).max()
    rows = state.layout.rows_per_peer
    is_known = state.layout.transport != "local" and state.tracker.has_pairs
    return is_known and bool(seen > rows or MAX_SPARE * seen < rows)


def _keep(
    settings: Settings,
    state: State,
    question: Question,
    proposals: list[Candidate],
    step: int,
) -> Decision:
    """Return the decision to change nothing. It says why the best proposal does not
    pay, why no relayout could be proposed, and when the next change is looked for."""
    slots = question.layout.slots_per_device
    why = f"no plan for {slots} slot{'s' * (slots > 1)} a device is cheaper"
    may_swap, _ = _may_change(settings, state, step)
    if not proposals and may_swap and question.planned != question.plan:
        # It pays in no layer: it saves too little, or would make a layer less even.
        planned = candidates.price(question, question.planned, question.layout)
        if planned.gain_sec > 0 and candidates.objection(question, planned):
            proposals = [planned]
    if proposals:
        best = max(proposals, key=lambda c: c.gain_sec)
        kind = "swap" if best.layout == question.layout else "relayout"
        why = f"{kind} {candidates.objection(question, best)} (modelled)"
    if not is_last_call(settings, state, step) and (
        barred := _barred(settings, state, step)
    ):
        why += f", and {barred}"
    if state.last_keep_step == step and settings.cooldown_steps > 0:
        every, cooled_step = settings.every_steps, step + settings.cooldown_steps
        why += f"; asked again at step {-(-cooled_step // every) * every}"
    plan, layout, ratio = question.plan, question.layout, question.ratio
    policy = question.policy_name
    today = Candidate(plan, layout, ratio, 0.0, 0.0, 0.0, 0.0, 0, policy)
    return _decision(settings, state, question, today, step, why)


def _change(
    settings: Settings, state: State, question: Question, best: Candidate, step: int
) -> Decision:
    """Return the decision to adopt a candidate."""
    saved = duration(question.net_sec(best))
    num_steps = question.counted_steps(best.layout)
    why = (
        f"saves {saved} in {num_steps} steps (modelled), and changes "
        f"{best.num_layers} of {best.plan.num_layers} layers"
    )
    return _decision(settings, state, question, best, step, why)


def _decision(
    settings: Settings,
    state: State,
    question: Question,
    after: Candidate,
    step: int,
    why: str,
) -> Decision:
    """Return the decision to use a candidate, or to keep the current plan if the
    candidate is that."""
    before, w = question.plan, question.layout.num_devices
    is_kept = after.plan is before and after.layout is question.layout
    is_swap = after.layout == question.layout
    lag_steps = settings.lag_steps
    if not is_swap:
        lag_steps = _relayout_lag_steps(settings, state)
    return Decision(
        kind="keep" if is_kept else "swap" if is_swap else "relayout",
        step=step,
        adopt_step=step + lag_steps,
        plan=after.plan,
        layout=after.layout,
        policy=after.policy,
        device_max_over_mean_before=question.ratio,
        device_max_over_mean_after=after.ratio,
        num_moves=candidates.num_moves(before, after.plan, w),
        modelled_gain_sec=after.gain_sec,
        modelled_cost_sec=after.cost_sec,
        why=why,
        digest_before=before.digest,
        layout_before=question.layout,
    )
