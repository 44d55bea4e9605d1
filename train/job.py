"""What a run works with, from its configuration alone: no file is written.

Whatever can be refused is refused here, before a run directory is made or touched: too
few devices, a transport that cannot run, missing data, loads without a file.
"""

import dataclasses
from typing import Any

import jax

from moejax.axes import make_mesh
from moejax.config import Config
from moejax.moe import recorded
from moejax.moe.layer import check_device
from moejax.resolve.resolved import resolve
from train import data
from train.checkpoint.identity import FORMAT
from train.step.compiled import make_model
from train.step.step import StepContext, window_sharding


@dataclasses.dataclass(frozen=True)
class Job:
    """Model, devices and data of a run."""

    cfg: Config
    model: StepContext
    corpus: data.Corpus
    batches: data.TrainBatches
    held_out: data.HeldOut
    meta: dict[str, Any]
    """Configuration and data identity, stored with every checkpoint."""

    @property
    def window_sharding(self) -> jax.sharding.NamedSharding:
        return window_sharding(self.model.mesh)

    @property
    def unit(self) -> str:
        """What a token is."""
        return "byte" if self.corpus.has_bytes else "token"

    @property
    def tokens_per_step(self) -> int:
        return self.cfg.train.batch_size * self.cfg.data.seq_len


def prepare(cfg: Config) -> Job:
    """Raises ValueError and NotImplementedError, each with what to do instead."""
    run = resolve(cfg, make_mesh(cfg.mesh))
    model = make_model(run)
    check_device(model.layout, model.mesh.devices.flat[0])
    run.check_policy()
    if cfg.router.kind == "recorded":
        sizes = (cfg.model.num_moe_layers, cfg.moe.num_experts, cfg.moe.top_k)
        recorded.loads(cfg.recorded, *sizes)
    corpus = data.load_corpus(cfg.data, cfg.model.vocab_size)
    micro = cfg.train.batch_size // cfg.train.accumulate_steps
    eval_batches = cfg.train.eval_batches * cfg.train.accumulate_steps
    return Job(
        cfg=cfg,
        model=model,
        corpus=corpus,
        batches=data.TrainBatches(corpus, cfg.data, cfg.train.batch_size),
        held_out=data.HeldOut(corpus, cfg.data, micro, eval_batches),
        meta={
            "format": FORMAT,
            "config": cfg.to_dict(),
            "data": data.identity(corpus, cfg.data, cfg.train.batch_size),
        },
    )
