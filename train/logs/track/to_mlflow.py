"""MLflow: one run with a metric for each tag, and the configuration as parameters.

MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are MLflow's own environment variables.
Without the first the run is in RUN_DIR/mlflow.db.
"""

import os
import pathlib
import time
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from train.logs.scalars import scalars
from train.logs.track.marks import Marks
from train.logs.track.setup import Setup

NAME = "mlflow"
EXPERIMENT = "moejax"
MAX_METRICS, MAX_PARAMS, MAX_CHARACTERS = 1000, 100, 6000
"""Largest numbers of metrics and of parameters in one request, and of characters of a
parameter, that MLflow takes."""


class Mlflow:
    """A run of MLflow, which a resumed run goes on with.

    MLflow keeps two values of one step side by side: steps up to the last that it has
    are left out.
    """

    def __init__(self, setup: Setup, marks: Marks) -> None:
        """Begin or go on with the run. Raises an error of MLflow's where that cannot
        be."""
        run_dir = pathlib.Path(setup.run_dir)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{run_dir / 'mlflow.db'}")
        self._marks, self._last_step = marks, marks.step(NAME)
        self._marked_step = self._last_step
        if run_id := marks.id(NAME):
            self._id = run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._begin(run_dir.name, setup.config)
            marks.put(NAME, self._id, 0)
        self._waiting: list[Metric] = []

    def append(self, record: dict[str, Any]) -> None:
        """Take the figures of a record; send them once a request is full."""
        step, at_msec = record["step"], int(1e3 * time.time())
        if step > self._last_step:
            self._waiting += [
                Metric(tag, number, at_msec, step) for tag, number in scalars(record)
            ]
        if len(self._waiting) >= MAX_METRICS:
            self.flush()

    def flush(self) -> None:
        """Send the figures that wait. Those of a request that fails are lost."""
        while self._waiting:
            part = self._waiting[:MAX_METRICS]
            self._waiting = self._waiting[MAX_METRICS:]
            if part[-1].step > self._marked_step:
                self._marked_step = part[-1].step
                self._marks.put(NAME, self._id, self._marked_step)
            self._client.log_batch(self._id, metrics=part)

    def close(self) -> None:
        """Send what waits, and end the run."""
        try:
            self.flush()
        finally:
            self._client.set_terminated(self._id)

    def _begin(self, name: str, config: dict[str, Any]) -> str:
        """Begin a run with the configuration, and return its id."""
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(title)
        experiment_id = (
            self._client.create_experiment(title)
            if experiment is None
            else experiment.experiment_id
        )
        run = self._client.create_run(experiment_id, run_name=name)
        params = [
            Param(field, str(value)[:MAX_CHARACTERS]) for field, value in config.items()
        ]
        for first in range(0, len(params), MAX_PARAMS):
            part = params[first : first + MAX_PARAMS]
            self._client.log_batch(run.info.run_id, params=part)
        return run.info.run_id
