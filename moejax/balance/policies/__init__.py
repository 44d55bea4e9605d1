"""Policies, each of which is a function from loads to a plan.

    plan(load_lwe, layout, cost, current) -> ExpertPlan

A policy has a file or a folder, and an entry in POLICIES. `load_lwe` is rows per step
by layer, source device and expert; `current` is the plan that runs now, already of the
layout's size. The plan that is returned is valid for the layout and its budgets, and
the same for the same arguments.
"""

import dataclasses
import difflib
from collections.abc import Callable

from moejax.balance.policies import eplb, fastermoe, home, prophet, smartmoe
from moejax.balance.policies.flexmoe import policy as flexmoe
from moejax.balance.policies.micromoe import policy as micromoe
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Split, Store


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy and the layouts that it plans for."""

    plan: Callable[..., ExpertPlan]
    """Function from loads to a plan."""
    stores: tuple[Store, ...]
    """Stores that the policy plans for. The first is the default; a relayout may change
    to another one."""
    split: Split = "even"
    """Split that runs with the policy's plans, unless Dispatch.split names another."""
    prefetch: bool = False
    """Whether transient copies travel a layer ahead by default."""
    has_replicas: bool = True
    """Whether the policy makes replicas, so that it can use more slots than experts."""
    is_spread_first: bool = False
    """Whether a run starts from the policy's plan for no load, and not with each expert
    at its owner alone."""


POLICIES: dict[str, Policy] = {
    "home": Policy(home.plan, ("owned",), has_replicas=False),
    "fastermoe": Policy(fastermoe.plan, ("transient",), "local_first"),
    "prophet": Policy(prophet.plan, ("transient",), "local_first", prefetch=True),
    "flexmoe": Policy(flexmoe.plan, ("resident", "sharded")),
    "smartmoe": Policy(smartmoe.plan, ("owned",), has_replicas=False),
    "eplb": Policy(eplb.plan, ("sharded",)),
    "micromoe": Policy(
        micromoe.plan,
        ("resident", "transient", "sharded"),
        "water_filling",
        is_spread_first=True,
    ),
}


def check_policy(name: str) -> Policy:
    """Return the policy of that name.

    Raises ValueError with the nearest name if there is none.
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "use one of them"
        raise ValueError(f"no policy {name!r} among {', '.join(POLICIES)}: {hint}")
    return POLICIES[name]
