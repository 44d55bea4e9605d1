"""The planner: the controller driven by events, apart from the loop that reports them.

    Observed(step, counts)   the loads of a step; at some steps it is asked what to do
    Adopted, Refused         what the loop has done with the decision that was due
    Compiled(sec)            how long the compilation before the first step took

`take` is a pure function from a planner and an event to a planner, and to a Reply for
each step that is asked. So a planner in the middle of a decision is the planner before
it and the events since: a Snapshot, which is in checkpoints (moejax.balance.codec).
"""

import dataclasses

import numpy as np

from moejax.balance import adoptions, controller
from moejax.balance.decision import Decision
from moejax.balance.loads import loads_by_owner
from moejax.balance.settings import Settings
from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout


@dataclasses.dataclass(frozen=True)
class Task:
    """The answers of a run that planning needs, which stay the same."""

    settings: Settings
    cost: CostModel
    batch_sizes: dict[str, int]
    """Devices along each mesh axis that splits the batch, in the order of the mesh."""
    home_layout: Layout
    """Layout of the home placement, with which plans are compared."""


@dataclasses.dataclass(frozen=True)
class Observed:
    """Counts of one step: `tokens_lwe` as in RoutingStats, by device that splits the
    batch, and `fullest_pair_l`; its time, where relayouts depend on it; and
    `together_lee`, where the policy plans by them."""

    step: int
    tokens_lwe: np.ndarray
    fullest_pair_l: np.ndarray
    step_sec: float | None = None
    together_lee: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Adopted:
    """The loop has adopted the decision that was due next."""


@dataclasses.dataclass(frozen=True)
class Refused:
    """The loop has refused the pending relayout."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The loop has compiled its first step, in `sec` seconds."""

    sec: float


Event = Observed | Adopted | Refused | Compiled


@dataclasses.dataclass(frozen=True)
class Reply:
    """Answer for a step that was asked."""

    step: int
    decision: Decision | None
    saving_sec: float | None
    """Time per step that the plan in use at `step` saves beside the home placement, by
    the cost model; None at the last call of a relayout between two decisions."""


@dataclasses.dataclass(frozen=True)
class Planner:
    """State of the controller, and the plan that was in use before the last change."""

    state: controller.State
    earlier: tuple[ExpertPlan, Layout] | None = None
    """Plan and layout in use before `state.last_change_step`; None before the first
    change. The counts of a step come when the next one may have another plan."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A planner, the events that it has not taken yet, and the replies that the loop
    has not collected."""

    planner: Planner
    events: tuple[Event, ...] = ()
    replies: tuple[Reply, ...] = ()

    def settled(self, task: Task) -> "Snapshot":
        """Return the snapshot after all of its events, whose replies are among the
        others."""
        planner, replies = self.planner, list(self.replies)
        for event in self.events:
            planner, reply = take(task, planner, event)
            replies += [] if reply is None else [reply]
        return Snapshot(planner, (), tuple(replies))


def take(task: Task, planner: Planner, event: Event) -> tuple[Planner, Reply | None]:
    """Return the planner after an event, and the reply if the event's step is asked."""
    state = planner.state
    if isinstance(event, Adopted):
        earlier = state.plan, state.layout
        return Planner(controller.adopt(state), earlier), None
    if isinstance(event, Compiled):
        state = controller.compiled(state, event.sec)
        return dataclasses.replace(planner, state=state), None
    if isinstance(event, Refused):
        # It counts as a change (last_change_step), under the same plan.
        return Planner(controller.refuse(state), (state.plan, state.layout)), None
    load_lwe = loads_by_owner(event.tokens_lwe, task.batch_sizes, state.layout)
    state = controller.observe(
        task.settings,
        state,
        event.step,
        load_lwe,
        event.fullest_pair_l,
        event.step_sec,
        task.cost,
        event.together_lee,
    )
    if not adoptions.is_asked(task.settings, state, event.step):
        return dataclasses.replace(planner, state=state), None
    saving_sec = None
    if event.step % task.settings.every_steps == 0:
        in_use = _in_use(dataclasses.replace(planner, state=state), event.step)
        together_lee = event.together_lee
        saving_sec = modelled_saving_sec(task, load_lwe, *in_use, together_lee)
    state, decision = controller.decide(task.settings, task.cost, state, event.step)
    reply = Reply(event.step, decision, saving_sec)
    return dataclasses.replace(planner, state=state), reply


def _in_use(planner: Planner, step: int) -> tuple[ExpertPlan, Layout]:
    """Return the plan and layout of a step, which is the last one or that before."""
    state = planner.state
    changed_step = state.last_change_step
    if changed_step is not None and step < changed_step:
        assert planner.earlier is not None, f"step {step} had no plan"
        return planner.earlier
    return state.plan, state.layout


def modelled_saving_sec(
    task: Task,
    load_lwe: np.ndarray,
    plan: ExpertPlan,
    layout: Layout,
    together_lee: np.ndarray | None = None,
) -> float:
    """Return the seconds per step that a plan saves over the home placement under a
    load by owner, and where they are known, the experts that tokens choose together, by
    the cost model."""
    home = ExpertPlan.home_in(task.home_layout, plan.num_layers)
    home_sec = task.cost.step_sec(load_lwe, home, task.home_layout, together_lee)
    return home_sec - task.cost.step_sec(load_lwe, plan, layout, together_lee)


def make_home_layout(layout: Layout) -> Layout:
    """Return `layout` with a slot for each expert at its owner, and no copies."""
    return dataclasses.replace(
        layout,
        slots_per_device=layout.experts_per_device,
        store="owned",
        split="even",
        offers_per_device=0,
        copies_per_device=0,
        offers_per_node=0,
        copies_per_node=0,
        prefetch=False,
    )
