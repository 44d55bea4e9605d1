"""One decision of the balancer, its log line, and its record.

A decision is one of three:

    keep       nothing changes, because no change pays
    swap       another plan in the same layout
    relayout   another layout, with a plan for it
"""

import dataclasses
import math
from typing import Any, Literal

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.rich import shown_by

Kind = Literal["keep", "swap", "relayout"]


@shown_by("decision")
@dataclasses.dataclass(frozen=True)
class Decision:
    """Decision of the balancer at one step, with the figures that led to it.

    Every process adopts `plan` and `layout` at `adopt_step`. A decision to keep holds
    the plan and the layout that are in use.
    """

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
    device_max_over_mean_before: float
    """Forecast device max/mean of the worst layer under the plan in use."""
    device_max_over_mean_after: float
    """Forecast device max/mean of the worst layer under `plan`."""
    num_moves: int
    """Experts that a device holds after and not before, over layers and devices."""
    modelled_gain_sec: float
    """Seconds per step that the cost model expects the change to save."""
    modelled_cost_sec: float
    """Seconds that the change takes once, by the cost model: to move float32 master
    parameters with their moments, and to compile."""
    why: str
    """Reason for the decision."""
    digest_before: str
    """Digest of the plan before the change."""
    layout_before: Layout
    """Layout before the change."""
    gives_up: bool = False
    """Whether the pending relayout is given up."""

    def __str__(self) -> str:
        return self.line()

    def line(self, source: str | None = None) -> str:
        """Return the line for the log: fields in a fixed order, two spaces apart.

        The last field says where the cost model's speeds are from, 'stated' or
        'presumed'; None: they were measured.
        """
        speeds = [] if source is None else [f"{source} speeds"]
        head = f"step {self.step}  {self.kind} {self.digest_before}"
        before = f"device max/mean {self.device_max_over_mean_before:.2f}"
        if self.kind == "keep":
            return "  ".join([head, self.policy, before, self.why, *speeds])
        fields = [
            f"{head}->{self.plan.digest}",
            self.policy,
            *self._describe_changes(),
            f"{before}->{self.device_max_over_mean_after:.2f}",
            f"moves {self.num_moves}",
            f"modelled gain {duration(self.modelled_gain_sec)}/step",
            f"modelled cost {duration(self.modelled_cost_sec)}",
            f"adoption at step {self.adopt_step}",
            *speeds,
        ]
        return "  ".join(fields)

    @property
    def changes(self) -> dict[str, tuple]:
        """Fields of the layout that change: name to (before, after)."""
        before, after = _named(self.layout_before), _named(self.layout)
        return {n: (before[n], after[n]) for n in after if before[n] != after[n]}

    def _describe_changes(self) -> list[str]:
        """Return texts such as 'slots 2->3'. Budgets follow from the other fields, so
        they are named only where nothing else changes."""
        changes = self.changes
        budgets = (
            "offers_per_device", "copies_per_device", "offers_per_node",
            "copies_per_node", "prefetch",
        )  # fmt: skip
        names = [name for name in changes if name not in budgets] or list(changes)
        short = {"slots_per_device": "slots"}
        return [f"{short.get(n, n)} {changes[n][0]}->{changes[n][1]}" for n in names]

    def record(self) -> dict[str, Any]:
        """Return the record for metrics.jsonl. It has the digests of plans, and of the
        layout the fields that change."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("plan", "layout", "layout_before"):
            del record[name]
        changes = {name: list(pair) for name, pair in self.changes.items()}
        return {**record, "digest": self.plan.digest, "changes": changes}


def _named(layout: Layout) -> dict[str, Any]:
    """Return a layout's fields by name; in place of `tensor` the schedule, and of the
    domain the number of its devices along each axis."""
    fields = dataclasses.asdict(layout)
    tensor, domain = layout.tensor, layout.domain
    del fields["tensor"]
    fields["schedule"] = None if tensor is None else tensor.schedule
    fields["domain"] = None if domain is None else domain.shared
    return fields


def duration(seconds: float) -> str:
    """Return a time with two digits or more, below a second in milliseconds: '41 ms',
    '3.1 ms', '8.1 s'."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f} {unit}"
    decimals = max(0, 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f} {unit}"
