"""A step's record and the files a run writes: metrics, plans, attempts, sample ids.

    metrics.jsonl              process 0: one line per step, evaluation or decision
    plans.jsonl                process 0: one line per start, swap and relayout
    attempts.jsonl             process 0: a line at the begin and the end of an attempt
    tensorboard/ and others    a process beside process 0, with --track
    samples-<process>.jsonl    each process, with Data.log_samples: the ids of its rows

When a run resumes, all of them but attempts.jsonl are cut back to the step that it
resumes from. So no file holds a step twice, whatever the number of processes before.
Damaged lines are moved to a file beside, such as metrics.jsonl.damaged, and the lines
after them stay.
"""

import contextlib
import io
import json
import math
import os
import pathlib
from collections.abc import Callable

import jax
import numpy as np

from moejax.config import Config
from moejax.perf import traffic
from train.data import TrainBatches
from train.data.feed import own_rows
from train.files import path_named
from train.launch.processes import from_first_process, is_first
from train.launch.program import say_loudly
from train.logs import attempts, heat_map, plan_lines
from train.logs.record_lines import cut_back
from train.logs.run_dir import RunDir
from train.logs.track.process import TrackersProcess
from train.logs.track.setup import Setup
from train.step.step import StepMetrics


class Records:
    """The open files that a run writes its records to; use as a context."""

    def __init__(
        self,
        run_dir: RunDir,
        cfg: Config,
        step: int,
        tracking: Setup | None = None,
    ) -> None:
        """Open the files after `step`, the last step that is done, and start the
        process of the trackers if `tracking` is given."""
        self._cfg, folder = cfg, run_dir.path
        from_first_process(lambda: _cut_back_samples(folder, step))
        self._files = contextlib.ExitStack()
        self._metrics = self._samples = self._trackers = None
        self._plans = self._attempts = None
        if is_first():
            self._metrics = self._open(folder / "metrics.jsonl")
            self._metrics.cut_back(step)
            self._plans = self._open(folder / plan_lines.FILE)
            self._plans.cut_back(step)
            self._attempts = self._open(folder / attempts.FILE)
            self._attempts.end_torn_line()
        if cfg.data.log_samples:
            self._samples = self._open(folder / f"samples-{jax.process_index()}.jsonl")
        if is_first() and tracking is not None:
            process = TrackersProcess(tracking)
            self._trackers = self._files.enter_context(contextlib.closing(process))

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_) -> None:
        self._files.close()

    def step(self, record: dict, tokens_le: np.ndarray) -> None:
        """Write a step's record. It has the loads of experts (tokens_le) and of devices
        (rows_lw) every Train.log_load_every_steps steps only."""
        if self._trackers is not None:
            self._trackers.append(_tracked(record, tokens_le))
        if record["step"] % self._cfg.train.log_load_every_steps == 0:
            record = record | {"tokens_le": tokens_le}
        else:
            record = {n: value for n, value in record.items() if n != "rows_lw"}
        if self._metrics is not None:
            self._metrics.append(record)

    def event(self, record: dict) -> None:
        """Write a record that is no training step, such as a decision of the
        balancer."""
        if self._metrics is not None:
            self._metrics.append(record)
        if self._trackers is not None:
            self._trackers.append(record)

    def evaluation(self, step: int, loss: float) -> None:
        """Write the held-out loss of a step, unless the file ends with it already.

        That happens if a run was killed between its last save and its summary.
        """
        if self._metrics is None or self._metrics.ends_with(step, "eval_loss"):
            return
        record = {"step": step, "eval_loss": loss}
        self._metrics.append(record)
        if self._trackers is not None:
            self._trackers.append(record)

    def plan(self, record: dict) -> None:
        """Write a line of train/logs/plan_lines.py."""
        if self._plans is not None:
            self._plans.append(record)

    def attempt(self, record: dict) -> None:
        """Write a line of train/logs/attempts.py."""
        if self._attempts is not None:
            self._attempts.append(record)

    def samples(self, step: int, batches: TrainBatches, sharding) -> None:
        """Write which rows of a batch this process fed to a step, and the ids of their
        samples."""
        if self._samples is None:
            return
        train = self._cfg.train
        rows = own_rows(train.batch_size, train.accumulate_steps, sharding)
        ids = [batches.sample_ids(step - 1, row, row + 1)[0] for row in rows]
        self._samples.append({"step": step, "rows": rows, "ids": ids})

    def _open(self, path: pathlib.Path) -> "MetricsLog":
        return self._files.enter_context(MetricsLog(path))


def step_record(step: int, metrics: StepMetrics, step_sec: float, tokens: int) -> dict:
    """Return the record of one step from its metrics, which are on the host.

    It always has `rows_lw`; `Records.step` leaves that out of most lines.
    """
    num_choices = int(metrics.routing.tokens_le.sum())
    return {
        "step": step,
        "loss": float(metrics.loss),
        "total_loss": float(metrics.total_loss),
        "balance_loss": [float(x) for x in metrics.router.balance],
        "sequence_balance_loss": [float(x) for x in metrics.router.sequence_balance],
        "router_z_loss": [float(x) for x in metrics.router.z],
        "mutual_information_loss": [
            float(x) for x in metrics.router.mutual_information
        ],
        "router_entropy": [float(x) for x in metrics.router.entropy],
        "grad_norm": float(metrics.grad_norm),
        "lr": float(metrics.learning_rate),
        "tok_per_sec": tokens / step_sec,
        "expert_max_over_mean": max_over_mean(metrics.routing.tokens_le),
        "dead_experts": (metrics.routing.tokens_le == 0).sum(axis=1).tolist(),
        "device_max_over_mean": max_over_mean(metrics.routing.rows_lw),
        "device_max_over_bound": max_over_bound(
            metrics.routing.fullest_device_l, metrics.routing.bound_l
        ),
        "rows_lw": metrics.routing.rows_lw,
        "rounds": metrics.routing.rounds_l.tolist(),
        "fullest_pair": metrics.routing.fullest_pair_l.tolist(),
        "dropped": int(metrics.routing.dropped_l.sum()),
        "dropped_share": dropped_share(metrics.routing.dropped_l, num_choices),
        "skipped": bool(metrics.is_skipped),
        "skipped_in_a_row": int(metrics.skipped_in_a_row),
        "step_msec": 1e3 * step_sec,
    }


