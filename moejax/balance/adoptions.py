"""Adoptions: the plan and the layout in use, and the decisions that wait for their
steps. Every process of a run must know them.

    pend -> adopt, before the step of the adoption, or refuse

The functions take Adoptions, or the controller's state, which is more than that, and
return the same type.
"""

import dataclasses

from moejax.balance.decision import Decision
from moejax.balance.settings import Settings
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout


@dataclasses.dataclass(frozen=True)
class Adoptions:
    """Plan and layout in use, and the decisions that wait for their adoption."""

    layout: Layout
    """Current layout of the step."""
    plan: ExpertPlan
    """Current plan."""
    policy: str
    """Name of the policy that plans now."""
    swaps: tuple[Decision, ...]
    """Swaps that wait for their adopt_step, in the order of decision and adoption; at
    most one unless the cool-down is 0."""
    relayout: Decision | None
    """Relayout that waits for its adopt_step; until then no other is decided."""

    @property
    def coming_plan(self) -> ExpertPlan:
        """Plan that is in use once the waiting swaps are adopted."""
        return self.swaps[-1].plan if self.swaps else self.plan


def is_asked(settings: Settings, state: Adoptions, step: int) -> bool:
    """Return whether something may be decided at `step`: it is a multiple of
    every_steps, or the last step at which a pending relayout can be judged anew.

    `state` has the decisions before `step` alone.
    """
    return is_last_call(settings, state, step) or step % settings.every_steps == 0


def is_last_call(settings: Settings, state: Adoptions, step: int) -> bool:
    """Return whether a pending relayout, decided earlier, is to be adopted lag_steps
    after `step`."""
    waits = state.relayout
    return (
        waits is not None
        and waits.step < step
        and step + settings.lag_steps == waits.adopt_step
    )


def pend[S: Adoptions](state: S, decision: Decision | None) -> S:
    """Return the state in which a decision waits for its adoption. None changes
    nothing, and a decision to keep may give up the pending relayout."""
    if decision is None:
        return state
    if decision.kind == "swap":
        return dataclasses.replace(state, swaps=(*state.swaps, decision))
    if decision.kind == "relayout":
        return dataclasses.replace(state, relayout=decision)
    return dataclasses.replace(state, relayout=None) if decision.gives_up else state


def next_adoption(state: Adoptions) -> Decision | None:
    """Return the pending decision that is adopted first. No swap is adopted at or after
    the step of a pending relayout."""
    return state.swaps[0] if state.swaps else state.relayout


def is_due(state: Adoptions, step: int) -> bool:
    """Return whether a pending decision is to be adopted before `step` is run."""
    coming = next_adoption(state)
    return coming is not None and step >= coming.adopt_step


def adopt[S: Adoptions](state: S) -> S:
    """Return the state with the plan and layout of the next adoption in use."""
    coming = next_adoption(state)
    assert coming is not None, "no decision is pending"
    is_swap = coming.kind == "swap"
    return dataclasses.replace(
        state,
        layout=coming.layout,
        plan=coming.plan,
        policy=coming.policy,
        swaps=state.swaps[1:],
        relayout=state.relayout if is_swap else None,
    )


def refuse[S: Adoptions](state: S) -> S:
    """Return the state without the pending relayout, which could not be compiled."""
    assert state.relayout is not None, "no relayout is pending"
    return dataclasses.replace(state, relayout=None)
