"""Choice of when slots are gathered over data: in each layer, or once a step.

Once a step fewer bytes travel, and the slots of all layers, with float32 sums of their
gradients, are whole on every device (ZeRO stage 1 instead of 3). Where each data centre
has all experts, the sums along dc are then made once a step too.
"""

from typing import NamedTuple

from moejax.choice import Choice
from moejax.perf.cost_model import CostModel
from moejax.plan.layout import Gather, Layout
from moejax.plan.layout_checks import GATHERED_ONCE

GIB = 2**30
SAFE = 0.9
"""Share of the usable memory that a step which gathers once may be predicted to need.
Predictions are wrong by up to 10 %, and near the limit XLA computes parts again and
makes collectives synchronous: Mixtral at 94 % has 3.2 s more work in a step, and
gathers save 2.8 s (docs/decisions/0022-gather-once-a-step.md)."""


class Cost(NamedTuple):
    """Seconds and bytes that gathering slots in one way takes."""

    sec: float
    """Seconds on the way in a step."""
    num_bytes: int
    """Bytes of a device at the peak of the step."""

    def __str__(self) -> str:
        return f"{self.sec:.3g} s on the way in a step, {self.num_bytes / GIB:.1f} GiB"


def is_open(gather: Gather | None, layout: Layout, cost: CostModel) -> bool:
    """Return whether a run has a choice: Dispatch.gather is None, slots are gathered
    over data or in a domain, or several micro-batches' gradients are summed along dc,
    and the slots of the layout can be gathered once a step."""
    can_keep = layout.store in GATHERED_ONCE and not layout.is_local
    is_summed = cost.sums_along_dc(layout) and not layout.keeps_slots
    is_gathered = cost.gather_sec > 0 or (is_summed and cost.micro_batches > 1)
    if layout.domain is not None:
        can_keep = can_keep and layout.domain.compression is None
        is_gathered = is_gathered or layout.store == "owned"
    return gather is None and is_gathered and can_keep


def choose(layer: Cost, once: Cost, usable_bytes: int) -> Choice[Gather]:
    """Return when slots are gathered, from what both ways take: once a step where that
    takes less time and fits into `usable_bytes` of a device, which a run may use."""
    costs = {"layer": layer, "step": once}
    room = f"{SAFE:.0%} of the {usable_bytes / GIB:.1f} GiB that a run may use"
    if once.sec >= layer.sec:
        return Choice("layer", "once a step takes as long", costs)
    if once.num_bytes > SAFE * usable_bytes:
        return Choice("layer", f"once a step takes more than {room}", costs)
    return Choice("step", f"it takes less time, and at most {room}", costs)
