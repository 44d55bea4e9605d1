"""Held-out loss. The windows are the same each time, so losses of two steps compare."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from train.data import HeldOut
from train.data.feed import feed

SHADES = " .:-=+*#%@"
"""Characters for a load from 0 to twice the mean; the last also stands for more."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation on the held-out windows."""

    loss: float
    """Mean loss in nats per token, or per target where windows have these."""
    tokens_le: np.ndarray
    """Number of tokens of each expert in each MoE layer."""


def evaluate(step, state, placement, held_out: HeldOut, sharding) -> Evaluation:
    """Evaluate all held-out batches; read the results from the devices at the end."""
    reports, counts = [], []
    for index in range(held_out.num_batches):
        windows = feed(held_out, index, held_out.batch_size, 1, sharding)
        reports.append(step(state.params, state.router_bias, placement, windows))
        if windows.is_target_bt is not None:
            counts.append(_count_targets(windows.is_target_bt))
    nats_i, stats_i = zip(*jax.device_get(reports), strict=True)
    tokens_le = np.sum([stats.tokens_le for stats in stats_i], axis=0)
    if counts:
        weights = np.array(jax.device_get(counts))
        loss = np.sum(weights * nats_i) / max(1, np.sum(weights))
        return Evaluation(float(loss), tokens_le)
    return Evaluation(float(np.mean(nats_i)), tokens_le)


@jax.jit
def _count_targets(is_target_abt):
    """Return the number of targets of a batch of windows."""
    return jnp.sum(is_target_abt[..., 1:])


def format_expert_loads(tokens_le: np.ndarray) -> list[str]:
    """Return one line per MoE layer that shows each expert's load over the mean.

    Each expert is one character of SHADES. The line ends with the minimum and maximum.
    """
    lines = []
    for layer, row_e in enumerate(tokens_le / tokens_le.mean(axis=1, keepdims=True)):
        shades = "".join(SHADES[min(int(x / 2 * len(SHADES)), 9)] for x in row_e)
        low, high = row_e.min(), row_e.max()
        lines.append(f"  layer {layer:2d} |{shades}|  min {low:.2f}  max {high:.2f}")
    return lines
