"""The planner's process beside a run: late plans, and ends of either side."""

import os
import re
import signal
from unittest import mock

import pytest

from moejax.balance import codec
from moejax.balance.planning import Snapshot
from tests.support.balanced_run import new_planner, observed
from tests.support.planners import held_plans, planners
from tests.support.run_main import Live, run
from tests.support.watched_run import BALANCED, assert_same_run
from train.balance.planner_process import PlannerProcess


@pytest.fixture
def planner():
    """Return a PlannerProcess of the small balancer of tests, its Task, and a function
    that lets the plan of a step go on. Until then each plan is held."""
    task, snapshot = new_planner()
    with held_plans(*range(1, 11)) as release:
        process = PlannerProcess(task, snapshot)
        yield process, task, release
        process.close()


def test_the_process_replies_as_the_planner_does(planner):
    """A snapshot comes while a plan is in the making, and goes on to the same
    replies."""
    process, task, release = planner
    events = [observed(step) for step in range(1, 11)]
    for event in events:
        process.observe(event.step, event.tokens_lwe, event.fullest_pair_l)
    snapshot = process.snapshot()
    left = [event.step for event in snapshot.events]
    assert left[-6:] == [5, 6, 7, 8, 9, 10], "step 5 is being planned, or was not begun"
    expected = Snapshot(new_planner()[1].planner, tuple(events)).settled(task)
    assert codec.dumps(snapshot.settled(task)) == codec.dumps(expected)
    for reply in expected.replies:
        own, _ = collect_late(process, reply.step, release)
        assert own == reply
    assert not process.snapshot().replies


def collect_late(process, step: int, release) -> tuple:
    """Collect the reply for a step whose plan goes on once `collect` waits for it."""
    wait = process._wait

    def release_and_wait(is_so):
        release(step)
        wait(is_so)

    with mock.patch.object(process, "_wait", release_and_wait):
        return process.collect(step)


def test_a_process_that_is_killed_is_noticed(planner):
    process, *_ = planner
    process.observe(5, observed(5).tokens_lwe, observed(5).fullest_pair_l)
    os.kill(process.pid, signal.SIGKILL)
    words = rf"the planner's process {process.pid} has ended \(signal 9\)"
    with pytest.raises(OSError, match=words):
        process.collect(5)
    with pytest.raises(OSError, match=words):
        process.observe(6, observed(6).tokens_lwe, observed(6).fullest_pair_l)


def test_signals_to_the_run_do_not_end_the_process(planner):
    process, *_ = planner
    process.observe(1, observed(1).tokens_lwe, observed(1).fullest_pair_l)
    process.snapshot()  # it has begun
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    process.snapshot()


@pytest.mark.slow
@pytest.mark.long
def test_a_planner_that_dies_ends_the_run_and_the_next_start_resumes(tmp_path):
    params = ["Checkpoint.every_steps = 6", "Train.num_steps = 14"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert run(whole, *params, gin_file=BALANCED).code == 0
    with held_plans(5), Live(run_dir, *params, gin_file=BALANCED) as live:
        log = run_dir / "metrics.jsonl"
        live.wait_until(lambda: has_step(log, 5), "step 5")
        (planner,) = planners(live.process.pid)
        os.kill(planner, signal.SIGKILL)
        ended = live.end()
    assert ended.code == 3
    words = rf"error: the planner's process {planner} has ended \(signal 9\)"
    assert len(re.findall(words, ended.err)) == 1
    assert run(run_dir, *params, gin_file=BALANCED).code == 0
    assert_same_run(run_dir, whole)


def has_step(log, step: int) -> bool:
    """Return whether the file of metrics has a line of this step."""
    return log.is_file() and f'"step": {step},' in log.read_text()
