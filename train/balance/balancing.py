"""Run the balancer beside training: observe each step, change plans between steps.

    read step s  ->  observe: a process beside process 0 gets the counts, and plans
    before step s + lag_steps  ->  collect: its decision, which process 0 publishes
                     a swap: adopt new tables
                     a relayout: compile the new step in a thread, and adopt it later

Every process collects and adopts at the same steps. A checkpoint holds experts in
logical order, and the plan, what waits, and the planner's state in its meta record.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from moejax.balance import adoptions, codec, controller, planning
from moejax.balance.adoptions import Adoptions
from moejax.balance.loads import home_rows, loads_by_owner
from moejax.balance.planning import (
    Adopted,
    Compiled,
    Planner,
    Refused,
    Reply,
    Snapshot,
    Task,
)
from moejax.balance.policies import check_policy, make_valid_plan
from moejax.moe.types import Placement, RoutingStats
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.resolve.sent_bytes import sent_bytes
from train.balance.ahead import Ahead
from train.balance.migrate import Mover
from train.balance.planner_process import PlannerProcess
from train.balance.record import BalanceRecord
from train.job import Job
from train.launch.processes import (
    any_process,
    are_several,
    is_first,
    published,
    withdraw,
)
from train.logs import plan_lines
from train.logs.records import Records, home_std_over_std, max_over_mean
from train.step.compiled import Steps, compile_steps, on_devices
from train.step.freed_memory import return_freed_memory

LATE_SEC = 0.05
"""Shortest wait for a plan that a line tells of, where lag_steps leave it a whole step.
Each wait is in the record of its step."""
SAME = {
    "mesh": None, "moe": None, "dispatch": None, "balance": None,
    "train": {"batch_size", "accumulate_steps"}, "data": {"seq_len"},
}  # fmt: skip
"""Fields of the configuration that must be as they were in the checkpoint for the
balancer to go on where it stopped. None stands for all fields of a class."""


class Balancing:
    """The balancer of a run, with the compiled steps, the placement and the layout that
    are in use."""

    def __init__(
        self,
        job: Job,
        records: Records,
        say: Callable[[str], None] = print,
        during=contextlib.nullcontext,
    ) -> None:
        """`records` get decisions and plans. `during(what)` is a context for a block in
        which steps wait."""
        self._job, self._records = job, records
        self.say, self._during = say, during
        self._settings, self._mover = job.model.run.settings, Mover(job.model)
        self._is_on = self._settings.policy != "home"
        self.stores = {job.model.layout.store}
        """Stores that the layouts of this run may have."""
        self.stores.update(check_policy(self._settings.first_policy).stores)
        self.stores.update(method.layout.store for method in self._settings.methods)
        self._cost = job.model.run.cost
        layout = job.model.layout
        plan, policy = self._first_plan(layout), self._settings.first_policy
        self._now = Adoptions(layout, plan, policy, (), None)
        self._first_step: int | None = None
        """First step that this balancer has observed; None before it."""
        self._snapshot: Snapshot | None = None
        """Snapshot from which the planner's process starts."""
        self._planner: PlannerProcess | None = None
        self._ahead: Ahead | None = None
        self._step_records: dict[int, dict] = {}
        self._decided: dict[int, dict] = {}
        """Records of decisions, by the step before which they were collected."""
        self._layouts: dict[int, Layout] = {}
        self._published: dict[int, int] = {}

    @property
    def _task(self) -> Task:
        """Return what the planner has to know of this run."""
        home_layout = planning.make_home_layout(self._job.model.layout)
        return Task(self._settings, self._cost, self._batch_sizes, home_layout)

    def _first_plan(self, layout: Layout) -> ExpertPlan:
        """Return the plan of the first step: home, or for a policy that replicates
        before it has seen a load, the policy's plan."""
        home = self._job.model.run.home_plan(layout)
        name = self._settings.first_policy
        policy = check_policy(name)
        if not policy.is_spread_first or layout.store not in policy.stores:
            return home
        shape = (home.num_layers, layout.num_devices, layout.num_experts)
        zero_lwe = np.zeros(shape)
        return make_valid_plan(name, policy, zero_lwe, layout, self._cost, home)

    @property
    def layout(self) -> Layout:
        """The layout of the step that runs now."""
        return self._now.layout

    @property
    def plan(self) -> ExpertPlan:
        """The plan that is in use."""
        return self._now.plan

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
            record = BalanceRecord.from_json(meta["balance"])
            if record and self._can_go_on(record):
                self._now, self._first_step = record.now, record.first_step
                self._snapshot = record.planner
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
                self._now = dataclasses.replace(self._now, plan=plan)
        self.say(f"the balancer starts afresh with plan {self.plan.digest}")

    def _can_go_on(self, record: BalanceRecord) -> bool:
        """Return whether a record of the same configuration has this run's methods,
        which depend on the memory, and its kind of steps and rows, which depend on the
        devices."""
        before, now = record.now.layout, self.layout
        return (
            record.task.settings.methods == self._settings.methods
            and before.overflow == now.overflow
            and before.align_rows == now.align_rows
        )

    def _start_planner(self) -> None:
        """Start the planner's process beside process 0. It comes to life while this
        one compiles."""
        if not self._is_on or not is_first():
            return
        num_layers = self._job.cfg.model.num_moe_layers
        if not self._snapshot:
            state = controller.init(self._settings, self.layout, self.plan, num_layers)
            self._snapshot = Snapshot(Planner(state))
        self._planner = PlannerProcess(self._task, self._snapshot)
        self._snapshot = None

    def close(self) -> None:
        """End the planner's process."""
        if self._planner is not None:
            self._planner.close()

    def compile(self) -> None:
        """Compile the steps of the layout in use, the programs that move experts
        between owners, and the steps of a pending relayout. The planner's process
        starts meanwhile."""
        self._start_planner()
        start_sec = time.monotonic()
        self.steps = compile_steps(self._job.model.relaid(self.layout))
        self.steps.require_room()
        if self._settings.methods and self._planner is not None:
            self._planner.tell(Compiled(time.monotonic() - start_sec))
        if self._is_on and "owned" in self.stores:
            self._mover.prepare_moves()
        self._set_placement()
        self._prepare()
        if self._ahead is not None:
            self._ahead.wait()  # the watchdog has not started yet
        return_freed_memory()

    def begin(self, step: int, state):
        """Return the training state before `step`, the first of an attempt, with its
        experts arranged for the current layout and plan, and write a line about these.
        The given state has experts in logical order, in the store of the run's first
        layout."""
        plan_and_layout = self.plan, self.layout, self._sent_bytes()
        self._records.plan(plan_lines.whole_line(step, "start", *plan_and_layout))
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
        return is_next and adoptions.is_asked(self._settings, self._now, step)

    def is_due(self, step: int) -> bool:
        """Return whether `before` adopts a decision at this step, for which `collect`
        was called."""
        return adoptions.is_due(self._now, step)

    def _is_relayout_next(self) -> bool:
        """Return whether the decision that is adopted next needs other steps."""
        return adoptions.next_adoption(self._now) is self._now.relayout

    def collect(self, step: int) -> None:
        """Take the decision that was asked for lag_steps before `step`, which is about
        to be dispatched; begin to compile the new layout of a relayout.

        Every process takes it before the same step. Process 0 waits for a plan that is
        late, and the others for process 0.
        """
        asked_step = step - self._settings.lag_steps
        is_observed = self._first_step is not None and self._first_step <= asked_step
        if not is_observed or not adoptions.is_asked(
            self._settings, self._now, asked_step
        ):
            return
        record = self._step_records.setdefault(step, {})
        reply = self._reply(step, asked_step, record)
        # Delete texts that every process has read: before a step is dispatched, all
        # processes have dispatched the one two steps before, whose metrics were read.
        for old in [s for s, at in self._published.items() if at <= step - 2]:
            withdraw(f"decision/{old}")
            del self._published[old]
        self._published[asked_step] = step
        if reply.saving_sec is not None:
            record["modelled_saving_msec"] = 1e3 * reply.saving_sec
        if (decision := reply.decision) is None:
            return
        self._now = adoptions.pend(self._now, decision)
        calibration = self._job.model.run.calibration
        self.say(decision.line(None if calibration.is_measured else calibration.when))
        self._decided[step] = decision.record()
        self._prepare()

    def _reply(self, step: int, asked_step: int, record: dict) -> Reply:
        """Return the planner's reply, which process 0 publishes and records how long
        `step` waited for it."""
        name = f"decision/{asked_step}"
        if self._planner is None:
            return codec.loads(published(name, str))
        with self._during(f"waiting for the plan of step {asked_step}"):
            reply, waited_sec = self._planner.collect(asked_step)
        if are_several():
            published(name, lambda: codec.dumps(reply))
        record["plan_wait_msec"] = 1e3 * waited_sec
        if waited_sec >= LATE_SEC and self._settings.lag_steps > 1:
            self.say(
                f"step {step}  waited {waited_sec:.1f} s for the plan of step "
                f"{asked_step}: a larger Balance.lag_steps leaves it more time"
            )
        return reply

    def before(self, step: int, state):
        """Return the state to run `step` with. If a decision is due at this step, the
        state is moved to its plan and layout first."""
        if self.is_due(step):
            with self._during(f"adopting the decision for step {step}"):
                state = self._adopt(step, state)
        self._step_records.setdefault(step, {})["plan"] = self.plan.digest
        self._layouts[step] = self.layout
        return state

    def _adopt(self, step: int, state):
        """Move the state to the plan and layout that are due, and log how long that
        took. Without compiled steps the state stays as it is."""
        start_sec, is_new = time.monotonic(), self._is_relayout_next()
        if is_new and not self._ahead.is_done:
            self.say(f"step {step}  waits until the new layout is compiled")
        with self._during("waiting until the new layout is compiled"):
            if is_new and not self._take_steps():
                return state
        waited_sec = time.monotonic() - start_sec
        old_layout, old_plan = self.layout, self.plan
        self._now = adoptions.adopt(self._now)
        self._record_adoption(step, old_plan, is_relayout=is_new)
        self._tell(Adopted())
        old_store, new_store = old_layout.store, self.layout.store
        if (old_store == "sharded") != (new_store == "sharded"):
            state = self._mover.to_owners(state, old_plan, _logical(old_plan))
            state = self._mover.to_store(state, old_store, new_store)
            old_plan = _logical(old_plan)
        state = self._mover.to_owners(state, old_plan, self.plan)
        self._set_placement()
        adopted_sec = time.monotonic() - start_sec - waited_sec
        waited_msec, adopted_msec = 1e3 * waited_sec, 1e3 * adopted_sec
        line = (
            f"step {step}  adopted {self.plan.digest}  in {adopted_msec:.1f} ms  "
            f"waited {waited_msec:.1f} ms"
        )
        if cooldown_steps := self._settings.cooldown_steps:
            kind = "relayout" if is_new else "change"
            line += f"  no other {kind} before step {step + cooldown_steps}"
        self.say(line)
        self._step_records.setdefault(step, {}).update(
            adopt_msec=adopted_msec, adopt_wait_msec=waited_msec
        )
        return state

    def _record_adoption(
        self, step: int, before: ExpertPlan, *, is_relayout: bool
    ) -> None:
        """Write the line of the plan and layout that are in use from `step` on, in
        place of the plan `before`."""
        if is_relayout:
            plan_and_layout = self.plan, self.layout, self._sent_bytes()
            line = plan_lines.whole_line(step, "relayout", *plan_and_layout)
        else:
            line = plan_lines.swap_line(step, before, self.plan, self.layout)
        self._records.plan(line)

    def _sent_bytes(self) -> dict[str, float]:
        """Return the bytes that a device sends in a step of the layout in use, by
        collective."""
        return sent_bytes(self._job.model.run.cfg, self._cost, self.layout)

    def _tell(self, event: Adopted | Refused) -> None:
        """Tell the planner, on process 0, what was done with a decision."""
        if self._planner is not None:
            self._planner.tell(event)

    def _take_steps(self) -> bool:
        """Wait for the steps of the pending layout, and use them from now on; return
        True.

        If a process could not compile its steps, refuse the layout on all of them, and
        return False.
        """
        steps, fault = self._ahead.result()
        self._ahead = None
        if any_process(steps is None):
            layout = self._now.relayout.layout
            self._now = adoptions.refuse(self._now)
            self._tell(Refused())
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
        in the record of a run without a balancer too.

        Before a step for which a decision was collected: `plan_wait_msec`, the time
        for which the step waited for it, and `modelled_saving_msec`, the time per step
        that the cost model saw saved by the plan in use when it was asked for.
        """
        record, layout = self._step_records.pop(step), self._layouts.pop(step)
        if not is_first():
            return {}
        parts = self._cost.counted_step_parts(
            stats.rows_lw.mean(axis=1),
            stats.fullest_device_l,
            stats.fullest_pair_l,
            layout,
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
        return record

    @property
    def _batch_sizes(self) -> dict[str, int]:
        """Devices along each mesh axis that splits the batch."""
        mesh = self._job.cfg.mesh
        return {"dc": mesh.dc, "data": mesh.data, "expert": mesh.expert}

    def loads(self, stats: RoutingStats) -> np.ndarray:
        """Return the rows from each source device of a group to each expert, as
        policies plan from them: float [l, w, e]."""
        return loads_by_owner(stats.tokens_lwe, self._batch_sizes, self.layout)

    def observe(self, step: int, stats: RoutingStats, step_sec: float) -> None:
        """Give the balancer one step's statistics, which are on the host, and its time;
        write the decision that was collected before this step, whose record is
        written."""
        if not self._is_on:
            return
        if step in self._decided:
            self._records.event({"step": step, "decision": self._decided.pop(step)})
        if self._first_step is None:
            self._first_step = step
        if self._planner is not None:
            counts = stats.tokens_lwe, stats.fullest_pair_l
            is_timed = len(self._settings.ways) > 1 or len(self._settings.methods) > 1
            timed_sec = step_sec if is_timed else None
            self._planner.observe(step, *counts, timed_sec, stats.together_lee)

    def meta(self) -> dict[str, Any]:
        """Return the part of a checkpoint's meta record that `restore` reads."""
        record = {"plan": self.plan.to_json(), "balance": None}
        record["num_owners"] = self._job.model.run.num_owners
        if self._planner is not None:  # process 0, which writes the record
            snapshot = self._planner.snapshot()
            balance = BalanceRecord(self._now, self._first_step, self._task, snapshot)
            record["balance"] = balance.to_json()
            record["cost"] = self._cost.as_dict()
        return record

    def _prepare(self) -> None:
        """Begin to compile the steps of a pending relayout, if that has not begun, and
        leave those of one that was given up."""
        if self._now.relayout is None:
            self._ahead = None
        elif self._ahead is None:
            layout = self._now.relayout.layout
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
        return compile_steps(self._job.model.relaid(layout))

    def _set_placement(self) -> None:
        """Put the index tables of the current plan on the devices."""
        self.placement: Placement = on_devices(
            self.plan, self.layout, self._job.model.mesh
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
