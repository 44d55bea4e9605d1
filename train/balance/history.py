"""The last decisions of the balancer, and what became of each, for a screen."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

from moejax.balance.adoptions import Adoptions
from moejax.balance.decision import Decision
from train.logs.screen import Shown

NUM_KEPT = 12
"""Number of decisions that are kept: as many as a large terminal has room for."""


@dataclasses.dataclass
class History:
    """The last decisions, oldest first, each with its record."""

    decisions: deque[tuple[Decision, dict[str, Any]]] = dataclasses.field(
        default_factory=lambda: deque(maxlen=NUM_KEPT)
    )
    adopted_steps: set[int] = dataclasses.field(default_factory=set)
    """Steps at which the decisions were taken that are in use, or were."""

    def shown(self, now: Adoptions) -> tuple[Shown, ...]:
        """Return the decisions as a screen shows them. Those that wait since before the
        run was resumed come first. Any thread may call this."""
        waiting = [*now.swaps, *([] if now.relayout is None else [now.relayout])]
        last = list(self.decisions)
        steps = {decision.step for decision, _ in last}
        last = [(x, x.record()) for x in waiting if x.step not in steps] + last
        known = [decision for decision, _ in last]
        waiting_steps = {decision.step for decision in waiting}
        return tuple(
            Shown(record, self._fate(decision, waiting_steps, known))
            for decision, record in last
        )

    def _fate(
        self, decision: Decision, waiting_steps: set[int], known: Sequence[Decision]
    ) -> str:
        """Return what has become of a decision."""
        if decision.kind == "keep":
            return ""
        if decision.step in self.adopted_steps:
            return f"adopted at step {decision.adopt_step}"
        if decision.step in waiting_steps:
            return f"adoption at step {decision.adopt_step}"
        for later in known:
            is_anew = later.kind == "relayout" and later.step > decision.step
            if is_anew and later.adopt_step == decision.adopt_step:
                return f"planned anew at step {later.step}"
        return "given up"
