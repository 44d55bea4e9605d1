"""What the balancer decided: one log line, one record, and JSON for other processes.

keep       nothing that could be done pays
swap       another plan in the same layout
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
    """`plan` and `layout` are what every process adopts at `adopt_step`; for 'keep'
    they are those of today."""

    kind: Kind
    step: int
    adopt_step: int
    plan: ExpertPlan
    layout: Layout
    policy: str
    ratio_before: float
    """Device max/mean of the forecast in the worst layer, today and after."""
    ratio_after: float
    num_moves: int
    """Experts that a device holds after and not before, over layers and devices."""
    gain_sec: float
    """Per step."""
    cost_sec: float
    """Once: to move masters, and to compile."""
    why: str
    digest_before: str
    layout_before: Layout

    def line(self) -> str:
        """The log line, always of one form: fields two spaces apart."""
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
        """Fields of the layout that become others: name to (before, after)."""
        before = dataclasses.asdict(self.layout_before)
        after = dataclasses.asdict(self.layout)
        return {n: (before[n], after[n]) for n in after if before[n] != after[n]}

    def _named_changes(self) -> list[str]:
        """As in 'slots 2->3'; budgets follow from the rest, and are named if alone."""
        changes = self.changes
        budgets = ("offers_per_device", "copies_per_device", "prefetch")
        named = [name for name in changes if name not in budgets] or list(changes)
        short = {"slots_per_device": "slots"}
        return [f"{short.get(n, n)} {changes[n][0]}->{changes[n][1]}" for n in named]

    def record(self) -> dict[str, Any]:
        """For the metrics: plans by their digests, of the layout what changes."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("plan", "layout", "layout_before"):
            del record[name]
        changes = {name: list(pair) for name, pair in self.changes.items()}
        return {**record, "digest": self.plan.digest, "changes": changes}

    def to_json(self) -> str:
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        record["plan"] = self.plan.to_json()
        for name in ("layout", "layout_before"):
            record[name] = dataclasses.asdict(record[name])
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> "Decision":
        record = json.loads(text)
        record["plan"] = ExpertPlan.from_json(record["plan"])
        for name in ("layout", "layout_before"):
            record[name] = Layout(**record[name])
        return cls(**record)


def duration(seconds: float) -> str:
    """Two digits or more, in ms below a second: '41 ms', '3.1 ms', '8.1 s'."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f} {unit}"
    decimals = max(0, 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f} {unit}"