def _tracked(record: dict, tokens_le: np.ndarray) -> dict:
    """Return a step's record for trackers: with the loads of experts where they draw
    them, and without those of devices."""
    tracked = {name: value for name, value in record.items() if name != "rows_lw"}
    is_drawn = record["step"] % heat_map.EVERY_STEPS == 0
    return tracked | ({"tokens_le": tokens_le} if is_drawn else {})


def max_over_mean(load_lx: np.ndarray) -> list[float]:
    """Return the largest load of a layer's experts or devices over their mean, for each
    layer; 1.0 is even."""
    return [round(traffic.max_over_mean(load_x), 4) for load_x in load_lx]


def dropped_share(dropped_l: np.ndarray, num_choices: int) -> float:
    """Return the choices that capacity mode dropped over all choices of experts."""
    return round(int(dropped_l.sum()) / max(num_choices, 1), 6)


def home_std_over_std(home_rows_lw: np.ndarray, rows_lw: np.ndarray) -> list[float]:
    """Return Pro-Prophet's RB (arXiv 2411.10003): the standard deviation of the rows of
    devices under the home placement over that under the plan in use, by layer.

    Each is over the mean of its own devices, so that both may count other devices. It
    is infinite where the plan leaves no deviation, and 1 where there was none before
    either.
    """
    return [
        _ratio(*(np.std(x_w) / max(np.mean(x_w), 1e-9) for x_w in pair))
        for pair in zip(home_rows_lw, rows_lw, strict=True)
    ]


def _ratio(before: float, after: float) -> float:
    """Return before / after; 1 where both are 0."""
    if after == 0:
        return 1.0 if before == 0 else math.inf
    return round(float(before / after), 4)


def max_over_bound(fullest_l: np.ndarray, bound_l: np.ndarray) -> list[float]:
    """Return rows of the fullest device over a lower bound of them, for each layer.

    No split of rows over the plan's replicas leaves the fullest device fewer rows than
    the bound. 1.0 is the best split, in every micro-batch.
    """
    return [round(float(x), 4) for x in fullest_l / np.maximum(bound_l, 1)]


class MetricsLog:
    """A file with one JSON object per line, each with an int `step` that never falls.

    When `append` returns, the whole line has been handed to the operating system. A
    full disk costs lines, with a message on standard error, but does not end the run.
    """

    def __init__(
        self, path: str | os.PathLike, *, say: Callable[[str], None] = say_loudly
    ) -> None:
        self._path = pathlib.Path(path)
        self._say = say
        self._num_lost = 0
        self._last: dict = {}
        self._file = io.FileIO(self._path, "ab")

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def cut_back(self, step: int) -> None:
        """Remove the lines after `step` and a torn last line, and move damaged lines to
        a file beside, as `record_lines.cut_back` does."""
        self._last = cut_back(self._path, step, self._say)
        self._file.close()  # the file may be another one now
        self._file = io.FileIO(self._path, "ab")

    def end_torn_line(self) -> None:
        """End a last line that a kill has cut off, so that it damages no other one."""
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            is_torn = file.read(1) not in (b"", b"\n")
        if is_torn:
            self._file.write(b"\n")

    def ends_with(self, step: int, name: str) -> bool:
        """Return whether the file's last line is a record of this step with a field
        `name`."""
        return self._last.get("step") == step and name in self._last

    def append(self, record: dict) -> None:
        """Write one line. NaN and infinities become null, and NumPy values plain
        numbers and lists."""
        assert isinstance(record["step"], int), record
        line = json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError("no space left for a whole line")
        except OSError as fault:
            if os.fstat(self._file.fileno()).st_size != end:
                with path_named(self._path):
                    self._file.truncate(end)
            self._num_lost += 1
            if self._num_lost == 1:
                self._say(
                    f"METRICS NOT WRITTEN from step {record['step']} on: {fault}: "
                    f"{self._path}; training goes on, and the lines are lost"
                )
        else:
            self._last = record
            if self._num_lost:
                self._say(f"metrics are written again, without {self._num_lost} lines")
            self._num_lost = 0

    def close(self) -> None:
        """Return when the lines are on the disk, or a message says that they may be
        lost."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as fault:
            self._say(f"METRICS MAY BE LOST: {fault}: {self._path}")
        self._file.close()


def _plain(value):
    """Return a value that JSON can express: NaN and infinities become None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _cut_back_samples(folder: pathlib.Path, step: int) -> None:
    """Cut back the sample files of all earlier processes, for a run may go on with
    fewer."""
    for path in folder.glob("samples-*.jsonl"):
        with MetricsLog(path) as log:
            log.cut_back(step)
