"""Decisions of the balancer, as a log line, as a metrics record and as JSON.

keep       no change pays
swap       another plan for the same layout
relayout   another layout, with a plan for it
"""

import dataclasses
import json
import math
from typing import Any, Literal

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

Kind = Literal["keep", "swap", "relayout"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """One decision of the balancer: a change that all processes adopt, or none."""

    kind: Kind
    step: int
    """Step at which the decision was taken."""
    adopt_step: int
    """Step at which every process adopts `plan` and `layout`."""
    plan: ExpertPlan
    """Plan to adopt; for 'keep' the current one."""
    layout: Layout
    """Layout to adopt; for 'keep' and 'swap' the current one."""
    policy: str
    """Name of the policy that made the plan."""
    ratio_before: float
    """Forecast device max/mean of the worst layer without the change."""
    ratio_after: float
    """Forecast device max/mean of the worst layer with the change."""
    num_moves: int
    """Number of experts that a device holds after the change and not before, summed
    over layers and devices."""
    gain_sec: float
    """Time that the change saves in each step."""
    cost_sec: float
    """Time that the change costs once, to move master parameters and to compile."""
    why: str
    """Reason for the decision."""
    digest_before: str
    """Digest of the plan before the change."""
    layout_before: Layout
    """Layout before the change."""

    def line(self) -> str:
        """Return the log line, whose fields are two spaces apart."""
        head = f"step {self.step}  {self.kind} {self.digest_before}"
        if self.kind == "keep":
            ratio = f"max/mean {self.ratio_before:.2f}"
            return "  ".join([head, self.policy, ratio, self.why])
        fields = [
            f"{head}->{self.plan.digest}",
            self.policy,
            *self._named_changes(),
            f"max/mean {self.ratio_before:.2f}->{self.ratio_after:.2f}",
            f"moves {self.num_moves}",
            f"gain {duration(self.gain_sec)}/step",
            f"cost {duration(self.cost_sec)}",
        ]
        return "  ".join(fields)

    @property
    def changes(self) -> dict[str, tuple]:
        """Fields of the layout that change, as {name: (before, after)}."""
        before = dataclasses.asdict(self.layout_before)
        after = dataclasses.asdict(self.layout)
        return {n: (before[n], after[n]) for n in after if before[n] != after[n]}

    def _named_changes(self) -> list[str]:
        """Return the changes of the layout in words, as in 'slots 2->3'.

        Budgets follow from other fields, and are named only where nothing else changes.
        """
        changes = self.changes
        budgets = ("offers_per_device", "copies_per_device", "prefetch")
        named = [name for name in changes if name not in budgets] or list(changes)
        short = {"slots_per_device": "slots"}
        return [f"{short.get(n, n)} {changes[n][0]}->{changes[n][1]}" for n in named]

    def record(self) -> dict[str, Any]:
        """Return the record for the metrics, with digests in place of plans and with
        the changes of the layout only."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("plan", "layout", "layout_before"):
            del record[name]
        changes = {name: list(pair) for name, pair in self.changes.items()}
        return {**record, "digest": self.plan.digest, "changes": changes}

    def to_json(self) -> str:
        """Return the decision as JSON, for the other processes and for checkpoints."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        record["plan"] = self.plan.to_json()
        for name in ("layout", "layout_before"):
            record[name] = dataclasses.asdict(record[name])
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> "Decision":
        """Return the decision that `to_json` wrote."""
        record = json.loads(text)
        record["plan"] = ExpertPlan.from_json(record["plan"])
        for name in ("layout", "layout_before"):
            record[name] = Layout(**record[name])
        return cls(**record)


def duration(seconds: float) -> str:
    """Return a time in words with two digits or more: '41 ms', '3.1 ms', '8.1 s'."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f} {unit}"
    decimals = max(0, 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f} {unit}"
