"""The balancer in a run: observes each step, swaps plans and layouts between steps.

    read step s  ->  observe, decide (process 0; the others hear of it)
                     a relayout: compile ahead, in a thread, while steps go on
    before step s + lag_steps  ->  adopt: new tables, or the new step

A decision and its adoption are at the same steps on every process. In a checkpoint,
experts are in logical order; plan and balancer are in its meta.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from moejax.balance import controller
from moejax.balance.decision import Decision
from moejax.balance.loads import loads_by_owner
from moejax.balance.policies import check_policy, make_valid_plan
from moejax.moe.types import Placement, RoutingStats
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from train.balance.ahead import Ahead, Steps
from train.balance.migrate import Mover
from train.job import Job
from train.launch.processes import any_process, is_first, published, withdraw
from train.logs.records import Records
from train.step.compiled import compile_steps, on_devices

SAME = {
    "mesh": None, "moe": None, "dispatch": None, "balance": None,
    "train": {"batch_size", "accumulate_steps"}, "data": {"seq_len"},
}  # fmt: skip
"""What must be as it was for the balancer to go on where it stopped; None: all."""

DECIDED = ("is_active", "last_keep_step", "is_relayout_due")
"""What a decision changes in the balancer's state, beside what is pending."""


class Balancing:
    """What the loop asks for the current step, placement and layout."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self.say = job, say
        self._is_on = job.cfg.balance.policy != "home"
        self._settings, self._mover = job.model.run.settings, Mover(job.model)
        self._stores = {job.model.layout.store}
        self._stores.update(check_policy(job.cfg.balance.policy).stores)
        self._cost = job.model.run.cost
        layout = job.model.layout
        num_layers = job.cfg.model.num_moe_layers
        plan = self._first_plan(layout)
        self._state = controller.init(self._settings, layout, plan, num_layers)
        self._ahead: Ahead | None = None
        self._of_step: dict[int, dict] = {}
        self._published: list[int] = []
        self.records: Records

    def _first_plan(self, layout: Layout) -> ExpertPlan:
        """Home, or where the policy spreads replicas before it has seen a load."""
        home = self._job.model.run.home_plan(layout)
        policy = check_policy(self._settings.policy)
        if not policy.is_spread_first or layout.store not in policy.stores:
            return home
        shape = (home.num_layers, layout.num_devices, layout.num_experts)
        zero_lwe = np.zeros(shape)
        name = self._settings.policy
        return make_valid_plan(name, policy, zero_lwe, layout, self._cost, home)

    @property
    def layout(self) -> Layout:
        return self._state.layout

    @property
    def plan(self) -> ExpertPlan:
        return self._state.plan

    def hlo_text(self) -> str:
        """Of the train step that runs now."""
        return self.steps.train.as_text()

    def restore(self, meta: dict | None) -> None:
        """Go on where the checkpoint's balancer stopped, if all that it depends on is
        as it was; else with its plan, where that fits, or from home."""
        if meta is None or not self._is_on:
            return
        is_same = _is_same(meta["config"], self._job.cfg.to_dict())
        if meta.get("balance") and is_same and meta["cost"] == self._cost.as_dict():
            self._state = controller.from_json(meta["balance"])
            return
        plan = ExpertPlan.from_json(meta["plan"])
        sizes = (plan.num_experts, meta["num_owners"])
        fits = sizes == (self.layout.num_experts, self.layout.num_devices)
        # Home would take the replicas away that this policy begins with.
        if fits and _has_replicas(plan) >= _has_replicas(self.plan):
            plan = plan.resized(self.layout)
            try:
                plan.validate(self.layout)
            except ValueError as misfit:
                self.say(f"the checkpoint's plan is left: {misfit}")
            else:
                self._state = dataclasses.replace(self._state, plan=plan)
        self.say(f"the balancer starts anew, plan {self.plan.digest}")

    def compile(self) -> None:
        """Steps for the layout of now, and what moving owners takes."""
        self.steps = self._compiled(self.layout)
        if self._is_on and "owned" in self._stores:
            self._mover.prepare_moves()
        self._set_placement()
        if self._state.pending is not None:
            self._prepare(self._state.pending)
            if self._ahead is not None:
                self._ahead.wait()  # no watchdog knows of this compilation either

    def begin(self, state):
        """A state in logical order and the job's store, as layout and plan want it."""
        first = self._job.model.layout.store
        return self.physical(self._mover.to_store(state, first, self.layout.store))

    def logical(self, state):
        """Experts in logical order, for a checkpoint; `physical` undoes it."""
        return self._mover.to_owners(state, self.plan, _logical(self.plan))

    def physical(self, state):
        """Experts at the plan's owners, from logical order."""
        return self._mover.to_owners(state, _logical(self.plan), self.plan)

    def is_waiting(self, step: int) -> bool:
        """Whether this step is the first of a layout that is compiled ahead."""
        pending = self._state.pending
        return bool(self._ahead and pending and step >= pending.adopt_step)

    def before(self, step: int, state):
        """Adopt what is due: `step` is the first under it."""
        pending = self._state.pending
        if pending is not None and step >= pending.adopt_step:
            state = self._adopt(step, state)
        self._of_step.setdefault(step, {"plan": self.plan.digest})
        return state

    def _adopt(self, step: int, state):
        start_sec, is_new = time.monotonic(), self._ahead is not None
        if is_new and not self._take_steps():
            return state
        waited_sec = time.monotonic() - start_sec
        old_layout, old_plan = self.layout, self.plan
        self._state = controller.adopt(self._state)
        old_store, new_store = old_layout.store, self.layout.store
        if (old_store == "sharded") != (new_store == "sharded"):
            state = self._mover.to_owners(state, old_plan, _logical(old_plan))
            state = self._mover.to_store(state, old_store, new_store)
            old_plan = _logical(old_plan)
        state = self._mover.to_owners(state, old_plan, self.plan)
        self._set_placement()
        adopted_sec = time.monotonic() - start_sec - waited_sec
        waited_msec, adopted_msec = 1e3 * waited_sec, 1e3 * adopted_sec
        self.say(
            f"step {step}  adopted {self.plan.digest}  in {adopted_msec:.1f} ms  "
            f"waited {waited_msec:.1f} ms"
        )
        self._of_step[step] = {
            "plan": self.plan.digest,
            "adopt_msec": adopted_msec,
            "adopt_wait_msec": waited_msec,
        }
        return state

    def _take_steps(self) -> bool:
        """The steps that were compiled ahead, if all processes have theirs."""
        steps, fault = self._ahead.result()
        self._ahead = None
        if any_process(steps is None):
            layout = self._state.pending.layout
            self._state = controller.refuse(self._state)
            self.say(
                f"RELAYOUT GIVEN UP: {fault or 'another process could not'}: {layout}"
            )
            return False
        self.steps = steps
        return True

    def step_record(self, step: int) -> dict[str, Any]:
        """What the record of a step says of its plan; asked once."""
        said = self._of_step.pop(step)
        return said if self._is_on else {}

    def observe(self, step: int, stats: RoutingStats) -> None:
        """One step's statistics, on the host; decides when it is time."""
        if not self._is_on:
            return
        mesh = self._job.cfg.mesh
        sizes = {"dc": mesh.dc, "data": mesh.data, "expert": mesh.expert}
        load_lwe = loads_by_owner(stats.tokens_lwe, sizes, self.layout)
        self._state = controller.observe(
            self._settings, self._state, step, load_lwe, stats.fullest_pair_l
        )
        if step % self._settings.every_steps or self._state.pending is not None:
            return
        decision = self._decided(step)
        if decision is None:
            return
        self.say(decision.line())
        self.records.event({"step": step, "decision": decision.record()})
        if self._state.pending is not None:
            self._prepare(self._state.pending)

    def meta(self) -> dict[str, Any]:
        """For a checkpoint: what `restore` reads."""
        record = {"plan": self.plan.to_json(), "balance": None}
        record["num_owners"] = self._job.model.run.num_owners
        if self._is_on:
            record["balance"] = controller.to_json(self._state)
            record["cost"] = self._cost.as_dict()
        return record

    def _decided(self, step: int) -> Decision | None:
        """The decision of process 0; the balancer's state is that of process 0 too."""

        def decide() -> str:
            state, decision = controller.decide(
                self._settings, self._cost, self._state, step
            )
            self._state = state
            text = None if decision is None else decision.to_json()
            return json.dumps([{name: getattr(state, name) for name in DECIDED}, text])

        reply = published(f"decision/{step}", decide)
        # Who has run step s has read what was published for s - 2.
        for old in [s for s in self._published if s <= step - 2]:
            withdraw(f"decision/{old}")
            self._published.remove(old)
        self._published.append(step)
        decided, text = json.loads(reply)
        decision = None if text is None else Decision.from_json(text)
        if not is_first():
            pending = None if decision is None or decision.kind == "keep" else decision
            self._state = dataclasses.replace(self._state, **decided, pending=pending)
        return decision

    def _prepare(self, decision: Decision) -> None:
        if decision.layout != self.layout:
            make = partial(self._compiled, decision.layout, self.layout)
            self._ahead = Ahead(make)

    def _compiled(self, layout: Layout, before: Layout | None = None) -> Steps:
        """Steps of a layout, and what brings a state there."""
        if before is not None and layout.store != before.store:
            self._mover.prepare_moves()
            if "sharded" in (layout.store, before.store):
                self._mover.prepare_reshard(
                    "sharded" if layout.store == "sharded" else "owned"
                )
        return Steps(*compile_steps(self._job.model.relaid(layout)))

    def _set_placement(self) -> None:
        self.placement: Placement = on_devices(
            self.plan, self.layout, self._job.model.mesh
        )


def _has_replicas(plan: ExpertPlan) -> bool:
    num_full = np.count_nonzero(plan.slot_to_expert_lp >= 0)
    return bool(num_full > plan.num_layers * plan.num_experts)


def _logical(plan: ExpertPlan) -> ExpertPlan:
    """The plan's slots with masters in logical order."""
    return ExpertPlan(plan.slot_to_expert_lp, plan.num_experts)


def _is_same(saved: dict, current: dict) -> bool:
    """A field that there was not yet when it was saved counts as unchanged."""
    current = json.loads(json.dumps(current))
    return all(
        saved.get(part, {}).get(name, value) == value
        for part, names in SAME.items()
        for name, value in current[part].items()
        if names is None or name in names
    )
