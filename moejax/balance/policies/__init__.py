"""Policies: from loads to a plan, a file or a folder each, and an entry in POLICIES.

    plan(load_lwe, layout, cost, current) -> ExpertPlan

`load_lwe` is rows per step by layer, source device and expert; `current` the plan that
runs now, already of the layout's size. A plan is valid for the layout, budgets too, and
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
    stores: tuple[Store, ...]
    """The first is the default; the controller may weigh the others."""
    split: Split = "even"
    prefetch: bool = False
    has_replicas: bool = True
    """Whether slots beyond those of the experts help it."""
    is_spread_first: bool = False
    """A run starts from its plan for no load at all, not from home."""


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
    """The policy of that name; ValueError with the nearest names if there is none."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "use one of them"
        raise ValueError(f"no policy {name!r} among {', '.join(POLICIES)}: {hint}")
    return POLICIES[name]
