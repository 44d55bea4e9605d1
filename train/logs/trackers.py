"""Send the figures of a run to TensorBoard, Weights & Biases and MLflow.

Each tracker has a thread, in which its package is imported and called, and a queue of
records before it. Nothing that a tracker does holds a step: where the queue is full,
records are dropped and counted. metrics.jsonl has all of them.

    RUN_DIR/trackers.json    {"id": "3fa8c21e", "step": 120}: the name of the run at W&B
                             and MLflow, and the last step that was given to trackers
                             before the newest attempt

W&B takes no step back, and MLflow would keep both values of a step. Both go on after
the last step that they were given. TensorBoard is told to forget steps that come again.
"""

import collections
import importlib.machinery
import json
import os
import pathlib
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from moejax.config import Config
from train.files import write_whole
from train.launch.program import TRACKS, say_loudly
from train.logs.record_lines import read_records
from train.logs.scalars import scalars
from train.messages import one_line

OWN_PACKAGES = pathlib.Path(__file__).resolve().parents[2] / ".trackers"
"""Folder in which `make trackers` installs packages; those of the environment win."""
PACKAGES = {
    "tensorboard": ("tensorboardX", "pip install tensorboardX"),
    "wandb": ("wandb", "make trackers, or pip install wandb"),
    "mlflow": ("mlflow", "make trackers, or pip install mlflow"),
}
"""Package that each tracker needs, and how to install it."""
PROJECT = "moejax"
FILE = "trackers.json"

MAX_WAITING = 4096
"""Records that may wait. One takes a few KiB; W&B and MLflow begin to take them after
some seconds."""
CLOSE_SEC, NOTICE_SEC = 30.0, 5.0
"""Longest wait at the end of a run, and the wait after which a line tells of it. On a
busy machine the imports of W&B and MLflow alone take ten seconds."""
MAX_METRICS, MAX_PARAMS, MAX_CHARACTERS = 1000, 100, 6000
"""Largest numbers of metrics and of parameters in one request, and of characters of a
parameter, that MLflow takes."""


class TrackedRun(NamedTuple):
    """Facts of a run, which each tracker gets when it starts."""

    folder: pathlib.Path
    id: str
    """Name of the run at W&B and MLflow, the same in all attempts."""
    step: int
    """Last step that is done."""
    given_step: int
    """Last step that earlier attempts have given to trackers."""
    config_text: str
    """The configuration as config.gin has it."""
    config: dict[str, Any]
    """Its fields by name, such as 'moe.top_k'."""


class Tracker(Protocol):
    """A place to which the figures of a run go. Its methods may wait or raise."""

    def log(self, waiting: list[tuple[int, dict[str, float]]]) -> None:
        """Take all that waits: steps, in order, with numbers by tag."""

    def close(self) -> None:
        """Return once all is in its place."""


class Trackers:
    """The trackers of a run; use as a context."""

    def __init__(
        self,
        names: tuple[str, ...],
        folder: pathlib.Path,
        step: int,
        cfg: Config,
        config_text: str,
    ) -> None:
        """Start trackers of the run in `folder`, which goes on after `step`. Call this
        before its metrics.jsonl is cut back: it has the last step that was given."""
        self._all: list[Background] = []
        sys.path.append(str(OWN_PACKAGES))
        try:
            run_id, given_step = _recall(folder)
        except (OSError, ValueError, LookupError, TypeError) as fault:
            say_loudly(
                f"TRACKERS NOT STARTED: {folder / FILE}: {_words(fault)}: remove the "
                "file, and the next attempt begins a run of its own at W&B and MLflow"
            )
            return
        fields = flat_fields(cfg.to_dict())
        run = TrackedRun(folder, run_id, step, given_step, config_text, fields)
        for name in names:
            make = MAKERS[name]
            self._all.append(Background(name, lambda make=make: make(run)))

    def __enter__(self) -> "Trackers":
        return self

    def append(self, record: dict[str, Any]) -> None:
        """Give all trackers a record, which must not change any more; return at
        once."""
        for tracker in self._all:
            tracker.append(record)

    def __exit__(self, *_) -> None:
        """End the trackers, within CLOSE_SEC seconds."""
        end_sec = time.monotonic() + CLOSE_SEC
        for tracker in self._all:
            tracker.finish()
        for tracker in self._all:
            tracker.join(end_sec)


