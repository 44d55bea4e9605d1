"""Write a run directory with two checkpoints of an untrained toy model."""

import functools
import pathlib
import tempfile

import jax
import numpy as np

from moejax.axes import sharding
from tests.support.run_main import TOY, corpus
from train.checkpoint.checkpoints import Checkpointer
from train.config import gin_reader
from train.job import prepare
from train.step.state import init_state

STEPS = (3, 7)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="saved-")


@functools.cache
def saved_run() -> pathlib.Path:
    """Return a saved run that tests share, and that none may change."""
    return save_run(pathlib.Path(_folder().name))


def save_run(folder: pathlib.Path, *params: str) -> pathlib.Path:
    """Save two checkpoints of the toy configuration with `params`, and return the
    folder.

    All parameters of the older checkpoint are zero. Those of the newer are three times
    their initial values, so that logits differ by more than the order of summation.
    One round carries every row, so that programs that read the run compile less.
    """
    own = (f"Data.corpus = '{corpus()}'", "Dispatch.buffer_factor = 16.0")
    cfg = gin_reader.load([TOY], (*own, *params))
    job = prepare(cfg)
    mesh = job.model.mesh
    state = init_state(job.model.run, job.model.optimizer)
    random = np.random.default_rng(0)
    bias = jax.tree.map(
        lambda leaf: jax.device_put(
            random.uniform(0, 0.1, leaf.shape).astype(np.float32), sharding(mesh)
        ),
        state.router_bias,
    )
    larger = jax.tree.map(lambda leaf: 3 * leaf, state.params)
    states = (
        state.replace(params=jax.tree.map(lambda leaf: 0 * leaf, state.params)),
        state.replace(params=larger, router_bias=bias),
    )
    checkpointer = Checkpointer(folder / "checkpoints", cfg.checkpoint)
    for step, each in zip(STEPS, states):
        checkpointer.save(step, each, job.meta)
    checkpointer.close()
    return folder
