"""From device arrays to one record per step: the lines of metrics.jsonl."""

import numpy as np

from moejax.perf import traffic
from train.step.step import StepMetrics


def max_over_mean(load_lx: np.ndarray) -> list[float]:
    """The fullest expert or device over the mean, by layer; 1.0 is even."""
    return [round(traffic.max_over_mean(load_x), 4) for load_x in load_lx]


def max_over_bound(fullest_l: np.ndarray, bound_l: np.ndarray) -> list[float]:
    """The fullest device over what no split of the plan could go below, by layer; 1.0
    is the best split, in every micro-batch."""
    return [round(float(x), 4) for x in fullest_l / np.maximum(bound_l, 1)]


def step_record(step: int, metrics: StepMetrics, step_sec: float, tokens: int) -> dict:
    """One line of metrics.jsonl, of metrics that are on the host; `rows_lw` stands in
    the log every so many steps only."""
    return {
        "step": step,
        "loss": float(metrics.loss),
        "total_loss": float(metrics.total_loss),
        "balance_loss": [float(x) for x in metrics.router.balance],
        "sequence_balance_loss": [float(x) for x in metrics.router.sequence_balance],
        "router_z_loss": [float(x) for x in metrics.router.z],
        "mutual_information_loss": [
            float(x) for x in metrics.router.mutual_information
        ],
        "grad_norm": float(metrics.grad_norm),
        "lr": float(metrics.learning_rate),
        "tok_per_sec": tokens / step_sec,
        "load_max_over_mean": max_over_mean(metrics.routing.tokens_le),
        "device_max_over_mean": max_over_mean(metrics.routing.rows_lw),
        "max_over_bound": max_over_bound(
            metrics.routing.fullest_device_l, metrics.routing.bound_l
        ),
        "rows_lw": metrics.routing.rows_lw,
        "rounds": metrics.routing.rounds_l.tolist(),
        "fullest_pair": metrics.routing.fullest_pair_l.tolist(),
        "dropped": int(metrics.routing.dropped_l.sum()),
        "skipped": bool(metrics.is_skipped),
        "skipped_in_a_row": int(metrics.skipped_in_a_row),
        "step_msec": 1e3 * step_sec,
    }
