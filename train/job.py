"""Make a run's model and data from its configuration, without writing a file.

A configuration that cannot run is refused here, before a run directory is made or
touched: because of too few devices, a transport that the devices cannot run, missing
data, or recorded loads without a file.
"""

import dataclasses
from typing import Any

import jax

from moejax.axes import make_mesh
from moejax.config import Config
from moejax.model.transformer import check_remat
from moejax.moe.layer import check_device
from moejax.perf import target
from moejax.resolve.resolved import Resolved, resolve
from train import data
from train.checkpoint.from_hf import check_folder
from train.checkpoint.identity import FORMAT
from train.launch.program import usable_bytes
from train.step.compiled import make_model
from train.step.ragged import check_ragged
from train.step.step import StepContext, window_sharding


@dataclasses.dataclass(frozen=True)
class Job:
    """The model, devices and data of a run."""

    cfg: Config
    model: StepContext
    corpus: data.Corpus
    batches: data.TrainBatches
    held_out: data.HeldOut
    meta: dict[str, Any]
    """The configuration and the identity of the data, stored with every checkpoint."""
    recorded_sha256: str | None
    """Hash of the recorded routing; None where a router chooses."""
    headers_sha256: str | None = None
    """Hash of the headers of the folder that the run starts from; None where it starts
    from no folder, or goes on from a checkpoint."""

    @property
    def facts(self) -> dict[str, str]:
        """Texts by name that decide the results, beside configuration and program. All
        processes of a run must have the same."""
        data_lines = (
            f"{name} = {value!r}" for name, value in self.meta["data"].items()
        )
        return {
            "data": "\n".join(data_lines),
            "recorded routing": str(self.recorded_sha256),
            "tensors of Model.from_hf": str(self.headers_sha256),
            "calibration": self.model.run.calibration.to_json(),
            "how layers are computed": "\n".join(self.model.run.lines()),
        }

    @property
    def window_sharding(self) -> jax.sharding.NamedSharding:
        """Sharding of a batch's windows over the devices."""
        return window_sharding(self.model.mesh)

    @property
    def unit(self) -> str:
        """The word for one token in messages: 'byte' or 'token'."""
        return "byte" if self.corpus.has_bytes else "token"

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens that one step trains on."""
        return self.cfg.train.batch_size * self.cfg.data.seq_len


def prepare(cfg: Config, *, is_new: bool = False) -> Job:
    """Return the model, devices and data that a configuration asks for.

    The folder of Model.from_hf is checked if `is_new`: the run has no checkpoint whose
    record is whole.
    Raises ValueError or NotImplementedError, with what to do instead, for a
    configuration that cannot run here.
    """
    model = prepare_model(cfg)
    recorded_sha256 = model.run.recorded_sha256()
    starts_from_folder = is_new and cfg.model.from_hf is not None
    headers_sha256 = check_folder(cfg) if starts_from_folder else None
    corpus = data.load_corpus(cfg.data, cfg.model.vocab_size)
    micro = cfg.train.batch_size // cfg.train.accumulate_steps
    eval_batches = cfg.train.eval_batches * cfg.train.accumulate_steps
    return Job(
        cfg=cfg,
        model=model._replace(
            ends=corpus.tokenizer.ends, has_targets=corpus.has_targets
        ),
        corpus=corpus,
        batches=data.TrainBatches(corpus, cfg.data, cfg.train.batch_size),
        held_out=data.HeldOut(corpus, cfg.data, micro, eval_batches),
        meta={
            "format": FORMAT,
            "config": cfg.to_dict(),
            "data": data.identity(corpus, cfg.data, cfg.train.batch_size),
        },
        recorded_sha256=recorded_sha256,
        headers_sha256=headers_sha256,
    )


def prepare_model(cfg: Config) -> StepContext:
    """Return the model on the devices that a configuration asks for, without data.
    Raises as `prepare` does."""
    mesh = make_mesh(cfg.mesh)
    device = mesh.devices.flat[0]
    # All processes must agree, so that no device is asked how many bytes are free. Of
    # devices without a target (moejax/perf/targets), such as CPUs, none are known.
    gpu = target.of_device(device.device_kind)
    run = resolve(cfg, mesh, None if gpu is None else usable_bytes(gpu.memory_bytes))
    model = make_model(run)
    check_device(model.layout, device)
    ragged_lines(run)
    check_remat(cfg.model, device)
    run.check_policy()
    return model


def ragged_lines(run: Resolved) -> list[str]:
    """Return the warnings of the ragged transport for the devices of a run; raise
    ValueError where it is known to go wrong on them (train/step/ragged.py)."""
    return check_ragged(run.mesh_layout, run.mesh.devices.flat[0].platform)
