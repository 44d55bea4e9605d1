"""Runs whose steps run again where an exchange overflows: with swaps, saves, relayouts
and several processes; test_resume.py kills them.

A hot expert changes every ten steps, and rows of a pair of devices fit until then and
again after a swap. All tests in this file share programs.
"""

from unittest import mock

import numpy as np
import pytest

from moejax.balance.overflows import Prices
from moejax.resolve.resolved import Resolved
from tests.support.close import assert_close
from tests.support.run_main import checkpoint_record, metric_lines
from tests.support.watched_run import (
    BALANCED,
    MESH,
    run_here,
    speeds,
    watched,
)
from tests.support.workers import LiveWorkers, sample_ids
from train.in_flight import InFlight

pytestmark = [pytest.mark.slow, pytest.mark.long]  # two programs of each step
NUM_STEPS = 45
REDO = (
    "Dispatch.overflow = 'redo'",
    "Dispatch.rows_per_peer = 48",
    "Data.log_samples = True",
    f"Train.num_steps = {NUM_STEPS}",
    "Checkpoint.every_steps = 6",
    "Checkpoint.keep_last = 20",
    "Train.check_replicas_every_steps = 4",
)
DEAR = Prices(step_sec=1.0, loops_sec=0.9)
"""Prices at which steps are exact for some time after an overflow."""
SUMS = "1e-4: sums over rounds in another order, in 45 steps"


@pytest.fixture(scope="module")
def house():
    with watched() as house:
        yield house


@pytest.fixture(scope="module")
def redo(house, tmp_path_factory):
    return run_here(house, tmp_path_factory.mktemp("redo") / "run", *REDO)


@pytest.fixture(scope="module")
def slow_devices(tmp_path_factory):
    """Return a calibration at which an overflow costs more than many loops."""
    return speeds(tmp_path_factory.mktemp("calibration") / "slow.json", MESH)


def steps_with(done, name: str) -> list[int]:
    return [step for step, line in done.steps.items() if line[name]]


def losses(lines: dict[int, dict]) -> np.ndarray:
    return np.float32([lines[step]["loss"] for step in sorted(lines)])


def overflows(done) -> list[int]:
    return [step for step, line in done.steps.items() if max(line["rounds"]) > 1]


def test_redone_steps_are_those_that_overflow(redo):
    redone = steps_with(redo, "redone")
    assert len(redone) >= 20
    assert redone == overflows(redo)
    assert len(redone) < NUM_STEPS, "after swaps all rows fit"
    assert {step + 1 for step in redone} & set(redo.adopted), "a swap behind a redo"
    assert set(redone) & {step - step % 6 for step in redone}, "a save of a redone step"
    assert steps_with(redo, "loop_free") == [
        step for step in redo.steps if step not in redone
    ]


def test_bits_are_those_of_a_run_that_knows_which_steps_overflow(house, redo, tmp_path):
    known = set(steps_with(redo, "redone"))

    def runs_loop_free(self, step):
        return step not in known

    with mock.patch.object(InFlight, "_runs_loop_free", runs_loop_free):
        done = run_here(house, tmp_path / "run", *REDO)
    assert not steps_with(done, "redone")
    records = [checkpoint_record(x.run_dir, NUM_STEPS) for x in (done, redo)]
    assert records[0]["arrays"] == records[1]["arrays"]
    for name in ("plan", "balance"):
        assert records[0]["meta"][name] == records[1]["meta"][name]
    for saved in range(6, NUM_STEPS, 6):
        arrays = [checkpoint_record(x.run_dir, saved)["arrays"] for x in (done, redo)]
        assert arrays[0] == arrays[1]
    lines, expected = (
        [line | {"redone": None} for line in metric_lines(x.run_dir)]
        for x in (done, redo)
    )
    assert lines == expected
    ids = sample_ids(redo.run_dir)
    assert ids == sample_ids(done.run_dir)
    assert sorted(ids) == list(range(1, NUM_STEPS + 1))


def test_a_relayout_compiles_both_steps_ahead(house, redo, tmp_path, slow_devices):
    params = [f"Balance.calibration = '{slow_devices}'"]
    params += ["Balance.max_slots_per_device = 3"]
    with mock.patch.object(InFlight, "_runs_loop_free", return_value=True):
        done = run_here(house, tmp_path / "run", *REDO, *params)
    change, *_ = [x for x in done.decisions if x["kind"] == "relayout"]
    assert change["adopt_step"] in done.adopted
    redone = steps_with(done, "redone")
    assert redone == overflows(done)
    assert min(redone) < change["adopt_step"] <= max(redone)
    assert_close(losses(done.steps), losses(redo.steps), factor=10, reason=SUMS)


@mock.patch.object(Resolved, "overflow_prices", DEAR)
def test_a_resumed_run_chooses_the_same_steps(house, tmp_path):
    """The moving share of overflows is in the checkpoint."""
    params = [*REDO, "Balance.half_life_steps = 1.0"]
    whole = run_here(house, tmp_path / "whole", *params)
    kinds = steps_with(whole, "loop_free")
    assert 0 < len(kinds) < NUM_STEPS
    assert 0 < len(steps_with(whole, "redone")) < len(overflows(whole))
    part, last = tmp_path / "part", f"Train.num_steps = {NUM_STEPS}"
    for stop in (12, 30, NUM_STEPS):
        done = run_here(house, part, *params, last.replace(str(NUM_STEPS), str(stop)))
    assert steps_with(done, "loop_free") == kinds
    records = [checkpoint_record(x, NUM_STEPS) for x in (part, tmp_path / "whole")]
    assert records[0]["arrays"] == records[1]["arrays"]
    assert records[0]["meta"]["overflows"] == records[1]["meta"]["overflows"]


def test_two_processes_redo_the_same_steps(redo, tmp_path):
    run_dir, balanced = tmp_path / "run", [f"--gin_file={BALANCED}"]
    with LiveWorkers(run_dir, 2, *REDO, of_main=balanced) as live:
        ended = live.end()
    assert ended.code == 0, ended.err
    lines = {x["step"]: x for x in metric_lines(run_dir) if "loss" in x}
    for name in ("redone", "loop_free", "rounds", "plan"):
        expected = [line[name] for line in redo.steps.values()]
        assert [line[name] for line in lines.values()] == expected
    assert_close(losses(lines), losses(redo.steps), factor=10, reason=SUMS)
    assert sample_ids(run_dir) == sample_ids(redo.run_dir)
    assert "overflows       " in ended.out
