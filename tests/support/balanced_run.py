"""Run the balancer without devices, on loads made by hand.

The file holds two small policies, functions that make loads, and a loop in place of the
training loop.
"""

import dataclasses

import numpy as np

from moejax.balance import adoptions, candidates, controller, planning
from moejax.balance.controller import Settings
from moejax.balance.planning import Observed, Planner, Snapshot, Task
from moejax.balance.policies import Policy
from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

L, W, E = 2, 4, 8
ROWS = 800
"""Rows per step of one source device."""
OWN = E // W
LAYOUT = Layout(
    E, W, 3, 1024, "ragged", store="resident", offers_per_device=2, copies_per_device=1
)
"""Two own experts and one copy on each device. The ragged transport has no buffers."""
PADDED = dataclasses.replace(LAYOUT, transport="padded")
"""LAYOUT with the padded transport, which has buffers."""
COST = CostModel(
    flops_per_row=1e6,
    bytes_per_row=1e3,
    bytes_per_expert=1e4,
    bytes_per_move=6e4,
    flops_per_sec=1e9,
    bytes_per_sec=1e9,
    compile_sec=1.0,
)


def spread(load_lwe, layout, cost, current):
    """Return a plan that keeps every expert at home and fills free slots with copies.

    The devices take turns. Each takes the expert with most rows per replica that it
    does not hold yet and that the budget of offers admits.
    """
    w, own = layout.num_devices, layout.experts_per_device
    rows = ExpertPlan.home_in(layout, len(load_lwe)).slot_to_expert_lp.copy()
    for load_we, row_p in zip(load_lwe, rows):
        load_e, row_ws = load_we.sum(axis=0), row_p.reshape(w, -1)
        replicas_e = np.ones(layout.num_experts)
        offered_e = np.zeros(layout.num_experts, bool)
        for slot in range(own, min(layout.slots_per_device,
                                   own + layout.copies_per_device)):  # fmt: skip
            for device in range(w):
                used_w = offered_e.reshape(w, -1).sum(axis=1)
                free_e = np.repeat(used_w < layout.offers_per_device, own)
                want_e = np.where(free_e | offered_e, load_e / replicas_e, -1.0)
                want_e[row_ws[device, :slot]] = -1.0
                expert = int(want_e.argmax())
                if want_e[expert] > load_e.mean() / 4:
                    row_ws[device, slot] = expert
                    replicas_e[expert] += 1
                    offered_e[expert] = True
    return ExpertPlan(rows, layout.num_experts)


def permute(load_lwe, layout, cost, current):
    """Return a plan of new owners: experts sorted by load are dealt to devices in turn,
    so that the fullest experts have different owners."""
    rows = []
    for load_we in load_lwe:
        order_e = np.argsort(-load_we.sum(axis=0), kind="stable")
        rows.append(order_e.reshape(-1, layout.num_devices).T.reshape(-1))
    table_le = np.array(rows, np.int32)
    return ExpertPlan(table_le, layout.num_experts, table_le)


POLICIES_OF_TESTS = {
    "spread": Policy(spread, ("resident",)),
    "permute": Policy(permute, ("owned",), has_replicas=False),
}


def settings(**changes):
    """Return the balancer's settings for these tests, with `changes`."""
    values = {
        "policy": "spread", "every_steps": 5, "lag_steps": 3, "act_above": 1.4,
        "margin": 0.05, "cooldown_steps": 20, "horizon_steps": 500,
        "half_life_steps": 4.0, "max_slots_per_device": 3,
    }  # fmt: skip
    values["relayout_lag_steps"] = changes.get("lag_steps", values["lag_steps"]) + 1
    return Settings(**{**values, **changes})


def hot(expert, share, num_layers=L):
    """Return loads in which one expert gets `share` of the rows of every source, and
    the other experts divide the rest evenly."""
    load_e = np.full(E, ROWS * (1 - share) / (E - 1))
    load_e[expert] = ROWS * share
    return np.tile(np.round(load_e).astype(np.int64), (num_layers, W, 1))


EVEN = np.full((L, W, E), ROWS // E)


def noisy(load_lwe, rng):
    """Draw loads at random with the shares and the totals of `load_lwe`."""
    total = load_lwe.sum(axis=-1, keepdims=True)
    return rng.multinomial(total[..., 0], load_lwe / total)


def pairs(state, load_lwe):
    """Return the rows of the fullest pair of devices in each layer under the plan."""
    return candidates.fullest_pair_by_layer(load_lwe, state.plan, state.layout)


@dataclasses.dataclass
class BalancedRun:
    """State of a balancer and all its decisions, as the training loop would have
    them."""

    settings: Settings
    cost: CostModel
    state: controller.State
    decisions: list
    step_sec: float | None = None
    """Time of every step; None: it is not known."""

    @classmethod
    def start(cls, settings, cost=COST, layout=LAYOUT, plan=None):
        """Return a run in which nothing has happened yet."""
        plan = plan or ExpertPlan.home_in(layout, L)
        return cls(settings, cost, controller.init(settings, layout, plan, L), [])

    def go(self, steps, load_of_step, pair_of_step=None):
        """Run the balancer through `steps` and return self.

        Each step adopts a pending decision that is due, observes the step's load, and
        decides.
        """
        for step in steps:
            if adoptions.is_due(self.state, step):
                self.state = controller.adopt(self.state)
            load_lwe = load_of_step(step)
            pair_l = np.ceil(pairs(self.state, load_lwe)).astype(int)
            if pair_of_step is not None:
                pair_l = pair_of_step(step)
            args = self.settings, self.state, step, load_lwe, pair_l
            self.state = controller.observe(*args, self.step_sec, self.cost)
            self.state, decision = controller.decide(
                self.settings, self.cost, self.state, step
            )
            self.decisions += [decision] if decision else []
        return self

    def kinds(self):
        return [d.kind for d in self.decisions]

    def changes(self):
        return [d for d in self.decisions if d.kind != "keep"]


def worst(state, load_lwe):
    """Return the largest max/mean load of devices over all layers."""
    return candidates.ratio_by_layer(load_lwe, state.plan, state.layout).max()


def new_planner() -> tuple[Task, Snapshot]:
    """Return what a planner has to know, and its first snapshot. Its policy is one of
    the program's, so that another process knows it too."""
    changes = {"policy": "flexmoe", "half_life_steps": 2.0, "cooldown_steps": 4}
    own = settings(**changes, stores=("resident",))
    state = BalancedRun.start(own).state
    sizes = {"dc": 1, "data": 1, "expert": W}
    task = Task(own, COST, sizes, planning.make_home_layout(state.layout))
    return task, Snapshot(Planner(state))


def observed(step: int) -> Observed:
    """Return the counts of a step, whose hot expert changes every eight steps."""
    load_lwe = noisy(hot(step // 8 % E, 0.5), np.random.default_rng(step))
    return Observed(step, load_lwe.astype(np.int32), np.full(L, 30, np.int32))
