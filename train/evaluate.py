"""Held-out loss: the same windows each time, so figures of two steps compare."""

import dataclasses

import jax
import numpy as np

from train.data import HeldOut
from train.feed import feed


@dataclasses.dataclass(frozen=True)
class Evaluation:
    loss: float
    """Nats per token."""
    tokens_le: np.ndarray
    """Load of each expert in each MoE layer."""


def evaluate(step, state, placement, held_out: HeldOut, sharding) -> Evaluation:
    """Mean over all held-out batches, read from the devices once at the end."""
    reports = []
    for index in range(held_out.num_batches):
        window_abt = feed(held_out, index, held_out.batch_size, 1, sharding)
        reports.append(step(state.params, state.router_bias, placement, window_abt))
    nats_i, stats_i = zip(*jax.device_get(reports), strict=True)
    tokens_le = np.sum([stats.tokens_le for stats in stats_i], axis=0)
    return Evaluation(float(np.mean(nats_i)), tokens_le)
