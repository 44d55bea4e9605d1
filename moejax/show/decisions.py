"""The view of a decision of the balancer: what changes, what it saves and costs."""

import math

from moejax.balance.decision import Decision, duration
from moejax.show.table import View


def decision(decision: Decision) -> View:
    """Return a view of one decision: the plan, the layout and the device max/mean
    before and after, its price, and the reason."""
    is_kept = decision.kind == "keep"
    ratios = (
        decision.device_max_over_mean_before,
        decision.device_max_over_mean_after,
    )
    rows = [
        ("", "before", "after"),
        ("plan", decision.digest_before, decision.plan.digest),
        ("forecast device max/mean", *(f"{ratio:.2f}" for ratio in ratios)),
    ]
    rows += [(name, *map(str, pair)) for name, pair in decision.changes.items()]
    if not is_kept:
        gain_sec, cost_sec = decision.modelled_gain_sec, decision.modelled_cost_sec
        rows += [
            ("experts that move", f"{decision.num_moves}"),
            ("modelled gain, a step", duration(gain_sec)),
            ("modelled cost, once", duration(cost_sec)),
            ("steps that pay for it", _steps(cost_sec, gain_sec)),
            ("adoption", f"step {decision.adopt_step}"),
        ]
    title = f"step {decision.step}: {decision.kind}, policy {decision.policy}"
    return View(title, tuple(rows), tuple(filter(None, [decision.why])))


def _steps(cost_sec: float, gain_sec: float) -> str:
    """Return the number of steps whose gains add up to the cost, in words."""
    if not gain_sec > 0:
        return "none: nothing is saved"
    steps = cost_sec / gain_sec
    return f"{math.ceil(steps):,}" if math.isfinite(steps) else "no number"
