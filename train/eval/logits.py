"""Compute the logits of whole texts, a few rows at a time, into a file."""

import pathlib
import secrets
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.axes import BATCH_AXES, sharding
from train.checkpoint.load import LoadedModel
from train.files import path_named, replace
from train.step.state import model_graph


def write_logits(path: pathlib.Path, loaded: LoadedModel, ids_bt: np.ndarray) -> None:
    """Write the logits of token ids to a .npy file, float32 [b, t, v].

    The file appears when it is whole.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    shape = (*ids_bt.shape, loaded.cfg.model.vocab_size)
    try:
        with path_named(path):
            out = np.lib.format.open_memmap(partial, "w+", np.float32, shape)
            for first, logits_btv in logits_by_rows(loaded, ids_bt):
                out[first : first + len(logits_btv)] = logits_btv
            out.flush()
            del out
            replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def logits_by_rows(
    loaded: LoadedModel, ids_bt: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield rows of logits, float32 [rows, t, v], with the number of the first row.

    Each row of ids is a document, whose positions begin at 0. As many rows as the batch
    has shards are computed at a time.
    """
    mesh, num_rows = loaded.mesh, loaded.cfg.mesh.num_batch_shards
    compute = _program(loaded, num_rows, ids_bt.shape[1])
    position_bt = np.tile(np.arange(ids_bt.shape[1], dtype=np.int32), (num_rows, 1))
    for first in range(0, len(ids_bt), num_rows):
        given_bt = ids_bt[first : first + num_rows].astype(np.int32)
        token_bt = np.zeros((num_rows, ids_bt.shape[1]), np.int32)
        token_bt[: len(given_bt)] = given_bt
        rows = jax.device_put((token_bt, position_bt), sharding(mesh, BATCH_AXES))
        weights = loaded.params, loaded.router_bias, loaded.placement
        # GPUs multiply float32 with fewer bits if they may.
        with jax.default_matmul_precision("highest"):
            logits_btv = compute(*weights, *rows)
        yield first, np.asarray(logits_btv)[: len(given_bt)]


def _program(loaded: LoadedModel, num_rows: int, width: int):
    """Return the jitted function from weights, tokens and positions to logits."""
    run, graph = loaded.run, model_graph(loaded.run)
    layout = run.exact_layout(num_rows, width)

    def compute(params, bias, placement, token_bt, position_bt):
        network = nnx.merge(graph, params, bias)
        hidden_btd, _ = network(token_bt, position_bt, placement, layout)
        return jnp.einsum(
            "btd,vd->btv",
            hidden_btd,
            network.whole_head(),
            preferred_element_type=jnp.float32,
        )

    return jax.jit(compute, out_shardings=sharding(run.mesh))
