"""Weights & Biases: one run whose history has a row for each step.

WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY and the like are W&B's own environment
variables; WANDB_MODE=offline needs no network.
"""

import os
import pathlib
import secrets
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from train.logs.scalars import scalars
from train.logs.track.marks import Marks
from train.logs.track.setup import Setup

NAME = "wandb"
PROJECT = "moejax"


class WeightsAndBiases:
    """A run of W&B, which a resumed run goes on with.

    W&B takes no step back: steps up to the last that it has are left out.
    """

    def __init__(self, setup: Setup, marks: Marks) -> None:
        """Begin or go on with the run. Raises an error of wandb's where that cannot
        be, such as without a key."""
        run_dir = pathlib.Path(setup.run_dir)
        self._marks, self._last_step = marks, marks.step(NAME)
        self._id = marks.id(NAME) or os.environ.get("WANDB_RUN_ID")
        self._id = self._id or secrets.token_hex(4)
        self._marked_step = self._last_step
        marks.put(NAME, self._id, self._last_step)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run_dir.name),
            dir=os.environ.get("WANDB_DIR", str(run_dir)),
            id=self._id,
            resume="allow",
            config=setup.config,
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True
            ),
        )
        if self._run.resumed:
            self._run.config.update(setup.config, allow_val_change=True)

    def append(self, record: dict[str, Any]) -> None:
        """Log the figures of a record at its step."""
        step, values = record["step"], dict(scalars(record))
        if step <= self._last_step or not values:
            return
        if step > self._marked_step:
            self._marks.put(NAME, self._id, step)
            self._marked_step = step
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Return: a process of wandb's own takes what was logged."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()
