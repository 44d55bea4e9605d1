"""From device arrays to one record per step: the lines of metrics.jsonl."""

import jax
import numpy as np

from train.step import StepMetrics


def max_over_mean(tokens_le: np.ndarray) -> list[float]:
    """Load of the fullest expert over the mean, by layer; 1.0 is even."""
    mean_l = np.maximum(tokens_le.mean(axis=1), 1e-9)
    return [round(float(x), 4) for x in tokens_le.max(axis=1) / mean_l]


def step_record(step: int, metrics: StepMetrics, step_sec: float, tokens: int) -> dict:
    """One line of metrics.jsonl; `metrics` is read from the devices here."""
    host = jax.device_get(metrics)
    return {
        "step": step,
        "loss": float(host.loss),
        "total_loss": float(host.total_loss),
        "balance_loss": [float(x) for x in host.router.balance],
        "sequence_balance_loss": [float(x) for x in host.router.sequence_balance],
        "router_z_loss": [float(x) for x in host.router.z],
        "grad_norm": float(host.grad_norm),
        "lr": float(host.learning_rate),
        "tok_per_sec": tokens / step_sec,
        "load_max_over_mean": max_over_mean(host.routing.tokens_le),
        "rounds": host.routing.rounds_l.tolist(),
        "fullest_pair": host.routing.fullest_pair_l.tolist(),
        "dropped": int(host.routing.dropped_l.sum()),
        "skipped": bool(host.is_skipped),
        "skipped_in_a_row": int(host.skipped_in_a_row),
        "step_msec": 1e3 * step_sec,
    }
