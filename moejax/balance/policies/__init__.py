"""Policies: functions from loads to a plan. Each has a file or a folder here, and an
entry in POLICIES.

    plan(load_lwe, layout, cost, current) -> ExpertPlan
    plan(load_lwe, layout, cost, current, together_lee) -> ExpertPlan

`load_lwe` is rows per step by layer, source device and expert. `current` is the plan
that runs now, already of the layout's size. Policies with `needs_together` also take
the tokens that chose both of two experts (`moejax.plan.together`), or None. The plan
that is returned must be valid for the layout and its budgets, and the same for the same
arguments. `make_valid_plan` calls a policy and checks that its plan is valid.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Sequence

import numpy as np

from moejax.balance.policies import (
    eplb,
    fastermoe,
    hiermoe,
    home,
    laer,
    prophet,
    smartmoe,
)
from moejax.balance.policies.flexmoe import policy as flexmoe
from moejax.balance.policies.micromoe import policy as micromoe
from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Split, Store
from moejax.plan.units import device_plan, unit_loads, unit_order, unit_plan


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy, and the layouts that it plans for."""

    plan: Callable[..., ExpertPlan]
    """Function from loads to a plan."""
    stores: tuple[Store, ...]
    """Stores that it plans for. A run begins with the first one; the controller may
    consider the others."""
    split: Split = "even"
    """Split that runs with the policy's plans, unless Dispatch.split names another."""
    prefetch: bool = False
    """Whether transient copies, or sharded slots, travel a layer ahead by default."""
    has_replicas: bool = True
    """Whether the policy can use more slots than there are experts."""
    is_spread_first: bool = False
    """Whether a run starts from the policy's plan for a load of zeros, and not from the
    home plan."""
    needs_together: bool = False
    """Whether the policy plans by the experts that tokens choose together, which the
    step then counts."""
    node_copies: int | None = None
    """Largest number of experts that a node sends to others, or takes from them, in its
    plans, where rows are not kept on their nodes; None: it does not look at nodes."""
    max_ratio: float = 1.0
    """Device max/mean up to which its plans may be less even than the current one."""
    options: tuple[str, ...] = ()
    """Fields of the balancer's settings that the plan function takes, as keywords of
    the same names."""

    def prefetches(self, store: Store) -> bool:
        """Return whether the weights of slots travel a layer ahead by default."""
        return self.prefetch and store in ("transient", "sharded")

    def between_nodes(self, layout: Layout) -> dict[str, int]:
        """Return the budgets of nodes for copies in a layout, by name: those that any
        plan within its budgets of devices may need, or the policy's plans."""
        most = layout.most_between_nodes
        spans_nodes = layout.domain is not None and layout.domain.shared[0] > 1
        if self.node_copies is None or layout.deals_near or spans_nodes:
            return most
        return {name: min(self.node_copies, limit) for name, limit in most.items()}

    def with_options(self, settings: object) -> "Policy":
        """Return the policy whose plan function has its options from the attributes of
        `settings`."""
        values = {name: getattr(settings, name) for name in self.options}
        plan = functools.partial(self.plan, **values) if values else self.plan
        return dataclasses.replace(self, plan=plan)


POLICIES: dict[str, Policy] = {
    "home": Policy(home.plan, ("owned",), has_replicas=False),
    "fastermoe": Policy(fastermoe.plan, ("transient",), "local_first"),
    "prophet": Policy(prophet.plan, ("transient",), "local_first", prefetch=True),
    "flexmoe": Policy(flexmoe.plan, ("resident", "sharded")),
    "smartmoe": Policy(smartmoe.plan, ("owned",), has_replicas=False),
    "hiermoe": Policy(
        hiermoe.plan,
        ("owned",),
        has_replicas=False,
        needs_together=True,
        max_ratio=hiermoe.MAX_RATIO,
    ),
    "eplb": Policy(eplb.plan, ("sharded",), options=("num_expert_groups", "num_nodes")),
    "laer": Policy(laer.plan, ("sharded",), prefetch=True, options=("num_nodes",)),
    "micromoe": Policy(
        micromoe.plan,
        ("resident", "transient", "sharded"),
        "water_filling",
        is_spread_first=True,
        node_copies=micromoe.NODE_COPIES,
    ),
}


