"""Arrays of the metrics of a run, read line by line from metrics.jsonl.

Letters in names: n training steps, m evaluations, q steps whose loads were recorded
(separate ones for experts and for devices), l layers, e experts, w devices.
"""

import dataclasses
import itertools
import pathlib
import re
import sys

import numpy as np

from moejax.perf.traffic import over_mean
from train.logs.record_lines import lines, parse_line

MAX_LOADS = 800
"""Maximum number of tables of loads that are kept. A longer run keeps only every
second, fourth, .. table."""


@dataclasses.dataclass(frozen=True)
class Adoption:
    """A plan (swap) or a layout (relayout) that the balancer put in place."""

    step: int
    """First step under the new plan or layout."""
    kind: str
    """Either 'swap' or 'relayout'."""
    collected_step: int
    changes: str
    """Main change of the layout, as 'slots 2→3'; empty for a swap."""


@dataclasses.dataclass(frozen=True)
class RunArrays:
    """Arrays of a run's metrics.jsonl. A value is NaN if it is missing or was not
    finite."""

    name: str
    step_n: np.ndarray
    loss_n: np.ndarray
    tok_per_sec_n: np.ndarray
    step_msec_n: np.ndarray
    ratio_nl: np.ndarray
    """Load of the fullest expert over the mean, by step and layer."""
    device_ratio_nl: np.ndarray
    """Rows of the fullest device over the mean, by step and layer."""
    eval_step_m: np.ndarray
    eval_loss_m: np.ndarray
    load_step_q: np.ndarray
    load_qle: np.ndarray
    """Load of each expert over the mean, at the steps that recorded tokens_le."""
    rows_step_q: np.ndarray
    rows_qlw: np.ndarray
    """Rows of each device over the mean, at the steps that recorded rows_lw."""
    adoptions: tuple[Adoption, ...]
    """Adoptions by step: the decisions whose adopting step was logged too."""
    save_every_steps: int | None
    """Steps between two checkpoints by config.gin; None if it does not say."""
    act_above: float | None
    """Device max/mean above which the balancer acts, by config.gin; None without a
    balancer."""
    num_bad_lines: int


def read_run(folder: pathlib.Path) -> RunArrays:
    """Read the metrics of a run directory line by line. A step that was logged twice
    counts as it was written last.

    Raises ValueError for a folder whose metrics.jsonl is missing, holds no step, or
    consists mostly of damaged lines.
    """
    path = folder / "metrics.jsonl"
    require_run(folder, path.name)
    log = _Log()
    with path.open("rb") as file:
        for line in lines(file):
            record = parse_line(line)
            if isinstance(record, dict):
                log.take(record)
            else:
                log.num_bad += 1
    if not log.steps:
        raise ValueError(
            f"{path} holds no training step ({log.num_bad} damaged lines): run at "
            "least one step first"
        )
    require_log(path, log.num_bad, len(log.steps) + len(log.evals))
    return _as_arrays(folder, log)


def require_run(folder: pathlib.Path, *names: str) -> None:
    """Raise ValueError unless a folder has one of these files of a run."""
    if not any((folder / name).is_file() for name in names):
        what = f"has no {names[0]}" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{folder} {what}: name the run directory of train/main.py")


def require_log(path: pathlib.Path, num_bad: int, num_good: int) -> None:
    """Raise ValueError if a file of lines has more damaged ones than good ones."""
    if num_bad > num_good:
        raise ValueError(
            f"{path} has {num_bad} damaged lines and {num_good} good ones: it is not "
            "the log of a run, or was overwritten"
        )


class _Log:
    """Values of the lines that were read so far, by step."""

    def __init__(self) -> None:
        self.steps: dict[int, np.ndarray] = {}
        self.evals: dict[int, float] = {}
        self.tables: dict[str, dict] = {"tokens_le": {}, "rows_lw": {}}
        self.decided: dict[int, Adoption] = {}
        self.adopted: set[int] = set()
        self.num_bad = 0
        self._strides = dict.fromkeys(self.tables, 1)

    def take(self, record: dict) -> None:
        step = record["step"]
        if "eval_loss" in record:
            self.evals[step] = as_number(record["eval_loss"])
        if "loss" in record:
            self.steps[step] = _row(record)
            (self.adopted.add if "adopt_msec" in record else self.adopted.discard)(step)
        for name in self.tables:
            if name in record and step % self._strides[name] == 0:
                self._take_table(name, step, table_over_mean(record[name]))
        if "decision" in record:
            self._take_decision(step, record["decision"])

    def _take_table(self, name: str, step: int, table: np.ndarray | None) -> None:
        self.num_bad += table is None
        if table is not None:
            self.tables[name][step] = table
        while len(self.tables[name]) > MAX_LOADS:  # so a long run fits in memory
            stride = self._strides[name] = 2 * self._strides[name]
            tables = self.tables[name].items()
            self.tables[name] = {s: kept for s, kept in tables if s % stride == 0}

    def _take_decision(self, step: int, decision) -> None:
        try:
            kind, adopt_step = decision["kind"], int(decision["adopt_step"])
            text = _changes(decision["changes"])
        except (LookupError, TypeError, ValueError, OverflowError):
            self.num_bad += 1
            return
        if kind in ("swap", "relayout"):
            self.decided[adopt_step] = Adoption(adopt_step, kind, step, text)


