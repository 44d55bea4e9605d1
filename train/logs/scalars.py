"""The figures of a record of metrics.jsonl as tags with a number each, for trackers."""

from collections.abc import Iterator

import numpy as np

TAGS = {
    "loss": "loss/train",
    "eval_loss": "loss/held_out",
    "total_loss": "loss/total",
    "lr": "optimizer/lr",
    "grad_norm": "optimizer/grad_norm",
    "skipped": "optimizer/skipped",
    "skipped_in_a_row": "optimizer/skipped_in_a_row",
    "tok_per_sec": "speed/tok_per_sec",
    "step_msec": "speed/step_msec",
    "modelled_step_msec": "speed/modelled_step_msec",
    "mfu": "speed/mfu",
    "host_memory_gib": "memory/host_gib",
    "device_memory_gib": "memory/device_gib",
    "peak_device_memory_gib": "memory/peak_device_gib",
    "dropped": "exchange/dropped",
    "dropped_share": "exchange/dropped_share",
    "adopt_msec": "balance/adopt_msec",
    "adopt_wait_msec": "balance/adopt_wait_msec",
    "plan_wait_msec": "balance/plan_wait_msec",
    "modelled_saving_msec": "balance/modelled_saving_msec",
}
MAX_TAGS = {
    "expert_max_over_mean": "load/expert_max_over_mean",
    "device_max_over_mean": "load/device_max_over_mean",
    "home_device_max_over_mean": "load/home_device_max_over_mean",
    "device_max_over_bound": "load/device_max_over_bound",
    "rounds": "exchange/rounds",
    "fullest_pair": "exchange/fullest_pair",
}
"""Tags of fields that have a value for each layer; the largest value is shown.

`expert_max_over_mean` is shown for each layer too."""
MEAN_TAGS = {
    "balance_loss": "loss/balance",
    "sequence_balance_loss": "loss/sequence_balance",
    "router_z_loss": "loss/router_z",
    "mutual_information_loss": "loss/mutual_information",
    "router_entropy": "router/entropy",
    "home_std_over_std": "load/home_std_over_std",
}
SUM_TAGS = {"dead_experts": "router/dead_experts"}
"""Tags of fields that have a count for each layer; the sum is shown."""
DECISION_TAGS = {
    "device_max_over_mean_before": ("balance/device_max_over_mean_before", 1.0),
    "device_max_over_mean_after": ("balance/device_max_over_mean_after", 1.0),
    "num_moves": ("balance/num_moves", 1.0),
    "modelled_gain_sec": ("balance/modelled_gain_msec", 1e3),
    "modelled_cost_sec": ("balance/modelled_cost_msec", 1e3),
}
"""Tag of each field of a decision, and the factor from its unit to the tag's.

A decision to keep shows the ratios alone."""


def scalars(record: dict) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for the fields of a record that are a number or a list of one
    number per layer."""
    for name, value in record.items():
        if name in MAX_TAGS and value:
            yield MAX_TAGS[name], float(max(value))
        elif name in MEAN_TAGS and value:
            yield MEAN_TAGS[name], float(np.mean(value))
        elif name in SUM_TAGS and value:
            yield SUM_TAGS[name], float(np.sum(value))
        elif name != "step" and isinstance(value, bool | int | float):
            yield TAGS.get(name, f"other/{name}"), float(value)
    for layer, ratio in enumerate(record.get("expert_max_over_mean", ())):
        yield f"load_by_layer/{layer:02d}_expert_max_over_mean", float(ratio)
    decision = record.get("decision", {})
    is_kept = decision.get("kind") == "keep"
    for name, (tag, factor) in DECISION_TAGS.items():
        if name in decision and (not is_kept or name.startswith("device_")):
            yield tag, factor * decision[name]
