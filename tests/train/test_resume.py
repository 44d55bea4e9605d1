"""Runs that are killed and resumed have the results of an undisturbed run, bit for bit:
under every policy, with every kind of state, and at every moment.

`make test` has a run that SIGTERM stops (test_runs.py), a process that is killed in a
save (checkpoint/test_damage.py), and runs that go on under a balancer
(balance/test_balancing.py).
"""

import dataclasses
import pathlib
import random
import signal
import sys
from collections.abc import Callable

import pytest

from tests.support.planners import held_plans, killed_in_a_plan
from tests.support.run_main import TOY, Live, checkpoint_record, command, run
from tests.support.watched_run import BALANCED, MESH, assert_same_run, speeds
from tests.support.workers import sample_ids
from train.balance.record import BalanceRecord

pytestmark = [pytest.mark.slow, pytest.mark.long]
ASKED_STEP, SAVED_STEP, PENDING_STEP = 10, 11, 25


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of train/main.py: bindings of a gin file. `{cheap}` is a calibration at
    which relayouts pay."""

    params: tuple[str, ...]
    gin_file: pathlib.Path = BALANCED

    def at(self, cheap: pathlib.Path) -> "Run":
        params = tuple(param.format(cheap=cheap) for param in self.params)
        return dataclasses.replace(self, params=params)

    def live(self, run_dir: pathlib.Path) -> Live:
        return Live(run_dir, *self.params, gin_file=self.gin_file)


RELAYOUT = ("Balance.calibration = '{cheap}'", "Balance.max_slots_per_device = 3")
LONG = ("Train.num_steps = 199", "Checkpoint.every_steps = 7")
PLANNED = (
    *RELAYOUT, f"Checkpoint.every_steps = {SAVED_STEP}", "Train.num_steps = 30",
    "Balance.lag_steps = 3", "Balance.relayout_lag_steps = 15",
    "Balance.cooldown_steps = 0", "Balance.half_life_steps = 2.0",
)  # fmt: skip
REDO = (
    "Dispatch.overflow = 'redo'", "Dispatch.buffer_factor = 1.5",
    "Data.log_samples = True", "Train.num_steps = 45", "Checkpoint.every_steps = 6",
    "Checkpoint.keep_last = 20", "Train.check_replicas_every_steps = 4",
)  # fmt: skip
COMPRESSED = (
    "Mesh.dc = 2", "Mesh.data = 1", "Dispatch.group = 'dc_expert'",
    "Dispatch.domain = (2, 2)", "Dispatch.compression = 50.0",
)  # fmt: skip
GPT_OSS = (
    "Router.kind = 'softmax'", "Router.bias = True", "Router.balance_loss = 0.0",
    "Moe.expert_bias = True", "Moe.activation = 'clamped_swiglu'",
    "Moe.swiglu_limit = 0.5", "Attention.bias = 'all'", "Attention.sinks = True",
    "Train.num_steps = 36", "Checkpoint.every_steps = 6", "Balance.every_steps = 3",
)  # fmt: skip
POLICIES = (
    "fastermoe", "prophet", "flexmoe", "smartmoe", "hiermoe", "eplb", "laer",
    "micromoe",
)  # fmt: skip


def in_steps(case: Run, run_dir: pathlib.Path, number: int) -> None:
    """Kill the run after some steps of its own."""
    with case.live(run_dir) as live:
        live.wait_for_steps(random.Random(number).randint(1, 15))
        assert live.end(signal.SIGKILL).code == -signal.SIGKILL


def in_a_save(case: Run, run_dir: pathlib.Path, _: int) -> None:
    """Kill the run while it writes a checkpoint."""
    with case.live(run_dir) as live:
        live.wait_for_save()
        assert live.end(signal.SIGKILL).code == -signal.SIGKILL


def in_a_plan(case: Run, run_dir: pathlib.Path, _: int) -> None:
    """Kill the run after a save, while the plan of a step before it is in the making:
    it decides for that step again when it goes on."""
    killed_in_a_plan(run_dir, SAVED_STEP, ASKED_STEP, *case.params)


def before_a_relayout(case: Run, run_dir: pathlib.Path, _: int) -> None:
    """Kill the run after a save with a relayout that is decided and not yet adopted.
    The run waits for the next plan until then."""
    later = range(PENDING_STEP + 1, 39)
    with held_plans(*later), case.live(run_dir) as live:
        saved = run_dir / "checkpoints" / str(PENDING_STEP)
        live.wait_until(saved.is_dir, f"checkpoint {PENDING_STEP}")
        assert live.end(signal.SIGKILL).code == -signal.SIGKILL
    meta = checkpoint_record(run_dir, PENDING_STEP)["meta"]
    relayout = BalanceRecord.from_json(meta["balance"]).now.relayout
    assert relayout.adopt_step > PENDING_STEP


def before_its_summary(case: Run, run_dir: pathlib.Path, _: int) -> None:
    """Let the run end, and remove its summary: the last evaluation is read back."""
    assert run(run_dir, *case.params, gin_file=case.gin_file).code == 0
    (run_dir / "summary.json").unlink()


def in_a_redo(number: int, when: str) -> Callable:
    """Return a function that kills the run in a redo."""

    def kill(case: Run, run_dir: pathlib.Path, _: int) -> None:
        words = command(run_dir, *case.params, gin_file=case.gin_file)[2:]
        module = [sys.executable, "-m", "tests.support.killed_in_redo"]
        with Live.__new__(Live) as live:
            live.start(run_dir, [*module, str(number), when, *words])
            assert live.end().code == -signal.SIGKILL

    return kill


CASES = {
    "toy": (
        Run(LONG, TOY), (in_steps, in_a_save, in_steps, in_a_save, before_its_summary),
    ),
    "compressed": (Run((*COMPRESSED, *LONG), TOY), (in_steps, in_a_save)),
    "bfloat16 moments": (
        Run((*LONG, "Optimizer.mu_dtype = 'bfloat16'"), TOY), (in_steps, in_a_save),
    ),
    "a family": (Run(GPT_OSS), (in_steps, in_a_save)),
    "relayouts": (Run((*RELAYOUT, *LONG)), (in_steps, in_a_save, in_steps, in_steps)),
    "a relayout is pending": (
        Run((*RELAYOUT, f"Checkpoint.every_steps = {PENDING_STEP}")),
        (before_a_relayout,),
    ),
    **{
        f"{policy} plans": (
            Run((*PLANNED, f"Balance.policy = '{policy}'")), (in_a_plan,),
        )
        for policy in POLICIES
    },
    "redo": (
        Run(REDO),
        (in_a_redo(1, "before"), in_a_redo(7, "between"), in_a_redo(9, "after")),
    ),
}  # fmt: skip
"""Runs, and moments at which they are killed one after the other."""


@pytest.mark.parametrize("name", CASES)
def test_killed_and_resumed_is_the_same_run(tmp_path, name):
    """Metrics, samples, decisions, plans, the balancer's state and the final arrays are
    the same."""
    case, moments = CASES[name]
    case = case.at(speeds(tmp_path / "cheap.json", MESH))
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert run(whole, *case.params, gin_file=case.gin_file).code == 0
    for number, kill in enumerate(moments):
        kill(case, run_dir, number)
    ended = run(run_dir, *case.params, gin_file=case.gin_file)
    assert ended.code == 0, ended.err
    assert_same_run(run_dir, whole)
    assert sample_ids(run_dir) == sample_ids(whole)
    assert ended.record["goodput"]["num_attempts"] == len(moments) + 1
