"""Run the toy configuration with a balancer in this process, and record what happens.

A run does what train/main.py does. All runs of one House share compiled programs.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from unittest import mock

import jax
import pytest

from moejax.axes import make_mesh
from moejax.plan.expert_plan import ExpertPlan
from tests.support import xla_flags
from tests.support.plan_history import adopted_records
from tests.support.run_main import (
    LIMIT_SEC,
    ROOT,
    checkpoint_record,
    corpus,
    metric_lines,
)
from tools.faults.reference import imaginary_speeds
from train import job as prepare
from train import loop
from train.balance import balancing
from train.balance.balancing import Balancing
from train.balance.record import BalanceRecord
from train.checkpoint.checkpoints import Checkpointer
from train.config import gin_reader
from train.launch.program import set_up_backend
from train.logs.run_dir import claim
from train.step.compiled import compile_steps

BALANCED = ROOT / "tests" / "support" / "balanced.gin"
WAITED_STEPS = 10
"""Minimum number of steps that a compilation in a thread takes."""
MESH = {"dc": 1, "data": 2, "expert": 4, "tensor": 1}


@dataclasses.dataclass
class House:
    """Compiled programs that runs share, and records of the current run."""

    programs: dict = dataclasses.field(default_factory=dict)
    step: int = 0
    num_compiled: int = 0
    compiled_before: dict[int, int] = dataclasses.field(default_factory=dict)
    """Number of compilations before each step was dispatched."""
    background: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Steps dispatched when a compilation in a thread began, and when it ended."""

    def steps(self, model, **_):
        """Return the compiled steps of a model; this replaces compile_steps."""
        key = (model.layout, model.mesh)
        if key not in self.programs:
            self.programs[key] = compile_steps(model)
        return self.programs[key]

    def watch(self, make, is_main: bool):
        """Return make(). In a thread, wait first until the run has done WAITED_STEPS
        more steps."""
        if is_main or not self.step:
            return make()
        begin, end_sec = self.step, time.monotonic() + LIMIT_SEC
        while self.step < begin + WAITED_STEPS:
            assert time.monotonic() < end_sec, f"step {self.step} stands still"
            time.sleep(0.001)
        steps = make()
        self.background.append((begin, self.step))
        return steps

    def before(self, step: int) -> None:
        """Record that a step is about to be dispatched."""
        self.step = step
        self.compiled_before[step] = self.num_compiled

    def count(self, name: str, *_, **__) -> None:
        """Count compilations; JAX calls this for every event that it times."""
        self.num_compiled += name == "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Done:
    """Logs and records of a run that has ended."""

    run_dir: pathlib.Path
    steps: dict[int, dict]
    """Lines of metrics.jsonl that have a loss, by step."""
    decisions: list[dict]
    evaluated: dict[int, float]
    compiled_before: dict[int, int]
    background: list[tuple[int, int]]

    @property
    def adopted(self) -> list[int]:
        """Steps at which the run adopted a plan or a layout."""
        return [step for step, line in self.steps.items() if "adopt_msec" in line]

    def plan(self, step: int) -> ExpertPlan:
        """Return the plan in the checkpoint of a step."""
        meta = checkpoint_record(self.run_dir, step)["meta"]
        return ExpertPlan.from_json(meta["plan"])


@contextlib.contextmanager
def watched() -> Iterator[House]:
    """Set flags and caches as train/main.py does, and yield a House that records
    runs."""
    house, before, compiled = House(), Balancing.before, Balancing._compile_steps

    def watched_before(self, step, state):
        house.before(step)
        return before(self, step, state)

    def watched_compiled(self, *args):
        is_main = threading.current_thread() is threading.main_thread()
        return house.watch(lambda: compiled(self, *args), is_main)

    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        # They are part of a key of the compilation cache.
        patch.setenv("XLA_FLAGS", " ".join(xla_flags.QUICK))
        set_up_backend(config())
        patch.setattr(prepare, "make_mesh", build_mesh)
        patch.setattr(balancing, "compile_steps", house.steps)
        patch.setattr(Balancing, "before", watched_before)
        patch.setattr(Balancing, "_compile_steps", watched_compiled)
        handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
        jax.monitoring.register_event_duration_secs_listener(house.count)
        yield house
        jax._src.monitoring.unregister_event_duration_listener(house.count)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def config(*params: str):
    """Return the configuration of balanced.gin with `params`."""
    return gin_reader.load([BALANCED], [f"Data.corpus = '{corpus()}'", *params])


def speeds(path: pathlib.Path, mesh: dict[str, int]) -> pathlib.Path:
    """Write a calibration of an imaginary machine and return its path."""
    path.write_text(imaginary_speeds(mesh).to_json())
    return path


def build_mesh(topology):
    """Return a mesh of the first simulated devices."""
    return make_mesh(topology, jax.devices()[: topology.num_devices])


def run_here(house: House, run_dir: pathlib.Path, *params: str) -> Done:
    """Run train/main.py's training in this process, and return its logs."""
    house.step, house.compiled_before, house.background = 0, {}, []
    cfg = config(*params)
    with claim(run_dir) as held:
        loop.train(prepare.prepare(cfg), held)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    return Done(
        run_dir,
        {x["step"]: x for x in lines if "loss" in x},
        [x["decision"] for x in lines if "decision" in x],
        {x["step"]: x["eval_loss"] for x in lines if "eval_loss" in x},
        house.compiled_before,
        house.background,
    )


def restored(run_dir: pathlib.Path, *params: str):
    """Return job, state and balancing of a run that resumes from this directory."""
    job = prepare.prepare(config(*params))
    checkpointer = Checkpointer(run_dir / "checkpoints", job.cfg.checkpoint)
    state, meta = loop.restore(job, checkpointer, print)
    checkpointer.close()
    balancing_now = Balancing(job, mock.Mock())
    balancing_now.restore(meta)
    return job, state, balancing_now


def assert_same_run(run_dir: pathlib.Path, expected_dir: pathlib.Path) -> None:
    """Assert that two runs have the same metrics, balancer state and final arrays;
    metrics that depend on time, and the plans at starts, may differ."""
    lines, expected = (metric_lines(folder) for folder in (run_dir, expected_dir))
    assert lines == expected
    assert adopted_records(run_dir) == adopted_records(expected_dir)
    step = max(x["step"] for x in expected)
    record, expected = (checkpoint_record(x, step) for x in (run_dir, expected_dir))
    assert record["arrays"] == expected["arrays"]
    assert record["meta"]["plan"] == expected["meta"]["plan"]
    texts = [x["meta"]["balance"] for x in (record, expected)]
    settled = [x and BalanceRecord.from_json(x).settled().to_json() for x in texts]
    assert settled[0] == settled[1]