def _changes(changes: dict) -> str:
    """Return the label of a relayout, such as 'slots 2→3': the change of the slots,
    else of the store, else the first. Other changes follow from it or are small."""
    for name in ("slots_per_device", "store", *changes):
        if name in changes:
            before, after = changes[name]
            short = name.removesuffix("_per_device").replace("_", " ")
            return f"{short} {before}→{after}"
    return ""


def _row(record: dict) -> np.ndarray:
    """Return loss, throughput, step time, then for each layer expert max/mean and
    device max/mean."""
    pairs = [
        record.get(name) for name in ("expert_max_over_mean", "device_max_over_mean")
    ]
    lists = [pair if isinstance(pair, list) else [] for pair in pairs]
    first = [record.get(name) for name in ("loss", "tok_per_sec", "step_msec")]
    row = [*first, *itertools.chain(*itertools.zip_longest(*lists))]
    return np.array([as_number(value) for value in row], np.float32)


def as_number(value) -> float:
    """Return a value as a number; NaN for null, which stands for a value that was not
    finite, and for anything that is not a number."""
    is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return float(value) if is_number else np.nan


def table_over_mean(table) -> np.ndarray | None:
    """Return a table of loads over the mean of each layer; None if it is not a table of
    finite numbers."""
    try:
        load_lx = np.asarray(table, np.float32)
    except (ValueError, TypeError, OverflowError):
        return None
    is_table = load_lx.ndim == 2 and load_lx.size and np.isfinite(load_lx).all()
    return over_mean(load_lx).astype(np.float32) if is_table else None


def _as_arrays(folder: pathlib.Path, log: _Log) -> RunArrays:
    order, eval_steps = sorted(log.steps), sorted(log.evals)
    width = max(row.size for row in log.steps.values())
    row_nx = np.full((len(order), width), np.nan, np.float32)
    for index, step in enumerate(order):
        row_nx[index, : log.steps[step].size] = log.steps[step]
    load_step_q, load_qle = _stack(log.tables["tokens_le"])
    rows_step_q, rows_qlw = _stack(log.tables["rows_lw"])
    path = folder / "config.gin"
    text = path.read_text(errors="replace") if path.is_file() else ""
    save_every_steps = _number_in(text, "Checkpoint.every_steps")
    is_balanced = "Balance.policy" in text and "Balance.policy = 'home'" not in text
    return RunArrays(
        name=folder.resolve().name,
        step_n=np.array(order),
        loss_n=row_nx[:, 0],
        tok_per_sec_n=row_nx[:, 1],
        step_msec_n=row_nx[:, 2],
        ratio_nl=row_nx[:, 3::2],
        device_ratio_nl=row_nx[:, 4::2],
        eval_step_m=np.array(eval_steps, int),
        eval_loss_m=np.array([log.evals[step] for step in eval_steps]),
        load_step_q=load_step_q,
        load_qle=load_qle,
        rows_step_q=rows_step_q,
        rows_qlw=rows_qlw,
        adoptions=tuple(log.decided[s] for s in sorted(log.adopted & set(log.decided))),
        save_every_steps=None if save_every_steps is None else int(save_every_steps),
        act_above=_number_in(text, "Balance.act_above") if is_balanced else None,
        num_bad_lines=log.num_bad,
    )


def _stack(tables: dict[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Stack the tables that have the shape of the last one. Return their steps and the
    stacked array."""
    steps = sorted(tables)
    steps = [step for step in steps if tables[step].shape == tables[steps[-1]].shape]
    return np.array(steps, int), np.array([tables[step] for step in steps])


def _number_in(text: str, name: str) -> float | None:
    """Return the number that gin text assigns to a field; None if it does not."""
    pattern = rf"^{re.escape(name)} = (\d{{1,9}}(?:\.\d{{1,9}})?)$"
    match = re.search(pattern, text, re.MULTILINE)
    return float(match[1]) if match else None