AUTO = "auto"
"""Value of Balance.policy with which a run chooses a policy by its loads."""


def check_policy(name: str) -> Policy:
    """Return the policy of that name; raise ValueError with the nearest name where
    there is none."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "use one of them"
        raise ValueError(
            f"policy={name!r} must be one of {', '.join(POLICIES)} ('auto' is for a "
            f"run alone): {hint}"
        )
    return POLICIES[name]


def make_valid_plan(
    name: str,
    policy: Policy,
    load_lwe: np.ndarray,
    layout: Layout,
    cost: CostModel,
    current: ExpertPlan,
    together_lee: np.ndarray | None = None,
) -> ExpertPlan:
    """Return the policy's plan for a load; raise ValueError where it is invalid.

    With domains the policy plans for these (`moejax.plan.units`), at the cost of rows
    between them.
    """
    units, of_units = layout.exchanged, cost.between_units(layout)
    args = unit_loads(load_lwe, layout), units, of_units, unit_plan(current, layout)
    if policy.needs_together and together_lee is not None:
        order_e = unit_order(layout)
        args += (together_lee[:, order_e][:, :, order_e],)
    made = check_plan(name, policy.plan(*args), units)
    if units is layout:
        return made
    return check_plan(name, device_plan(made, layout, current), layout)


def check_plan(
    name: str, plan: ExpertPlan, layout: Layout, layers: Sequence[int] | None = None
) -> ExpertPlan:
    """Return a plan that a policy has made; raise ValueError where it is invalid.

    The error is one line with the policy's name, a layer, and the experts that have no
    slot there. `layers` are the numbers of the plan's layers in the model; None: 0, 1,
    2 ...
    """
    if not isinstance(plan, ExpertPlan):
        raise ValueError(
            f"policy '{name}' returned a {type(plan).__name__}: it must return an "
            "ExpertPlan"
        )
    try:
        return plan.validate(layout)
    except ValueError as fault:
        problem = _expert_without_slot(plan, layers) or str(fault)
        raise ValueError(
            f"policy '{name}' returned a plan that cannot run: {problem}"
        ) from fault


def check_on_skewed_load(
    name: str, policy: Policy, layout: Layout, cost: CostModel, num_layers: int
) -> None:
    """Raise ValueError where the policy's plan for a synthetic skewed load is invalid.

    In each layer the loads of the experts are proportional to 1, 1/2, 1/3 ..., in a
    random order. A layout whose store the policy does not plan for is not checked.
    """
    if layout.store not in policy.stores:
        return
    rng, rows = np.random.default_rng(0), layout.rows_per_device
    share_e = 1 / np.arange(1, layout.num_experts + 1)
    share_le = np.stack([rng.permutation(share_e) for _ in range(num_layers)])
    load_l1e = np.ceil(rows * share_le / share_e.sum())[:, None].astype(int)
    load_lwe = np.repeat(load_l1e, layout.num_devices, axis=1)
    home = ExpertPlan.home_in(layout, len(load_lwe))
    make_valid_plan(name, policy, load_lwe, layout, cost, home)


def _expert_without_slot(plan: ExpertPlan, layers: Sequence[int] | None) -> str:
    """Return a sentence that names the first layer with an expert that has no slot, and
    its experts without one; '' where all have slots."""
    for layer, row_p in enumerate(plan.slot_to_expert_lp):
        missing = np.setdiff1d(np.arange(plan.num_experts), row_p)
        if missing.size:
            number = layer if layers is None else layers[layer]
            experts = ", ".join(map(str, missing[:8]))
            noun = "expert" if missing.size == 1 else "experts"
            more = "" if missing.size <= 8 else f" and {missing.size - 8} more"
            rule = "every expert needs one"
            return f"layer {number} has no slot for {noun} {experts}{more}: {rule}"
    return ""
