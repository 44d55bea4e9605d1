"""Sum the loss of any number of windows, and count the load of each expert.

Batches are padded with separators, each a document of its own. No token attends to
them, and their loss is not counted. All of them are routed to the same experts, so
their share of the loads is known and is subtracted.
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
from moejax.resolve.resolved import Resolved
from train.checkpoint.load import LoadedModel
from train.data.tokenizer import Tokenizer
from train.step.loss import token_nats
from train.step.state import model_graph


@dataclasses.dataclass(frozen=True)
class Score:
    """Summed loss and expert loads of the scored windows."""

    nats: float
    """Sum of the losses of all predicted tokens, in nats."""
    num_tokens: int
    """Number of predicted tokens: all but the first of each window."""
    tokens_le: np.ndarray
    """Load of each expert in each MoE layer, by the tokens from which the model
    predicts."""


def score(
    loaded: LoadedModel,
    windows: Iterable[Windows],
    tokenizer: Tokenizer,
    batch_size: int,
) -> Score:
    """Score groups of windows; each window has at most seq_len + 1 tokens.

    A group has at most `batch_size` rows, and is padded to `batch_size`, which is a
    multiple of the number of batch shards.
    """
    cfg, mesh = loaded.cfg, loaded.mesh
    step = _score_step(loaded.run, batch_size)
    batch_sharding = sharding(mesh, BATCH_AXES)

    def report(rows: Windows):
        args = jax.device_put(
            _pad_rows(rows, tokenizer, batch_size, cfg), batch_sharding
        )
        return step(loaded.params, loaded.router_bias, loaded.placement, *args)

    no_rows = Windows(*np.empty((2, 0, 1), np.int32))
    _, padding_le = jax.device_get(report(no_rows))
    nats, num_tokens, num_padding = 0.0, 0, 0
    tokens_le = np.zeros(padding_le.shape, int)
    waiting = None
    for rows in itertools.chain(windows, [None]):
        last, waiting = waiting, None if rows is None else report(rows)
        if last is not None:  # read one batch late, so that the devices do not wait
            batch_nats, batch_le = jax.device_get(last)
            nats, tokens_le = nats + float(batch_nats), tokens_le + batch_le
        if rows is not None:
            num_new = rows.token_bt[:, 1:].size
            num_tokens += num_new
            num_padding += batch_size * cfg.data.seq_len - num_new
    all_padding_le = (
        num_padding * padding_le.astype(int) // (batch_size * cfg.data.seq_len)
    )
    return Score(nats, num_tokens, tokens_le - all_padding_le)


def _score_step(run: Resolved, batch_size: int):
    """Return a jitted step(params, bias, placement, batch, count_b) -> (nats, loads).

    The nats are summed over the first count_b targets of each row.
    """
    # Positions alone mark where documents begin. With documents='joined', the caller's
    # positions have no document start within a window.
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
        args = hidden_btd, network.head(), batch.targets_bt, run.mesh
        nats_bt = token_nats(*args, cfg.train.loss_chunk)
        is_counted_bt = jnp.arange(nats_bt.shape[1]) < count_b[:, None]
        nats = jnp.sum(jnp.where(is_counted_bt, nats_bt, 0.0))
        return nats, jnp.sum(sums.tokens_e, axis=1)

    return jax.jit(step, out_shardings=sharding(run.mesh))


def _pad_rows(rows: Windows, tokenizer: Tokenizer, batch_size: int, cfg: Config):
    """Pad the rows to a Batch of `batch_size` rows of Data.seq_len tokens. Return it
    and the number of real targets in each row."""
    num_rows, width = rows.token_bt.shape
    given, separator = Batch.from_windows(rows, tokenizer.ends), tokenizer.separator
    shape = (batch_size, cfg.data.seq_len)

    def pad(part_bt, value: int) -> np.ndarray:
        padded_bt = np.full(shape, value, np.int32)
        padded_bt[:num_rows, : width - 1] = part_bt
        return padded_bt

    batch = Batch(
        tokens_bt=pad(given.tokens_bt, separator),
        targets_bt=pad(given.targets_bt, separator),
        position_bt=pad(given.position_bt, 0),
    )
    count_b = np.zeros(batch_size, np.int32)
    count_b[:num_rows] = width - 1
    return batch, count_b
