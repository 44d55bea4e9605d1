"""Runs of the balanced toy in this process, as train/main.py would run it, watched.

Programs are shared by all runs of a house.
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
from moejax.perf.calibration import Calibration
from moejax.plan.expert_plan import ExpertPlan
from tests.support.run_main import ROOT, checkpoint_record, corpus, metric_lines
from train import job as prepare
from train import loop
from train.balance import balancing
from train.balance.balancing import Balancing
from train.checkpoint.checkpoints import Checkpointer
from train.config import gin_reader
from train.launch.program import set_up_backend
from train.logs.run_dir import claim
from train.step.compiled import compile_steps

BALANCED = ROOT / "tests" / "support" / "balanced.gin"
WAITED_STEPS = 10
"""A compilation in a thread is made to take so many steps, or longer."""
MESH = {"dc": 1, "data": 2, "expert": 4, "tensor": 1}


@dataclasses.dataclass
class House:
    """Programs, each made once, and what is seen of the run that goes on."""

    programs: dict = dataclasses.field(default_factory=dict)
    step: int = 0
    num_compiled: int = 0
    compiled_before: dict[int, int] = dataclasses.field(default_factory=dict)
    """How many compilations there had been when a step was dispatched."""
    background: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Steps dispatched when a compilation in a thread began, and when it ended."""

    def steps(self, model):
        """In place of compile_steps."""
        key = (model.layout, model.mesh)
        if key not in self.programs:
            self.programs[key] = compile_steps(model)
        return self.programs[key]

    def watch(self, make, is_main: bool):
        """What make() returns; while steps are done, in a thread, so many later."""
        if is_main or not self.step:
            return make()
        begin, end_sec = self.step, time.monotonic() + 60
        while self.step < begin + WAITED_STEPS:
            assert time.monotonic() < end_sec, f"step {self.step} stands still"
            time.sleep(0.001)
        steps = make()
        self.background.append((begin, self.step))
        return steps

    def before(self, step: int) -> None:
        self.step = step
        self.compiled_before[step] = self.num_compiled

    def count(self, name: str, *_, **__) -> None:
        self.num_compiled += name == "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Done:
    """A run of this process that has ended, and what was seen of it."""

    run_dir: pathlib.Path
    steps: dict[int, dict]
    """Lines of metrics.jsonl that have a loss, by step."""
    decisions: list[dict]
    evaluated: dict[int, float]
    compiled_before: dict[int, int]
    background: list[tuple[int, int]]

    @property
    def adopted(self) -> list[int]:
        return [step for step, line in self.steps.items() if "adopt_msec" in line]

    def plan(self, step: int) -> ExpertPlan:
        meta = checkpoint_record(self.run_dir, step)["meta"]
        return ExpertPlan.from_json(meta["plan"])


@contextlib.contextmanager
def watched() -> Iterator[House]:
    """Flags and caches as a process of train/main.py has them."""
    house, before, compiled = House(), Balancing.before, Balancing._compile_steps

    def watched_before(self, step, state):
        house.before(step)
        return before(self, step, state)

    def watched_compiled(self, *args):
        is_main = threading.current_thread() is threading.main_thread()
        return house.watch(lambda: compiled(self, *args), is_main)

    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        patch.delenv("XLA_FLAGS")  # they are part of a key of the compilation cache
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
    return gin_reader.load([BALANCED], [f"Data.corpus = '{corpus()}'", *params])


def speeds(path: pathlib.Path, mesh: dict[str, int]) -> pathlib.Path:
    line = {"latency_sec": 0.01, "bytes_per_sec": 1e12, "r2": 1.0}
    calibration = Calibration(
        device_kind="cpu",
        mesh=mesh,
        compute_dtype="float32",
        collectives={"all_to_all": {"expert": line}, "all_gather": {"data": line}},
        flops_per_sec=1e6,
        matmul_r2=1.0,
        compile_sec=1.0,
        when="never",
    )
    path.write_text(calibration.to_json())
    return path


def build_mesh(topology):
    return make_mesh(topology, jax.devices()[: topology.num_devices])


def run_here(house: House, run_dir: pathlib.Path, *params: str) -> Done:
    """train.main's run, in this process."""
    house.step, house.compiled_before, house.background = 0, {}, []
    cfg = config(*params)
    with claim(run_dir) as held:
        text = gin_reader.render(cfg)
        loop.train(prepare.prepare(cfg), held, text, loop.Extras())
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
    """Job, state and balancing of a run that would go on from what is saved here."""
    job = prepare.prepare(config(*params))
    checkpointer = Checkpointer(run_dir / "checkpoints", job.cfg.checkpoint)
    state, meta = loop.restore(job, checkpointer, print)
    checkpointer.close()
    now = Balancing(job, print)
    now.restore(meta)
    return job, state, now


def assert_same_run(run_dir: pathlib.Path, expected_dir: pathlib.Path) -> None:
    """Every line but what the clock said, the balancer's state and every array."""
    lines, expected = (
        [
            {n: v for n, v in x.items() if "adopt_" not in n}
            for x in metric_lines(folder)
        ]
        for folder in (run_dir, expected_dir)
    )
    assert lines == expected
    step = max(x["step"] for x in expected)
    record, expected = (checkpoint_record(x, step) for x in (run_dir, expected_dir))
    assert record["arrays"] == expected["arrays"]
    for name in ("plan", "balance"):
        assert record["meta"][name] == expected["meta"][name]
