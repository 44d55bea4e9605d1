"""Run the balancer beside training: observe each step, change plans between steps.

    read step s  ->  observe, and decide (process 0, which tells the others)
                     for a relayout: compile the new step in a thread meanwhile
    before step s + lag_steps  ->  adopt: new tables, or the new compiled step

Every process decides and adopts at the same steps. A checkpoint holds experts in
logical order, and the plan and the balancer's state in its meta record.
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
from moejax.balance.loads import home_rows, loads_by_owner
from moejax.balance.policies import check_policy, make_valid_plan
from moejax.moe.types import Placement, RoutingStats
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from train.balance.ahead import Ahead, Steps
from train.balance.migrate import Mover
from train.job import Job
from train.launch.processes import any_process, is_first, published, withdraw
from train.logs.records import Records, home_std_over_std, max_over_mean
from train.step.compiled import compile_steps, on_devices

SAME = {
    "mesh": None, "moe": None, "dispatch": None, "balance": None,
    "train": {"batch_size", "accumulate_steps"}, "data": {"seq_len"},
}  # fmt: skip
"""Fields of the configuration that must be as they were in the checkpoint for the
balancer to go on where it stopped. None stands for all fields of a class."""


class Balancing:
    """The balancer of a run, with the compiled steps, the placement and the layout that
    are in use."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self.say = job, say
        self._is_on = job.cfg.balance.policy != "home"
        self._settings, self._mover = job.model.run.settings, Mover(job.model)
        self.stores = {job.model.layout.store}
        """Stores that the layouts of this run may have."""
        self.stores.update(check_policy(job.cfg.balance.policy).stores)
        self._cost = job.model.run.cost
        layout = job.model.layout
        num_layers = job.cfg.model.num_moe_layers
        plan = self._first_plan(layout)
        self._state = controller.init(self._settings, layout, plan, num_layers)
        self._ahead: Ahead | None = None
        self._step_records: dict[int, dict] = {}
        self._in_use: dict[int, tuple[ExpertPlan, Layout]] = {}
        self._published: list[int] = []
        self.records: Records

    def _first_plan(self, layout: Layout) -> ExpertPlan:
        """Return the plan of the first step: home, or for a policy that replicates
        before it has seen a load, the policy's plan."""
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
        """The layout of the step that runs now."""
        return self._state.layout

    @property
    def plan(self) -> ExpertPlan:
        """The plan that is in use."""
        return self._state.plan

    def hlo_text(self) -> str:
        """Return the compiled train step of the layout in use, as XLA's text: the
        loop-free one if there is one."""
        return (self.steps.loop_free or self.steps.train).as_text()

    def restore(self, meta: dict | None) -> None:
        """Restore the balancer from the meta record of a checkpoint.

        Its whole state is restored if the configuration, the cost model and the kind of
        devices are as they were (SAME). Otherwise its plan is, where that fits the
        layout. Otherwise the balancer starts with its first plan.
        """
        if meta is None or not self._is_on:
            return
        is_same = _is_same(meta["config"], self._job.cfg.to_dict())
        if meta.get("balance") and is_same and meta["cost"] == self._cost.as_dict():
            state = controller.from_json(meta["balance"])
            if state and state.layout.overflow == self.layout.overflow:
                self._state = state
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
                self.say(f"the checkpoint's plan is not used: {misfit}")
            else:
                self._state = dataclasses.replace(self._state, plan=plan)
        self.say(f"the balancer starts afresh with plan {self.plan.digest}")

    def compile(self) -> None:
        """Compile the steps of the layout in use, the programs that move experts
        between owners, and the steps of a pending relayout."""
        self.steps = self._compile_steps(self.layout)
        self.steps.require_room()
        if self._is_on and ("owned" in self.stores or self._settings.sends_states):
            self._mover.prepare_moves()
        self._set_placement()
        self._prepare()
        if self._ahead is not None:
            self._ahead.wait()  # the watchdog has not started yet

    def begin(self, state):
        """Return the training state with its experts arranged for the current layout
        and plan. The given state has them in logical order, in the store of the run's
        first layout."""
        first = self._job.model.layout.store
        return self.physical(self._mover.to_store(state, first, self.layout.store))

    def logical(self, state):
        """Return the state with experts in logical order, as in a checkpoint.
        `physical` undoes it."""
        return self._mover.to_owners(state, self.plan, _logical(self.plan))

    def physical(self, state):
        """Return the state with each expert at its owner under the current plan. The
        given state has experts in logical order."""
        return self._mover.to_owners(state, _logical(self.plan), self.plan)

    def is_waiting(self, step: int) -> bool:
        """Return whether this step is the first of a layout that compiles ahead."""
        return self.is_due(step) and self._is_relayout_next()

    def awaits(self, step: int) -> bool:
        """Return whether a decision at this step may be adopted before the next one,
        which must not be dispatched until this one was observed."""
        is_next = self._is_on and self._settings.lag_steps == 1
        return is_next and controller.is_asked(self._settings, self._state, step)

    def is_due(self, step: int) -> bool:
        """Return whether `before` adopts a decision at this step."""
        return controller.is_due(self._state, step)

    def _is_relayout_next(self) -> bool:
        """Return whether the decision that is adopted next needs other steps."""
        return controller.next_adoption(self._state) is self._state.relayout

    def before(self, step: int, state):
        """Return the state to run `step` with. If a decision is due at this step, the
        state is moved to its plan and layout first."""
        if self.is_due(step):
            state = self._adopt(step, state)
        self._step_records.setdefault(step, {"plan": self.plan.digest})
        self._in_use[step] = self.plan, self.layout
        return state

    def _adopt(self, step: int, state):
        """Move the state to the plan and layout that are due, and log how long that
        took. Without compiled steps the state stays as it is."""
        start_sec, is_new = time.monotonic(), self._is_relayout_next()
        if is_new and not self._ahead.is_done:
            self.say(f"step {step}  waits until the new layout is compiled")
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
        if self._settings.sends_states:
            state = self._mover.send_states(state, old_plan, self.plan)
        self._set_placement()
        adopted_sec = time.monotonic() - start_sec - waited_sec
        waited_msec, adopted_msec = 1e3 * waited_sec, 1e3 * adopted_sec
        self.say(
            f"step {step}  adopted {self.plan.digest}  in {adopted_msec:.1f} ms  "
            f"waited {waited_msec:.1f} ms"
        )
        self._step_records[step] = {
            "plan": self.plan.digest,
            "adopt_msec": adopted_msec,
            "adopt_wait_msec": waited_msec,
        }
        return state

    def _take_steps(self) -> bool:
        """Wait for the steps of the pending layout, and use them from now on; return
        True.

        If a process could not compile its steps, refuse the layout on all of them, and
        return False.
        """
        steps, fault = self._ahead.result()
        self._ahead = None
        if any_process(steps is None):
            layout = self._state.relayout.layout
            self._state = controller.refuse(self._state)
            self.say(
                f"RELAYOUT GIVEN UP: {fault or 'another process could not'}: {layout}"
            )
            return False
        self.steps = steps
        return True

    def step_record(self, step: int, stats: RoutingStats) -> dict[str, Any]:
        """Return the fields of a step's record that are about its plan. May be called
        only once for each step.

        `home_device_max_over_mean` is the ratio that the home placement would have had
        under the step's load, and `home_std_over_std` its standard deviation of devices
        over that of the step. `modelled_step_msec` is the time that the cost model
        gives to a step with these rows, and `modelled_parts_msec` its parts; both stand
        in the record of a run without a balancer too. `modelled_saving_msec`, at the
        steps of decisions, is the time per step that the cost model sees saved by the
        plan in use.
        """
        record, in_use = self._step_records.pop(step), self._in_use.pop(step)
        if not is_first():
            return {}
        parts = self._cost.counted_step_parts(
            stats.rows_lw.mean(axis=1),
            stats.fullest_device_l,
            stats.fullest_pair_l,
            in_use[1],
            self._job.cfg.model.num_layers,
        )
        parts_msec = {k: 1e3 * sec for k, sec in dataclasses.asdict(parts).items()}
        modelled = {"modelled_step_msec": 1e3 * parts.total}
        modelled["modelled_parts_msec"] = parts_msec
        if not self._is_on and not self.layout.makes_replicas:
            return modelled
        record |= modelled
        rows_lw = home_rows(stats.tokens_lwe, self._batch_sizes, self.layout)
        record["home_device_max_over_mean"] = max_over_mean(rows_lw)
        record["home_std_over_std"] = home_std_over_std(rows_lw, stats.rows_lw)
        if self._is_on and step % self._settings.every_steps == 0:
            record["modelled_saving_msec"] = 1e3 * self._modelled_saving_sec(
                stats, *in_use
            )
        return record

    @property
    def _batch_sizes(self) -> dict[str, int]:
        """Devices along each mesh axis that splits the batch."""
        mesh = self._job.cfg.mesh
        return {"dc": mesh.dc, "data": mesh.data, "expert": mesh.expert}

    def _modelled_saving_sec(
        self, stats: RoutingStats, plan: ExpertPlan, layout: Layout
    ) -> float:
        """Return the seconds per step that a plan saves over the home placement, by the
        cost model."""
        load_lwe = loads_by_owner(stats.tokens_lwe, self._batch_sizes, self.layout)
        home_layout = make_home_layout(self._job.model.layout)
        home = ExpertPlan.home_in(home_layout, plan.num_layers)
        home_sec = self._cost.step_sec(load_lwe, home, home_layout)
        return home_sec - self._cost.step_sec(load_lwe, plan, layout)

    def observe(self, step: int, stats: RoutingStats) -> None:
        """Give the balancer one step's statistics, which are on the host. At every
        `every_steps`-th step let it decide, and begin to compile a new layout."""
        if not self._is_on:
            return
        load_lwe = loads_by_owner(stats.tokens_lwe, self._batch_sizes, self.layout)
        self._state = controller.observe(
            self._settings, self._state, step, load_lwe, stats.fullest_pair_l
        )
        if not controller.is_asked(self._settings, self._state, step):
            return
        decision = self._decide(step)
        if decision is None:
            return
        are_presumed = self._job.model.run.calibration.is_presumed
        self.say(decision.line(are_speeds_presumed=are_presumed))
        self.records.event({"step": step, "decision": decision.record()})
        self._prepare()

    def meta(self) -> dict[str, Any]:
        """Return the part of a checkpoint's meta record that `restore` reads."""
        record = {"plan": self.plan.to_json(), "balance": None}
        record["num_owners"] = self._job.model.run.num_owners
        if self._is_on:
            record["balance"] = controller.to_json(self._state)
            record["cost"] = self._cost.as_dict()
        return record

    def _decide(self, step: int) -> Decision | None:
        """Return the decision of process 0, and take over its state of the balancer.

        Every process asks at the same steps, because its state is the same.
        """

        def decide() -> str:
            state, decision = controller.decide(
                self._settings, self._cost, self._state, step
            )
            self._state = state
            text = None if decision is None else decision.to_json()
            return json.dumps(
                [{name: getattr(state, name) for name in controller.DECIDED}, text]
            )

        reply = published(f"decision/{step}", decide)
        # A process that has dispatched step s has read what was published for s - 2.
        for old in [s for s in self._published if s <= step - 2]:
            withdraw(f"decision/{old}")
            self._published.remove(old)
        self._published.append(step)
        decided, text = json.loads(reply)
        decision = None if text is None else Decision.from_json(text)
        if not is_first():
            state = dataclasses.replace(self._state, **decided)
            self._state = controller.pend(self._settings, state, decision)
        return decision

    def _prepare(self) -> None:
        """Begin to compile the steps of a pending relayout, if that has not begun, and
        leave those of one that was given up."""
        if self._state.relayout is None:
            self._ahead = None
        elif self._ahead is None:
            layout = self._state.relayout.layout
            self._ahead = Ahead(partial(self._compile_steps, layout, self.layout))

    def _compile_steps(self, layout: Layout, before: Layout | None = None) -> Steps:
        """Return the compiled steps of a layout; compile also the programs that bring
        a state from the layout `before` to it."""
        if before is not None and layout.store != before.store:
            self._mover.prepare_moves()
            if "sharded" in (layout.store, before.store):
                self._mover.prepare_reshard(
                    "sharded" if layout.store == "sharded" else "owned"
                )
        model, is_beside_steps = self._job.model.relaid(layout), before is not None
        return Steps(*compile_steps(model, yields_cores=is_beside_steps))

    def _set_placement(self) -> None:
        """Put the index tables of the current plan on the devices."""
        self.placement: Placement = on_devices(
            self.plan, self.layout, self._job.model.mesh
        )


def make_home_layout(layout: Layout) -> Layout:
    """Return `layout` with a slot for each expert at its owner, and no copies."""
    return dataclasses.replace(
        layout,
        slots_per_device=layout.experts_per_device,
        store="owned",
        split="even",
        fused_split=False,
        offers_per_device=0,
        copies_per_device=0,
        prefetch=False,
    )


def _has_replicas(plan: ExpertPlan) -> bool:
    """Return whether a plan has more full slots than experts."""
    num_full = np.count_nonzero(plan.slot_to_expert_lp >= 0)
    return bool(num_full > plan.num_layers * plan.num_experts)


def _logical(plan: ExpertPlan) -> ExpertPlan:
    """Return a plan with the same slots, whose owners are in logical order."""
    return ExpertPlan(plan.slot_to_expert_lp, plan.num_experts)


def _is_same(saved: dict, current: dict) -> bool:
    """Return whether the fields in SAME are as they were. A field that the saved
    configuration does not have counts as unchanged."""
    current = json.loads(json.dumps(current))
    return all(
        saved.get(part, {}).get(name, value) == value
        for part, names in SAME.items()
        for name, value in current[part].items()
        if names is None or name in names
    )
