"""Held-out loss: the same windows each time, so figures of two steps compare."""

import dataclasses

import jax
import numpy as np

from train.data import HeldOut
from train.data.feed import feed

SHADES = " .:-=+*#%@"
"""From no load to twice the mean and above."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    loss: float
    """Nats per token."""
    tokens_le: np.ndarray
    """Load of each expert in each MoE layer."""


def evaluate(step, state, placement, held_out: HeldOut, sharding) -> Evaluation:
    """Return the mean over all held-out batches; read the devices once, at the end."""
    reports = []
    for index in range(held_out.num_batches):
        windows = feed(held_out, index, held_out.batch_size, 1, sharding)
        reports.append(step(state.params, state.router_bias, placement, windows))
    nats_i, stats_i = zip(*jax.device_get(reports), strict=True)
    tokens_le = np.sum([stats.tokens_le for stats in stats_i], axis=0)
    return Evaluation(float(np.mean(nats_i)), tokens_le)


def load_lines(tokens_le: np.ndarray) -> list[str]:
    """Return a line per MoE layer: the load of each expert over the mean, as shades."""
    lines = []
    for layer, row_e in enumerate(tokens_le / tokens_le.mean(axis=1, keepdims=True)):
        shades = "".join(SHADES[min(int(x / 2 * len(SHADES)), 9)] for x in row_e)
        least, most = row_e.min(), row_e.max()
        lines.append(f"  layer {layer:2d} |{shades}|  min {least:.2f}  max {most:.2f}")
    return lines