class Background:
    """A tracker in a thread of its own, which can neither hold nor end the run."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        *,
        max_waiting: int = MAX_WAITING,
        say: Callable[[str], None] = say_loudly,
    ) -> None:
        """Start the thread, which calls `make`; return before it has begun."""
        self._name, self._say, self._max_waiting = name, say, max_waiting
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._num_given = self._num_dropped = self._num_taken = 0
        self._is_disabled = False
        self._has_ended = threading.Event()
        threading.Thread(
            target=self._work, args=(make,), name=TRACKS, daemon=True
        ).start()

    def append(self, record: dict[str, Any]) -> None:
        """Give the tracker a record; drop it where too many wait."""
        self._num_given += 1
        if self._is_disabled:
            return
        if self._queue.qsize() < self._max_waiting:
            self._queue.put(record)
            return
        self._num_dropped += 1
        if self._num_dropped == 1:
            self._say(
                f"TRACKER {self._name} IS BEHIND from step {record['step']} on, and "
                "records are left out; training goes on, and metrics.jsonl has all"
            )

    def finish(self) -> None:
        """Let the thread end once it has taken what waits."""
        self._queue.put(None)

    def join(self, end_sec: float) -> None:
        """Return when the tracker has ended, or at `end_sec`, a value of
        time.monotonic(). Say so if it has not ended, and how many records were lost."""
        limit_sec = end_sec - time.monotonic()
        self._has_ended.wait(min(max(limit_sec, 0.0), NOTICE_SEC))
        if not self._has_ended.is_set() and limit_sec > NOTICE_SEC:
            self._say(f"waiting for {self._name}, {limit_sec:.0f} s at most")
            self._has_ended.wait(limit_sec - NOTICE_SEC)
        num_lost = self._num_given - self._num_taken
        lost = f"{num_lost} of {self._num_given} records did not reach it"
        if not self._has_ended.is_set():
            self._say(
                f"TRACKER {self._name} did not end, and is left behind: {lost}, and "
                "what it took may not be stored"
            )
        elif num_lost:
            self._say(f"tracker {self._name}: {lost}")

    def _work(self, make: Callable[[], Tracker]) -> None:
        """Give the tracker what waits, until `finish` or its first error."""
        try:
            tracker, is_over = make(), False
            while not is_over:
                records = [self._queue.get()]
                while records[-1] is not None and not self._queue.empty():
                    records.append(self._queue.get())
                if is_over := records[-1] is None:
                    records.pop()
                tracker.log([(x["step"], dict(scalars(x))) for x in records])
                self._num_taken += len(records)
            tracker.close()
        except Exception as fault:
            self._is_disabled = True
            self._say(
                f"TRACKER {self._name} ENDED: {_words(fault)}; training goes on, and "
                "metrics.jsonl has all figures"
            )
            self._has_ended.set()
            # The thread stays, so that the program ends at once (launch/program.py): at
            # Python's own exit the package may raise again, or wait.
            threading.Event().wait()
        self._has_ended.set()


class TensorBoard:
    """Event files in RUN_DIR/tensorboard, one for each attempt.

    Each begins with an order to forget what older files hold of its steps.
    """

    def __init__(self, run: TrackedRun) -> None:
        # EventsWriter writes when it is called. SummaryWriter, which wraps it, has a
        # thread that ends at the first failed write, and then waits for it for ever.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import text

        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        forget = SessionLog(status=SessionLog.START)
        self._write(Event(step=run.step + 1, session_log=forget))
        config = "\n".join("    " + line for line in run.config_text.splitlines())
        self._write(Event(step=run.step + 1, summary=text("config", config)))

    def log(self, waiting: list[tuple[int, dict[str, float]]]) -> None:
        """Write an event for each step, and bring them to the disk."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        for step, numbers in waiting:
            values = [Summary.Value(tag=n, simple_value=x) for n, x in numbers.items()]
            self._write(Event(step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, event) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)


class WeightsAndBiases:
    """One run of W&B, which all attempts go on with.

    WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY and the like are W&B's own environment
    variables; WANDB_MODE=offline needs no network.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Else W&B asks for a key on a terminal, and waits for the answer.
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._given_step = run.given_step
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.folder.name),
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            id=os.environ.get("WANDB_RUN_ID", run.id),
            resume="allow",
            config=run.config,
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
        )
        if self._run.resumed:
            self._run.config.update(run.config, allow_val_change=True)

    def log(self, waiting: list[tuple[int, dict[str, float]]]) -> None:
        """Give wandb's own process the numbers of each step."""
        for step, numbers in waiting:
            if step > self._given_step and numbers:
                self._run.log(numbers, step=step)

    def close(self) -> None:
        """End the run, once all is at the server or in the files."""
        self._run.finish()


