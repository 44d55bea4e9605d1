"""Figures of one arm of a race, from the records of its run and of home's beside it."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from moejax.config import Config
from tools import predictions
from tools.testbed import budget
from tools.testbed.turns import Block

LOSS_PER_STEP = 1e-5
"""Difference of losses, in nats, by which a step may add to that of the step before.

Two arms sum the same numbers in another order. From the same state one step differs by
less; from then on the states differ too."""


ADOPTION_FIELDS = ("plan_wait_msec", "adopt_msec", "adopt_wait_msec")
"""Fields of a step's record that say how long the loop was held by balancing."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two runs of a pair."""

    blocks: Sequence[Block]
    """Its blocks, in the order in which they ran."""
    records: Sequence[Mapping]
    """Records of its metrics.jsonl."""

    @functools.cached_property
    def steps(self) -> list[Mapping]:
        """Records of the steps of the blocks, without the time for which the run was
        stopped."""
        first, last = self.blocks[0].first_step, self.blocks[-1].last_step
        steps = [
            dict(x)
            for x in self.records
            if "step_msec" in x and first <= x["step"] <= last
        ]
        for block in self.blocks:
            _take_out_pause(steps, block)
        return steps

    @property
    def step_sec(self) -> float:
        """Wall time of all blocks over their steps, in seconds."""
        total_sec = sum(block.sec for block in self.blocks)
        return total_sec / sum(block.num_steps for block in self.blocks)

    @property
    def adopted(self) -> list[Mapping]:
        """Decisions that were adopted up to the last step. A relayout that is planned
        anew has two decisions for one step, of which the later one counts."""
        last = self.blocks[-1].last_step
        decisions = [x["decision"] for x in self.records if "decision" in x]
        changes = {x["adopt_step"]: x for x in decisions if x["kind"] != "keep"}
        adopted = {x["step"] for x in self.records if "adopt_msec" in x}
        return [changes[step] for step in sorted(adopted & {*changes}) if step <= last]


def figures(arm: Side, home: Side, layout: Mapping, cfg: Config) -> dict:
    """Return the figures of an arm beside home's of the same blocks.

    `layout` is that of the arm's first step, and `cfg` its configuration.
    """
    # A block is empty where tiny steps ran on before the run was stopped.
    full = [x for x in zip(arm.blocks, home.blocks) if all(b.num_steps for b in x)]
    pairs = [h.step_sec / a.step_sec for a, h in full]
    bytes_used = budget.most_used(layout, arm.adopted, cfg)
    kinds = [x["kind"] for x in arm.adopted]
    return {
        "sec_per_step": round(arm.step_sec, 5),
        "home_sec_per_step": round(home.step_sec, 5),
        "speedup": round(home.step_sec / arm.step_sec, 4),
        "speedup_of_blocks": spread(pairs),
        "sec_per_step_of_blocks": spread([a.step_sec for a, _ in full]),
        "num_steps": sum(block.num_steps for block in arm.blocks),
        "max_over_mean_p50": pooled_median(arm.steps, "device_max_over_mean"),
        "rb_p50": pooled_median(arm.steps, "home_std_over_std"),
        "dropped_share": statistics.fmean(x["dropped_share"] for x in arm.steps),
        "bytes_of_slots": bytes_used.slots,
        "bytes_of_buffers": bytes_used.buffers,
        "num_swaps": kinds.count("swap"),
        "num_relayouts": kinds.count("relayout"),
        "adopt_sec": _sum_msec(arm.steps, "adopt_msec") / 1e3,
        "adopt_wait_sec": _sum_msec(arm.steps, "adopt_wait_msec") / 1e3,
        "plan_wait_sec": _sum_msec(arm.steps, "plan_wait_msec") / 1e3,
        "parts_sec": parts_sec(arm),
        "prediction": prediction(arm),
    }


def parts_sec(side: Side) -> dict[str, float]:
    """Return where the wall time of a step goes, in seconds by name, mean over steps.

    The cost model's parts come first (moejax.perf.cost_model.StepParts). `adoptions`
    were measured: putting plans in place, and waiting for a plan or a compilation.
    `rest` is what is left: embedding, head, optimizer, what a compilation takes from
    the steps beside it, and the error of the model.
    """
    steps = side.steps
    parts = {
        name: 1e-3 * statistics.fmean(x["modelled_parts_msec"][name] for x in steps)
        for name in steps[0]["modelled_parts_msec"]
    }
    parts["adoptions"] = sum(_adopting_msec(x) for x in steps) / (1e3 * len(steps))
    parts["rest"] = side.step_sec - sum(parts.values())
    return {name: round(sec, 5) for name, sec in parts.items()}


