"""Say how the steps fared while the layout of a relayout was compiled beside them."""

import dataclasses

import numpy as np

MIN_STEPS = 20
"""Smallest number of steps, before and during a compilation, that are compared."""
EDGE_STEPS = 2
"""Steps at both ends that do not count: the compilation begins one step after that of
its collection, and the time of the last step contains what the adoption waited for."""


@dataclasses.dataclass(frozen=True)
class Beside:
    """Steps between the collection of the decision for a relayout, after which it
    compiles, and its adoption, compared with as many steps before."""

    collected_step: int
    adopt_step: int
    median_over_before: float
    """Median time of a step, over that of the steps before."""
    p95_over_before: float
    """95th percentile of the time of a step, over that of the steps before."""
    device_max_over_mean: float
    """Mean over the steps of the ratio in the worst layer."""
    device_max_over_mean_max: float

    def line(self) -> str:
        """Return the line for the end of a run."""
        return (
            f"step {self.adopt_step}, relayout: while it compiled, steps took "
            f"{self.median_over_before:.2f} times as long as before in the median, and "
            f"{self.p95_over_before:.2f} times in the 95th percentile; device max/mean "
            f"{self.device_max_over_mean:.2f} on average, "
            f"{self.device_max_over_mean_max:.2f} at most"
        )


def compare(
    collected_step: int,
    adopt_step: int,
    step_msecs: dict[int, float],
    ratios: dict[int, float],
) -> Beside | None:
    """Compare the steps beside a compilation with those before, by the times of steps
    in milliseconds, and device max/mean in the worst layer; None for too few steps."""
    during = range(collected_step + EDGE_STEPS, adopt_step - EDGE_STEPS + 1)
    before = range(collected_step - len(during), collected_step)
    during_n, before_n = (
        np.array([step_msecs[step] for step in steps if step in step_msecs])
        for steps in (during, before)
    )
    ratio_n = np.array([ratios[step] for step in during if step in ratios])
    if min(len(during_n), len(before_n), len(ratio_n)) < MIN_STEPS:
        return None
    median, p95 = (
        round(float(np.percentile(during_n, q) / np.percentile(before_n, q)), 3)
        for q in (50, 95)
    )
    mean, largest = (round(float(x), 3) for x in (ratio_n.mean(), ratio_n.max()))
    return Beside(collected_step, adopt_step, median, p95, mean, largest)
