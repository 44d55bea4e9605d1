"""Speeds that a run's predictions use: those of a calibration, else the stated rates of
its GPUs, else presumed ones."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator

from moejax.balance.overflows import Prices
from moejax.config import Config
from moejax.model.flops import flops_per_token
from moejax.model.parameters import trains_experts
from moejax.perf.calibration import Calibration, check, read_calibration
from moejax.perf.cluster import Cluster
from moejax.perf.cost_model import NOTES, CostModel, cost_model
from moejax.perf.stated import COLLECTIVES, COMPILE_SEC, cluster_calibration
from moejax.plan.layout import ITEMSIZE, Topology
from moejax.resolve.partition import micro_batch_tokens

LOOP_SEC = 20e-6
"""Presumed time for which the host waits at a loop on a GPU: a copy of the condition to
the host, and the launches that could not be queued meanwhile. It is not measured."""


def make_cost_model(cfg: Config, calibration: Calibration) -> CostModel:
    """Return the cost model of this model's sizes at the calibration's speeds. Raises
    ValueError, with the file's name, where it lacks a line."""
    with naming(cfg.balance.calibration):
        cost = cost_model(
            calibration,
            d_model=cfg.model.d_model,
            d_expert=cfg.moe.d_expert // cfg.expert_shards,
            itemsize=ITEMSIZE[cfg.model.compute_dtype],
            micro_batches=cfg.train.accumulate_steps,
            other_flops_per_device=other_flops_per_device(cfg),
            remat=cfg.model.repeats,
            group=cfg.dispatch.group_axes,
            tokens=micro_batch_tokens(cfg),
            bytes_per_moved_weight=_bytes_per_moved_weight(cfg),
        )
    return dataclasses.replace(cost, loop_sec=LOOP_SEC)


def _bytes_per_moved_weight(cfg: Config) -> int:
    """Return the bytes of an expert's weight and its moments, as they rest."""
    if not trains_experts(cfg.network, cfg.optimizer):
        return ITEMSIZE["float32"]
    moments = ITEMSIZE[cfg.optimizer.mu_dtype]
    if cfg.optimizer.name == "adamw":
        moments += ITEMSIZE["float32"]
    return ITEMSIZE["float32"] + moments


def make_overflow_prices(cfg: Config, cost: CostModel) -> Prices:
    """Return the prices of loop-free and exact steps. The time of a step is that of its
    FLOPs alone, so that an overflow costs no less than this."""
    tokens = cfg.train.batch_size * cfg.data.seq_len
    flops = flops_per_token(cfg.network).train * tokens / cfg.mesh.num_devices
    return Prices(
        step_sec=flops / cost.flops_per_sec,
        loops_sec=cost.loops_sec(cfg.model.num_moe_layers),
    )


def load_calibration(
    cfg: Config, device_kind: str | None = None, cluster: Cluster | None = None
) -> Calibration:
    """Return the calibration of Balance.calibration, or else `unmeasured` speeds: those
    that are stated for `cluster`, or presumed ones.

    Raises ValueError where it was measured on another mesh, in another dtype or, if
    `device_kind` is given, on another kind of device.
    """
    if cfg.balance.calibration is None:
        return unmeasured(cfg.mesh, device_kind or "any device", cluster)
    with naming(cfg.balance.calibration):
        calibration = read_calibration(_find_file(cfg.balance.calibration))
        kind = calibration.device_kind if device_kind is None else device_kind
        check(calibration, dataclasses.asdict(cfg.mesh), kind, cfg.model.compute_dtype)
    return calibration


@contextlib.contextmanager
def naming(calibration: str | None) -> Iterator[None]:
    """Put the name of the calibration's file before the errors of a block."""
    try:
        yield
    except ValueError as error:
        if calibration is None:
            raise
        raise ValueError(f"Balance.calibration={calibration!r}: {error}") from error


def unmeasured(
    mesh: Topology, device_kind: str, cluster: Cluster | None
) -> Calibration:
    """Return a calibration of the rates that are stated for a cluster; of presumed
    speeds where none are stated for the devices, as for CPUs."""
    if cluster is not None:
        return cluster_calibration(cluster, mesh)
    return presumed(dataclasses.asdict(mesh), device_kind)


def presumed(mesh_sizes: dict[str, int], device_kind: str) -> Calibration:
    """Return a calibration with the speeds of moejax.perf.cost_model.NOTES on every
    mesh axis."""
    line = {"latency_sec": 0.0, "bytes_per_sec": NOTES.bytes_per_sec, "r2": 1.0}
    return Calibration(
        device_kind=device_kind,
        mesh=mesh_sizes,
        compute_dtype="bfloat16",
        collectives={name: dict.fromkeys(mesh_sizes, line) for name in COLLECTIVES},
        flops_per_sec=NOTES.flops_per_sec,
        matmul_r2=1.0,
        compile_sec=COMPILE_SEC,
        when="presumed",
    )


def other_flops_per_device(cfg: Config) -> float:
    """Return the forward FLOPs of a block without its routed experts, on one device in
    one micro-batch."""
    flops = flops_per_token(cfg.network)
    rest = flops.attention_projections + flops.attention_scores + flops.shared
    tokens = cfg.train.batch_size * cfg.data.seq_len / cfg.train.accumulate_steps
    devices = cfg.mesh.num_batch_shards * cfg.mesh.tensor
    return rest / cfg.model.num_layers * tokens / devices


def _find_file(path: str) -> pathlib.Path:
    """Return a path relative to the working directory or, if there is no such file,
    relative to the folder that holds train/, as the shipped configs need it."""
    here = pathlib.Path(path)
    return here if os.path.exists(here) else pathlib.Path(__file__).parents[2] / path