class Mlflow:
    """One run of MLflow, which all attempts go on with.

    MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are MLflow's own environment
    variables. Without the first the run is in RUN_DIR/mlflow.db.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{run.folder / 'mlflow.db'}")
        self._given_step = run.given_step
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(title)
        experiment_id = (
            self._client.create_experiment(title)
            if experiment is None
            else experiment.experiment_id
        )
        tag = f"{PROJECT}.id"
        found = self._client.search_runs([experiment_id], f"tags.`{tag}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            begun = self._client.create_run(
                experiment_id, run_name=run.folder.name, tags={tag: run.id}
            )
            self._id = begun.info.run_id
            self._log_config(run.config)

    def log(self, waiting: list[tuple[int, dict[str, float]]]) -> None:
        """Send the numbers of all steps in as few requests as MLflow takes: one takes
        0.2 s, whatever it holds."""
        from mlflow.entities import Metric

        at_msec = int(1e3 * time.time())
        metrics = [
            Metric(tag, number, at_msec, step)
            for step, numbers in waiting
            if step > self._given_step
            for tag, number in numbers.items()
        ]
        for first in range(0, len(metrics), MAX_METRICS):
            part = metrics[first : first + MAX_METRICS]
            self._client.log_batch(self._id, metrics=part)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)

    def _log_config(self, config: dict[str, Any]) -> None:
        """Send the fields of the configuration as parameters."""
        from mlflow.entities import Param

        params = [Param(name, str(x)[:MAX_CHARACTERS]) for name, x in config.items()]
        for first in range(0, len(params), MAX_PARAMS):
            part = params[first : first + MAX_PARAMS]
            self._client.log_batch(self._id, params=part)


MAKERS = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": Mlflow
}  # fmt: skip


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names in a list such as 'tensorboard,wandb'. Raises ValueError for one
    that is no tracker.

    >>> parse_names("tensorboard,wandb")
    ('tensorboard', 'wandb')
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if text))
    for name in names:
        if name not in PACKAGES:
            raise ValueError(
                f"--track={text}: {name!r} is no tracker: give some of "
                f"{','.join(PACKAGES)}"
            )
    return names


def require_installed(names: tuple[str, ...]) -> None:
    """Raise ValueError if the package of a tracker is not installed. None of them is
    imported."""
    for name in names:
        package, how = PACKAGES[name]
        if not _is_installed(package):
            raise ValueError(
                f"--track={name} needs the package {package}, which is not installed: "
                f"{how}, or leave {name} out"
            )


def missing_trackers() -> str | None:
    """Return why not all trackers can be tested, or None if they can."""
    packages = [package for package, _ in PACKAGES.values()]
    missing = [package for package in packages if not _is_installed(package)]
    if not missing:
        return None
    return f"{' and '.join(missing)} not installed: run `make trackers`"


def flat_fields(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of nested dicts by dotted names.

    >>> flat_fields({"moe": {"top_k": 2}})
    {'moe.top_k': 2}
    """
    fields = {}
    for name, value in config.items():
        if isinstance(value, dict):
            fields |= flat_fields(value, f"{prefix}{name}.")
        else:
            fields[prefix + name] = value
    return fields


def _recall(folder: pathlib.Path) -> tuple[str, int]:
    """Return the id of a run at trackers and the last step that they were given, and
    write both to FILE. A new run gets a new id."""
    path = folder / FILE
    if path.exists():
        found = json.loads(path.read_text())
        run_id, given_step = str(found["id"]), int(found["step"])
        for record in collections.deque(read_records(folder / "metrics.jsonl"), 1):
            given_step = max(given_step, record["step"])
    else:
        run_id, given_step = secrets.token_hex(4), 0
    write_whole(path, json.dumps({"id": run_id, "step": given_step}))
    return run_id, given_step


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    path = [*sys.path, str(OWN_PACKAGES)]
    return importlib.machinery.PathFinder.find_spec(package, path) is not None


def _words(fault: Exception) -> str:
    """Return the error in one line, or its kind where it has no text."""
    return one_line(fault) or type(fault).__name__