def prediction(side: Side) -> dict:
    """Return how well the cost model predicts the steps that adopted nothing, or all
    where each adopted something (tools/predictions.py)."""
    plain = [x for x in side.steps if "adopt_msec" not in x] or side.steps
    fields = ("step_msec", "modelled_step_msec")
    return predictions.figures(*(np.array([x[f] for x in plain]) for f in fields))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the smallest and the largest of some values."""
    return {
        "p50": round(statistics.median(values), 5),
        "min": round(min(values), 5),
        "max": round(max(values), 5),
    }


def pooled_median(steps: Sequence[Mapping], field: str) -> float | None:
    """Return the median of a field over steps and layers. None where no step has it, or
    where it is infinite, which metrics.jsonl has as null."""
    values = [
        math.inf if value is None else value
        for record in steps
        for value in record.get(field, ())
    ]
    median = statistics.median(values) if values else math.inf
    return round(median, 4) if math.isfinite(median) else None


def compare_losses(arm: Mapping, home: Mapping) -> dict:
    """Return how far an arm's losses are from home's at the same steps, in nats. Both
    are `series`.

    They are equal if step n of the run differs by at most n times LOSS_PER_STEP.
    """
    home_loss = dict(zip(home["step"], home["loss"]))
    apart = {
        step: abs(loss - home_loss[step])
        for step, loss in zip(arm["step"], arm["loss"])
        if step in home_loss
    }
    per_step = max(apart[step] / step for step in apart)
    return {
        "first_apart": apart[min(apart)],
        "last_apart": apart[max(apart)],
        "apart_per_step_max": per_step,
        "equals_home": per_step <= LOSS_PER_STEP,
    }


def series(side: Side) -> dict[str, list]:
    """Return figures of each step: its seconds, device max/mean of the worst layer, and
    the steps that adopted a plan or a layout."""
    return {
        "step": [x["step"] for x in side.steps],
        "sec": [round(x["step_msec"] / 1e3, 5) for x in side.steps],
        "max_over_mean": [max(x["device_max_over_mean"]) for x in side.steps],
        "home_max_over_mean": [
            max(x.get("home_device_max_over_mean", x["device_max_over_mean"]))
            for x in side.steps
        ],
        "dropped_share": [x["dropped_share"] for x in side.steps],
        "loss": [x["loss"] for x in side.steps],
        "adopted": [x["step"] for x in side.steps if "adopt_msec" in x],
    }


def standings(arms: Mapping[str, Mapping], ceiling: str) -> dict[str, dict]:
    """Return the figures of all arms, with `of_forced_balance`: an arm's speedup over
    that of the arm `ceiling`; None until that one has run."""
    top = arms.get(ceiling, {}).get("speedup")
    return {
        name: dict(
            arm,
            of_forced_balance=(
                round(arm["speedup"] / top, 4) if top and arm["speedup"] else None
            ),
        )
        for name, arm in arms.items()
    }


def _take_out_pause(steps: Sequence[dict], block: Block) -> None:
    """Subtract the time for which a run was stopped before a block from the records
    that hold it: that of the block's first step, and that of a wait for a plan or for a
    compilation.

    A run whose step waits for a plan is stopped in this wait, which is told in the
    record of this step or of the next. A wait that holds a pause is at least as long as
    it, and no other is: pauses last for many steps. That before the first block is an
    exception of milliseconds.
    """
    paused_msec = 1e3 * block.paused_sec
    near = [x for x in steps if 0 <= x["step"] - block.first_step <= 1]
    if not near:  # an empty block at the end
        return
    near[0]["step_msec"] -= paused_msec
    waits = [
        (record[field], field, record)
        for record in near
        for field in ADOPTION_FIELDS
        if field in record and record[field] >= paused_msec
    ]
    if waits:
        _, field, record = max(waits, key=lambda wait: wait[0])
        record[field] -= paused_msec


def _adopting_msec(record: Mapping) -> float:
    return sum(record.get(name, 0.0) for name in ADOPTION_FIELDS)


def _sum_msec(steps: Sequence[Mapping], field: str) -> float:
    return round(sum(x.get(field, 0.0) for x in steps), 3)
