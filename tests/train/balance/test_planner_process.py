"""The planner's process beside a run: late plans, kills in the middle of a plan, and
ends of either side."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from moejax.balance.planning import Snapshot
from tests.support.balanced_run import new_planner, observed
from tests.support.planners import killed_in_a_plan, planners, slow_plans
from tests.support.run_main import ROOT, Live, metric_lines, run
from tests.support.watched_run import BALANCED, MESH, assert_same_run, speeds
from train.balance.planner_process import PlannerProcess
from train.balance.record import BalanceRecord

POLICIES = (
    "fastermoe", "prophet", "flexmoe", "smartmoe", "eplb", "laer", "micromoe",
)  # fmt: skip
SAVED_STEP = 11
"""Step of a checkpoint, one after a step at which the planner is asked."""
SHORT = (
    f"Checkpoint.every_steps = {SAVED_STEP}",
    "Train.num_steps = 30",
    "Balance.lag_steps = 3",
    "Balance.relayout_lag_steps = 15",
    "Balance.cooldown_steps = 0",
    "Balance.half_life_steps = 2.0",
    "Balance.max_slots_per_device = 3",
)


@pytest.fixture
def planner():
    """Return a PlannerProcess of the small balancer of tests, whose plans take longer,
    and its Task."""
    task, snapshot = new_planner()
    with slow_plans(0.3):
        process = PlannerProcess(task, snapshot.to_json())
    yield process, task
    process.close()


def test_the_process_replies_as_the_planner_does(planner):
    """A snapshot comes at once, while a plan is in the making, and goes on to the same
    replies."""
    process, task = planner
    events = [observed(step) for step in range(1, 11)]
    for event in events:
        process.observe(event.step, event.tokens_lwe, event.fullest_pair_l)
    snapshot = Snapshot.from_json(process.snapshot())
    left = [event.step for event in snapshot.events]
    assert left[-6:] == [5, 6, 7, 8, 9, 10], "step 5 is being planned, or was not begun"
    expected = Snapshot(new_planner()[1].planner, tuple(events)).settled(task)
    assert snapshot.settled(task).to_json() == expected.to_json()
    for reply in expected.replies:
        own, text, waited_sec = process.collect(reply.step)
        assert own == reply
        assert text == reply.to_json()
        assert waited_sec > 0.1
    assert not Snapshot.from_json(process.snapshot()).replies


def test_a_process_that_is_killed_is_noticed(planner):
    process, _ = planner
    process.observe(5, observed(5).tokens_lwe, observed(5).fullest_pair_l)
    os.kill(process.pid, signal.SIGKILL)
    words = rf"the planner's process {process.pid} has ended \(signal 9\)"
    with pytest.raises(OSError, match=words):
        process.collect(5)
    with pytest.raises(OSError, match=words):
        process.observe(6, observed(6).tokens_lwe, observed(6).fullest_pair_l)


def test_signals_to_the_run_do_not_end_the_process(planner):
    process, _ = planner
    process.observe(1, observed(1).tokens_lwe, observed(1).fullest_pair_l)
    process.snapshot()  # it has begun
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    process.snapshot()


def test_the_process_starts_without_jax():
    code = "import sys, train.balance.planner_main; print(sorted(sys.modules))"
    words = [sys.executable, "-c", code]
    names = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert not {"'jax'", "'gin'", "'orbax'"} & set(names.stdout[1:-2].split(", "))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_killed_in_the_middle_of_a_plan_under_every_policy(tmp_path, policy):
    """The planner has not yet taken the loads of a step before the save, and decides
    for it again when the run goes on. A relayout pays, and may wait at the save."""
    calibration = speeds(tmp_path / "cheap.json", MESH)
    params = [*SHORT, f"Balance.policy = '{policy}'"]
    params.append(f"Balance.calibration = '{calibration}'")
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert run(whole, *params, gin_file=BALANCED).code == 0
    decisions = [x for x in metric_lines(whole) if "decision" in x]
    assert all(x["step"] == x["decision"]["step"] + 3 for x in decisions)
    meta = killed_in_a_plan(run_dir, SAVED_STEP, *params)
    planner = BalanceRecord.from_json(meta["balance"]).planner
    assert Snapshot.from_json(planner).events[0].step == 10
    ended = run(run_dir, *params, gin_file=BALANCED)
    assert ended.code == 0, ended.err
    assert_same_run(run_dir, whole)


@pytest.mark.slow
@pytest.mark.long
def test_a_planner_that_dies_ends_the_run_and_the_next_start_resumes(tmp_path):
    """A run whose plans are late waits, and says so."""
    params = ["Checkpoint.every_steps = 6", "Train.num_steps = 14"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    with slow_plans(1.0):
        ended = run(whole, *params, gin_file=BALANCED)
    assert ended.code == 0, ended.err
    assert re.search(r"step 12  waited \d\.\d s for the plan of step 10: ", ended.out)
    lines = map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
    assert max(x.get("plan_wait_msec", 0) for x in lines) > 50
    with slow_plans(60), Live(run_dir, *params, gin_file=BALANCED) as live:
        log = run_dir / "metrics.jsonl"
        live.wait_until(lambda: log.is_file() and log.read_bytes(), "a step")
        (planner,) = planners(live.process.pid)
        os.kill(planner, signal.SIGKILL)
        ended = live.end()
    assert ended.code == 3
    words = rf"error: the planner's process {planner} has ended \(signal 9\)"
    assert len(re.findall(words, ended.err)) == 1
    assert run(run_dir, *params, gin_file=BALANCED).code == 0
    assert_same_run(run_dir, whole)
