"""A balancer's run without devices: loads made by hand, two small policies, a loop."""

import dataclasses

import numpy as np

from moejax.balance import candidates, controller
from moejax.balance.controller import Settings
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
"""Two own experts and a copy on each device; no buffers, but where a test pads."""
PADDED = dataclasses.replace(LAYOUT, transport="padded")
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
    """Own experts at home; then each device with room, in turn, takes the expert with
    most rows per replica that it has not, of what the budgets let it have."""
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
    """The fullest experts on different devices: sorted by load, dealt in turn."""
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
    given = {
        "policy": "spread", "every_steps": 5, "lag_steps": 3, "act_above": 1.4,
        "rest_below": 1.2, "margin": 0.05, "cooldown_steps": 20, "horizon_steps": 500,
        "half_life_steps": 4.0, "max_slots_per_device": 3,
    }  # fmt: skip
    given["relayout_lag_steps"] = changes.get("lag_steps", given["lag_steps"])
    return Settings(**{**given, **changes})


def hot(expert, share, num_layers=L):
    """`share` of every source's rows go to one expert, the others get the rest."""
    load_e = np.full(E, ROWS * (1 - share) / (E - 1))
    load_e[expert] = ROWS * share
    return np.tile(np.round(load_e).astype(np.int64), (num_layers, W, 1))


EVEN = np.full((L, W, E), ROWS // E)


def noisy(load_lwe, rng):
    """As many choices, drawn by chance."""
    total = load_lwe.sum(axis=-1, keepdims=True)
    return rng.multinomial(total[..., 0], load_lwe / total)


def pairs(state, load_lwe):
    return candidates.fullest_pair_by_layer(load_lwe, state.plan, state.layout)


@dataclasses.dataclass
class BalancedRun:
    """What a loop would have: a state, and all that was decided."""

    settings: Settings
    cost: CostModel
    state: controller.State
    decisions: list

    @classmethod
    def of(cls, settings, cost=COST, layout=LAYOUT, plan=None):
        plan = plan or ExpertPlan.home_in(layout, L)
        return cls(settings, cost, controller.init(settings, layout, plan, L), [])

    def go(self, steps, load_of_step, pair_of_step=None):
        """A step: adopt what is due; see the load of the step before; decide."""
        for step in steps:
            pending = self.state.pending
            if pending is not None and pending.adopt_step == step:
                self.state = controller.adopt(self.state)
            load_lwe = load_of_step(step)
            pair_l = np.ceil(pairs(self.state, load_lwe)).astype(int)
            if pair_of_step is not None:
                pair_l = pair_of_step(step)
            args = self.settings, self.state, step, load_lwe, pair_l
            self.state = controller.observe(*args)
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
    return candidates.ratio_by_layer(load_lwe, state.plan, state.layout).max()
