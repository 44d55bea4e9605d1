"""A step's record and the files a run writes: metrics, plans, attempts, sample ids.

    metrics.jsonl              process 0: one line per step, evaluation or decision
    plans.jsonl                process 0: one line per start, swap and relayout
    loads.jsonl                process 0, with Train.log_sources: loads by source device
    attempts.jsonl             process 0: a line at the begin and the end of an attempt
    tensorboard/ and others    process 0, with --track (train/logs/trackers.py)
    samples-<process>.jsonl    each process, with Data.log_samples: the ids of its rows

When a run resumes, all of them but attempts.jsonl are cut back to the step that it
resumes from. So no file holds a step twice, whatever the number of processes before.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from moejax.config import Config
from moejax.perf import traffic
from moejax.plan.layout import Topology
from train.data import TrainBatches
from train.data.feed import own_rows
from train.launch.processes import from_first_process, is_first
from train.logs import plan_lines
from train.logs.record_lines import LOADS, MetricsLog
from train.logs.trackers import Trackers
from train.messages import one_line
from train.step.step import StepMetrics

GIB = 2**30
STATM = pathlib.Path("/proc/self/statm")
"""File in which Linux counts the pages of a process: the second is those in memory."""


class Records:
    """The open files that a run writes its records to; use as a context."""

    def __init__(
        self,
        folder: pathlib.Path,
        cfg: Config,
        step: int,
        attempt: int,
        begun_at: float,
        track: tuple[str, ...] = (),
        config_text: str = "",
    ) -> None:
        """Open the files in a run directory after `step`, the last step that is done,
        and start the trackers that `track` names.

        The attempt has the number `attempt`, from 1, and began `begun_at` seconds after
        1970.
        """
        self._cfg, self._files = cfg, contextlib.ExitStack()
        self._last_step, self._attempt, self._begun_at = step, attempt, begun_at
        self._metrics = self._plans = self._attempts = self._loads = None
        self._samples = self._trackers = None
        from_first_process(lambda: _cut_back_samples(folder, step))
        if is_first():
            self._metrics = self._open(folder / "metrics.jsonl")
            if track:
                trackers = Trackers(track, folder, step, cfg, config_text)
                self._trackers = self._files.enter_context(trackers)
            self._metrics.cut_back(step)
            self._plans = self._open(folder / plan_lines.FILE)
            self._plans.cut_back(step)
            self._attempts = self._open(folder / "attempts.jsonl")
            if cfg.train.log_sources:
                self._loads = self._open(folder / LOADS)
                self._loads.cut_back(step)
        if cfg.data.log_samples:
            self._samples = self._open(folder / f"samples-{jax.process_index()}.jsonl")

    def __enter__(self) -> "Records":
        """Write where the attempt begins."""
        if self._attempts is not None:
            mesh = self._cfg.mesh
            line = attempt_line(self._last_step, self._attempt, self._begun_at, mesh)
            self._attempts.append(line)
        return self

    def __exit__(self, kind, fault, _) -> None:
        """Write how the attempt ended, and close the files: finished after the last
        step, stopped before it, failed with an error."""
        is_last = self._last_step >= self._cfg.train.num_steps
        end, why = "finished" if is_last else "stopped", ""
        if fault is not None:
            end, why = "failed", one_line(fault) or kind.__name__
        with self._files:
            if self._attempts is not None:
                line = {"step": self._last_step, "attempt": self._attempt}
                line |= {"at": time.time(), "end": end, "why": why}
                self._attempts.append(line)

    def step(
        self, record: dict, tokens_le: np.ndarray, sources: Callable[[], np.ndarray]
    ) -> None:
        """Write a step's record. Every Train.log_load_every_steps steps it has the
        loads of experts (tokens_le) and of devices (rows_lw), and loads.jsonl those of
        experts by source device, load_lwe, which `sources` returns."""
        self._last_step = step = record["step"]
        if step % self._cfg.train.log_load_every_steps == 0:
            record = record | {"tokens_le": tokens_le}
            if self._loads is not None:
                self._loads.append({"step": step, "load_lwe": sources()})
        else:
            record = {n: value for n, value in record.items() if n != "rows_lw"}
        self.event(record)

    def event(self, record: dict) -> None:
        """Write a record to the metrics and the trackers, such as a decision of the
        balancer. It must not change any more."""
        if self._metrics is not None:
            self._metrics.append(record)
        if self._trackers is not None:
            self._trackers.append(record)

    def evaluation(self, step: int, loss: float) -> None:
        """Write the held-out loss of a step, unless the file ends with it already.

        That happens if a run was killed between its last save and its summary.
        """
        if self._metrics is not None and not self._metrics.ends_with(step, "eval_loss"):
            self.event({"step": step, "eval_loss": loss})

    def plan(self, record: dict) -> None:
        """Write a line of train/logs/plan_lines.py."""
        if self._plans is not None:
            self._plans.append(record)

    def samples(self, step: int, batches: TrainBatches, sharding) -> None:
        """Write which rows of a batch this process fed to a step, and the ids of their
        samples."""
        if self._samples is None:
            return
        train = self._cfg.train
        rows = own_rows(train.batch_size, train.accumulate_steps, sharding)
        ids = [batches.sample_ids(step - 1, row, row + 1)[0] for row in rows]
        self._samples.append({"step": step, "rows": rows, "ids": ids})

    def _open(self, path: pathlib.Path) -> MetricsLog:
        return self._files.enter_context(MetricsLog(path))


def attempt_line(step: int, attempt: int, begun_at: float, mesh: Topology) -> dict:
    """Return the line of an attempt that goes on after `step`, and began `begun_at`
    seconds after 1970."""
    try:
        version = importlib.metadata.version("moejax")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return {
        "step": step,
        "attempt": attempt,
        "at": begun_at,
        "moejax": version,
        "jax": jax.__version__,
        "num_processes": jax.process_count(),
        "num_devices": mesh.num_devices,
        "device_kind": jax.local_devices()[0].device_kind,
        "mesh": dataclasses.asdict(mesh),
    }


def step_record(step: int, metrics: StepMetrics, step_sec: float, tokens: int) -> dict:
    """Return the record of one step from its metrics, which are on the host.

    It always has `rows_lw`; `Records.step` leaves that out of most lines.
    """
    router, routing = metrics.router, metrics.routing
    num_choices = max(int(routing.tokens_le.sum()), 1)
    num_dropped = int(routing.dropped_l.sum())
    over_bound_l = routing.fullest_device_l / np.maximum(routing.bound_l, 1)
    return {
        "step": step,
        "loss": float(metrics.loss),
        "total_loss": float(metrics.total_loss),
        "balance_loss": [float(x) for x in router.balance],
        "sequence_balance_loss": [float(x) for x in router.sequence_balance],
        "router_z_loss": [float(x) for x in router.z],
        "mutual_information_loss": [float(x) for x in router.mutual_information],
        "router_entropy": [float(x) for x in router.entropy],
        "grad_norm": float(metrics.grad_norm),
        "lr": float(metrics.learning_rate),
        "tok_per_sec": tokens / step_sec,
        "expert_max_over_mean": max_over_mean(routing.tokens_le),
        "dead_experts": (routing.tokens_le == 0).sum(axis=1).tolist(),
        "device_max_over_mean": max_over_mean(routing.rows_lw),
        # 1.0 is the best split of rows over the plan's replicas, in each micro-batch.
        "device_max_over_bound": [round(float(x), 4) for x in over_bound_l],
        "rows_lw": routing.rows_lw,
        "rounds": routing.rounds_l.tolist(),
        "fullest_pair": routing.fullest_pair_l.tolist(),
        "dropped": num_dropped,
        "dropped_share": round(num_dropped / num_choices, 6),
        "skipped": bool(metrics.is_skipped),
        "skipped_in_a_row": int(metrics.skipped_in_a_row),
        "step_msec": 1e3 * step_sec,
    }


def memory_fields(devices: Sequence[jax.Device]) -> dict[str, float | None]:
    """Return the fields of a step's record that are about memory, in GiB: that of this
    process, and of the fullest of its devices now and at most so far.

    A figure that the system or the backend does not have is None, as for CPUs.
    """
    stats = [found for device in devices if (found := device.memory_stats())]

    def fullest_gib(name: str) -> float | None:
        sizes = [found[name] for found in stats if name in found]
        return round(max(sizes) / GIB, 4) if sizes else None

    host_gib = None
    if STATM.exists():
        num_pages = int(STATM.read_text().split()[1])
        host_gib = round(num_pages * os.sysconf("SC_PAGESIZE") / GIB, 4)
    return {
        "host_memory_gib": host_gib,
        "device_memory_gib": fullest_gib("bytes_in_use"),
        "peak_device_memory_gib": fullest_gib("peak_bytes_in_use"),
    }


def max_over_mean(load_lx: np.ndarray) -> list[float]:
    """Return the largest load of a layer's experts or devices over their mean, for each
    layer; 1.0 is even."""
    return [round(traffic.max_over_mean(load_x), 4) for load_x in load_lx]


def home_std_over_std(home_rows_lw: np.ndarray, rows_lw: np.ndarray) -> list[float]:
    """Return Pro-Prophet's RB (arXiv 2411.10003): the standard deviation of the rows of
    devices under the home placement over that under the plan in use, by layer.

    Each is over the mean of its own devices, so that both may count other devices. It
    is infinite where the plan leaves no deviation, and 1 where there was none before
    either.
    """
    ratios = []
    for pair in zip(home_rows_lw, rows_lw, strict=True):
        before, after = (np.std(x_w) / max(np.mean(x_w), 1e-9) for x_w in pair)
        if after:
            ratios.append(round(float(before / after), 4))
        else:
            ratios.append(math.inf if before else 1.0)
    return ratios


def _cut_back_samples(folder: pathlib.Path, step: int) -> None:
    """Cut back the sample files of all earlier processes, for a run may go on with
    fewer."""
    for path in folder.glob("samples-*.jsonl"):
        with MetricsLog(path) as log:
            log.cut_back(step)
