"""Nats of any number of windows, none of them twice, and the load of each expert.

Batches are filled up with tokens that are documents of their own, each a separator
alone: nothing sees them, their nats do not count, and as all of them go to the same
experts, what they add to the loads is known, and taken off again.
"""

import dataclasses
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.axes import BATCH_AXES, sharding
from moejax.config import Config
from moejax.moe.types import Batch, Windows
from train.checkpoint.load import LoadedModel
from train.resolve.resolved import Resolved
from train.step.loss import token_nats
from train.step.state import model_graph


@dataclasses.dataclass(frozen=True)
class Score:
    nats: float
    """The sum over all predicted tokens."""
    num_tokens: int
    """Predicted tokens: the first of a window is given."""
    tokens_le: np.ndarray
    """Load of each expert in each MoE layer by the tokens that predict."""


def score(
    loaded: LoadedModel, windows: Iterable[Windows], separator: int, batch_size: int
) -> Score:
    """Score windows of at most seq_len + 1 tokens, `batch_size` rows or fewer a group.

    Each group is filled up to `batch_size` rows, a multiple of the batch's shards.
    """
    cfg, mesh = loaded.cfg, loaded.mesh
    step = _score_step(loaded.run, batch_size)
    spread = sharding(mesh, BATCH_AXES)

    def report(rows: Windows):
        args = jax.device_put(_fill(rows, separator, batch_size, cfg), spread)
        return step(loaded.params, loaded.router_bias, loaded.placement, *args)

    nothing = Windows(*np.empty((2, 0, 1), np.int32))
    _, filler_le = jax.device_get(report(nothing))
    nats, num_tokens, num_filled, tokens_le = 0.0, 0, 0, np.zeros(filler_le.shape, int)
    waiting = None
    for rows in itertools.chain(windows, [None]):
        last, waiting = waiting, None if rows is None else report(rows)
        if last is not None:  # a batch late, so that the devices do not wait
            batch_nats, batch_le = jax.device_get(last)
            nats, tokens_le = nats + float(batch_nats), tokens_le + batch_le
        if rows is not None:
            num_new = rows.token_bt[:, 1:].size
            num_tokens += num_new
            num_filled += batch_size * cfg.data.seq_len - num_new
    filled_le = num_filled * filler_le.astype(int) // (batch_size * cfg.data.seq_len)
    return Score(nats, num_tokens, tokens_le - filled_le)


def _score_step(run: Resolved, batch_size: int):
    """step(params, bias, placement, batch, count_b) -> nats of the first count_b
    targets of each row together, loads."""
    # Positions alone say where documents begin; joined ones have none within a window.
    cfg = run.cfg
    data = dataclasses.replace(cfg.data, documents="separate")
    graph = model_graph(
        dataclasses.replace(run, cfg=dataclasses.replace(cfg, data=data))
    )
    layout = run.exact_layout(batch_size, cfg.data.seq_len)

    def step(params, bias, placement, batch, count_b):
        network = nnx.merge(graph, params, bias)
        hidden_btd, sums = network(
            batch.tokens_bt, batch.position_bt, placement, layout
        )
        nats_bt, _ = token_nats(
            hidden_btd, network.head(), batch.targets_bt, cfg.train.loss_chunk
        )
        is_counted_bt = jnp.arange(nats_bt.shape[1]) < count_b[:, None]
        nats = jnp.sum(jnp.where(is_counted_bt, nats_bt, 0.0))
        return nats, jnp.sum(sums.tokens_e, axis=1)

    return jax.jit(step, out_shardings=sharding(run.mesh))


def _fill(rows: Windows, separator: int, batch_size: int, cfg: Config):
    """Return the rows as a Batch, filled up, and how many targets of each row count."""
    num_rows, width = rows.token_bt.shape
    given = Batch.from_windows(rows)
    shape = (batch_size, cfg.data.seq_len)

    def filled(part_bt, value: int) -> np.ndarray:
        whole_bt = np.full(shape, value, np.int32)
        whole_bt[:num_rows, : width - 1] = part_bt
        return whole_bt

    batch = Batch(
        tokens_bt=filled(given.tokens_bt, separator),
        targets_bt=filled(given.targets_bt, separator),
        position_bt=filled(given.position_bt, 0),
    )
    count_b = np.zeros(batch_size, np.int32)
    count_b[:num_rows] = width - 1
    return batch, count_b
