"""Choice of when slots are gathered over data: in each layer, or once a step.

Once a step fewer bytes travel, and the slots of all layers, with float32 sums of their
gradients, are whole on every device (ZeRO stage 1 instead of 3).
"""

from typing import NamedTuple

from moejax.plan.layout import GATHERED_ONCE, Gather, Layout

GIB = 2**30
SAFE = 0.9
"""Share of the usable memory that a step which gathers once may be predicted to need.
Predictions are wrong by up to 10 %, and near the limit XLA computes parts again and
makes collectives synchronous: Mixtral at 94 % has 3.2 s more work in a step, and
gathers save 2.8 s (docs/decisions/0022-gather-once-a-step.md)."""


class GatherChoice(NamedTuple):
    """When slots are gathered, and the predictions behind it."""

    gather: Gather
    saved_sec: float
    """Seconds that travelling takes less in a step if slots are gathered once."""
    once_sec: float
    """Seconds that it takes then."""
    layer_bytes: int
    """Bytes of a device at the peak of a step that gathers in each layer."""
    once_bytes: int
    """The same of a step that gathers once."""
    usable_bytes: int
    """Bytes of a device that a run may use."""

    def line(self) -> str:
        """Return the line that says what was chosen, and why."""
        each = "in each layer of each micro-batch"
        once_gib, usable_gib = self.once_bytes / GIB, self.usable_bytes / GIB
        more_gib = (self.once_bytes - self.layer_bytes) / GIB
        need = (
            f"{once_gib:.1f} GiB; at most {SAFE:.0%} of the {usable_gib:.1f} GiB that "
            "a run may use are taken"
        )
        times = (
            f"{self.saved_sec:.3g} s less a step on the way ({self.once_sec:.3g} s, not"
            f" {self.once_sec + self.saved_sec:.3g} s) and {more_gib:.1f} GiB more"
        )
        if self.gather == "step":
            return f"gather             once a step: {times} than {each}, {need}"
        return f"gather             {each}: once a step would take {times}, {need}"


def is_open(gather: Gather | None, layout: Layout, gather_sec: float) -> bool:
    """Return whether a run has a choice: Dispatch.gather is None, slots are gathered
    over data at all, and those of the layout can be gathered once a step.

    `gather_sec` is CostModel.gather_sec.
    """
    can_keep = layout.store in GATHERED_ONCE and layout.domain is None
    return gather is None and gather_sec > 0 and can_keep and not layout.is_local


def choose(
    layer: tuple[float, int], once: tuple[float, int], usable_bytes: int
) -> GatherChoice:
    """Return when slots are gathered, from the seconds and bytes of both ways.

    Once a step is chosen where it takes less time and fits.
    """
    (layer_sec, layer_bytes), (once_sec, once_bytes) = layer, once
    is_once = once_sec < layer_sec and once_bytes <= SAFE * usable_bytes
    return GatherChoice(
        "step" if is_once else "layer",
        layer_sec - once_sec,
        once_sec,
        layer_bytes,
        once_bytes,
        usable_bytes,
    )
