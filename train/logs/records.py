"""What a run writes while it goes: metrics, TensorBoard's events, ids of samples.

    metrics.jsonl              process 0: a line a step, an evaluation, a decision
    tensorboard/               process 0, when asked for
    samples-<process>.jsonl    each process, with Data.log_samples: the ids of its rows

All are cut back to the step that a run resumes from, so that no step stands in one
twice, whatever the number of processes before.
"""

import contextlib
import pathlib

import numpy as np

from moejax.config import Config
from train.data import TrainBatches
from train.data.feed import own_rows
from train.launch.processes import is_first, of_first
from train.logs.run_dir import MetricsLog, RunDir


class Records:
    """The open files; use as a context."""

    def __init__(
        self,
        run_dir: RunDir,
        cfg: Config,
        step: int,
        board_text: str | None = None,
    ) -> None:
        """`step` is the last one done; `board_text` goes to TensorBoard, which only
        exists with one."""
        self._cfg, folder = cfg, run_dir.path
        of_first(lambda: _cut_back_samples(folder, step))
        self._files = contextlib.ExitStack()
        self._metrics = self._samples = self._tensorboard = None
        if is_first():
            self._metrics = self._open(folder / "metrics.jsonl")
            self._metrics.cut_back(step)
        if cfg.data.log_samples:
            self._samples = self._open(folder / f"samples-{process_index()}.jsonl")
        if is_first() and board_text is not None:
            from train.logs.tensorboard import TensorBoard

            board = TensorBoard(folder / "tensorboard", board_text, step)
            self._tensorboard = self._files.enter_context(contextlib.closing(board))

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_) -> None:
        self._files.close()

    def step(self, record: dict, tokens_le: np.ndarray) -> None:
        """A step's record; the loads of its experts and devices, tokens_le and rows_lw,
        stand in the log every so many steps."""
        if self._tensorboard is not None:
            self._tensorboard.append(record, tokens_le)
        if record["step"] % self._cfg.train.log_load_every_steps == 0:
            record = record | {"tokens_le": tokens_le}
        else:
            record = {n: value for n, value in record.items() if n != "rows_lw"}
        if self._metrics is not None:
            self._metrics.append(record)

    def event(self, record: dict) -> None:
        """A line of its own: a decision of the balancer."""
        if self._metrics is not None:
            self._metrics.append(record)
        if self._tensorboard is not None:
            self._tensorboard.append(record)

    def evaluation(self, step: int, loss: float) -> None:
        """A run that was killed between its last save and its summary has logged it."""
        if self._metrics is None or self._metrics.ends_with(step, "eval_loss"):
            return
        record = {"step": step, "eval_loss": loss}
        self._metrics.append(record)
        if self._tensorboard is not None:
            self._tensorboard.append(record)

    def samples(self, step: int, batches: TrainBatches, sharding) -> None:
        """The rows that this process fed to step `step`, and which samples they are."""
        if self._samples is None:
            return
        train = self._cfg.train
        rows = own_rows(train.batch_size, train.accumulate_steps, sharding)
        ids = [batches.sample_ids(step - 1, row, row + 1)[0] for row in rows]
        self._samples.append({"step": step, "rows": rows, "ids": ids})

    def _open(self, path: pathlib.Path) -> MetricsLog:
        return self._files.enter_context(MetricsLog(path))


def process_index() -> int:
    import jax

    return jax.process_index()


def _cut_back_samples(folder: pathlib.Path, step: int) -> None:
    """Those of all processes that there have been: fewer may go on."""
    for path in folder.glob("samples-*.jsonl"):
        with MetricsLog(path) as log:
            log.cut_back(step)
