"""Test that several processes are one run, with the results of one process.

Processes are killed, stopped and restarted, and their number changes.
"""

import os
import pathlib
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest

from tests.support.close import assert_close
from tests.support.run_main import checkpoint_record, metric_lines, run
from tests.support.workers import WORKERS, LiveWorkers, run_workers, sample_ids

PREEMPTED = 75
NUM_STEPS = 20
PROMISED = "one in a million: only the order of sums between devices differs"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process with eight devices."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    ended = run(run_dir, gin_file=WORKERS)
    assert (ended.code, ended.err) == (0, "")
    return run_dir


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The undisturbed run of two processes with four devices each."""
    run_dir = tmp_path_factory.mktemp("pair") / "run"
    ended = run_workers(run_dir, 2)
    assert ended.code == 0, ended.err
    return run_dir


def losses(run_dir) -> np.ndarray:
    """Return the loss of every step, and assert that each step is logged once."""
    lines = [x for x in metric_lines(run_dir) if "loss" in x]
    assert [x["step"] for x in lines] == list(range(1, len(lines) + 1))
    return np.float32([x["loss"] for x in lines])


def assert_same_end(run_dir, expected_dir) -> None:
    """Assert that two runs have the same metrics, samples and final arrays, bit for
    bit."""
    assert metric_lines(run_dir) == metric_lines(expected_dir)
    assert sample_ids(run_dir) == sample_ids(expected_dir)
    arrays, expected = (
        checkpoint_record(x, NUM_STEPS)["arrays"] for x in (run_dir, expected_dir)
    )
    assert arrays == expected


def assert_equal_to_one(run_dir, alone) -> None:
    """Assert that a run has the losses and the samples of the run of one process."""
    assert_close(losses(run_dir), losses(alone), factor=0.1, reason=PROMISED)
    assert len(losses(run_dir)) == NUM_STEPS
    ids = sample_ids(run_dir)
    assert ids == sample_ids(alone)
    assert sorted(ids) == list(range(1, NUM_STEPS + 1))
    assert {len(step_ids) for step_ids in ids.values()} == {16}


@pytest.mark.slow
def test_two_processes_are_one(pair, alone):
    assert_equal_to_one(pair, alone)
    log = (pair / "logs" / "process-1.log").read_text()
    assert "compiled for 8 devices" in log
    assert "step 20/20" in log


@pytest.mark.slow
@pytest.mark.long
def test_four_processes_are_one(alone, tmp_path):
    ended = run_workers(tmp_path / "run", 4)
    assert ended.code == 0, ended.err
    assert_equal_to_one(tmp_path / "run", alone)


@pytest.mark.long
@pytest.mark.parametrize("second", [2, 4])
def test_other_numbers_of_processes_lose_and_repeat_no_sample(alone, tmp_path, second):
    """A run of two processes, then two or four, then one has the samples of one
    process.

    The newest checkpoint is damaged after the first part, and all processes must agree
    to set it aside.
    """
    run_dir = tmp_path / "run"
    assert run_workers(run_dir, 2, "Train.num_steps = 8").code == 0
    damage(run_dir / "checkpoints" / "8" / "state")
    workers = run_workers(run_dir, second, "Train.num_steps = 14")
    assert workers.code == 0, workers.err
    assert "CORRUPT CHECKPOINT 8 renamed" in workers.out
    assert "resumed at step 4\n" in workers.out
    ended = run(run_dir, gin_file=WORKERS)
    assert (ended.code, ended.err) == (0, "")
    assert "resumed at step 14" in ended.out
    assert_equal_to_one(run_dir, alone)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 20], ids=["once", "twenty"])
def test_workers_that_lose_a_process_restart_and_are_the_same_run(
    pair, tmp_path, count
):
    """Killing a process at any time, once or twice, leads to restarts and to the
    results of the undisturbed run."""
    rng = random.Random(count)
    for trial in range(count):
        run_dir = tmp_path / f"run{trial}"
        num_kills = 1 + trial % 2
        restarts = ["--max_restarts", "3"]
        with LiveWorkers(run_dir, 2, flags=restarts, of_main=["--fresh"]) as live:
            for kill in range(num_kills):
                if trial % 3 == 1:
                    live.wait_until(lambda: len(live.pids()) == 2, "two processes")
                    time.sleep(rng.uniform(0, 6))
                else:
                    live.wait_for_text("compiled for", kill + 1)
                    time.sleep(rng.uniform(0, 1.5))
                kill_one(live, rng)
            ended = live.end()
        assert ended.code == 0, ended.err
        assert ended.record["restarts"] == num_kills
        assert not list(tmp_path.glob(f"run{trial}.*")), "--fresh archives no restart"
        assert_same_end(run_dir, pair)


@pytest.mark.slow
@pytest.mark.long
def test_sigterm_saves_one_step_on_all_processes(pair, tmp_path):
    rng = random.Random(10)
    for trial in range(10):
        run_dir = tmp_path / f"run{trial}"
        with LiveWorkers(run_dir, 2, "Train.num_steps = 100000") as live:
            live.wait_for_text("compiled for")
            time.sleep(rng.uniform(0.5, 2.0))
            ended = live.end(signal.SIGTERM)
        assert ended.code == PREEMPTED, ended.err
        assert set(ended.record["attempts"][-1]["codes"]) == {PREEMPTED}
        stopped = re.search(r"stopped by signal 15 at step (\d+)", ended.out)
        step = int(stopped[1])
        log = (run_dir / "logs" / "process-1.log").read_text()
        assert f"stopped by signal 15 at step {step};" in log
        assert checkpoint_record(run_dir, step)["step"] == step
        assert len(losses(run_dir)) == step
    shared = min(step, NUM_STEPS)
    np.testing.assert_array_equal(losses(run_dir)[:shared], losses(pair)[:shared])


@pytest.mark.long
def test_sigterm_before_the_first_step_of_resumed_workers_is_not_lost(pair, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(pair, run_dir)
    with LiveWorkers(run_dir, 2, "Train.num_steps = 100000") as live:
        live.wait_for_text(f"resumed at step {NUM_STEPS}")
        ended = live.end(signal.SIGTERM)
    assert ended.code == PREEMPTED, ended.err
    assert f"stopped by signal 15 at step {NUM_STEPS + 1}; all is saved" in ended.out


@pytest.mark.long
def test_a_stopped_process_is_reported_with_stacks(tmp_path):
    """The launcher reports a stopped process of the trainer with stacks of Python, as
    test_local.py tests for a small program."""
    run_dir = tmp_path / "run"
    flags = ["--max_restarts", "0", "--stopped_sec", "2"]
    with LiveWorkers(run_dir, 2, "Train.num_steps = 100000", flags=flags) as live:
        live.wait_for_steps(2)
        victim = live.pids()[1]
        os.kill(victim, signal.SIGSTOP)
        ended = live.end()
    assert ended.code not in (0, PREEMPTED)
    text = ended.out + ended.err
    assert re.search(rf"process 1 .*{victim}.*stopped", text)
    assert "most recent call first" not in text
    stacks = (run_dir / "logs" / "process-1.log").read_text()
    assert "most recent call first" in stacks
    assert "train/loop.py" in stacks


@pytest.mark.slow
@pytest.mark.long
def test_a_process_that_hangs_ends_with_stacks(tmp_path):
    """The watchdog of the other process ends the run with stacks; the launcher is set
    not to notice the stopped process."""
    run_dir = tmp_path / "run"
    flags = ["--max_restarts", "0", "--stopped_sec", "1000"]
    limit = "Processes.watchdog_sec = 10"
    with LiveWorkers(
        run_dir, 2, "Train.num_steps = 100000", limit, flags=flags
    ) as live:
        live.wait_for_steps(2)
        os.kill(live.pids()[1], signal.SIGSTOP)
        ended = live.end()
    assert ended.code not in (0, PREEMPTED)
    text = ended.out + ended.err
    assert re.search(r"WATCHDOG .*step \d+ takes", text)
    logs = [path.read_text() for path in (run_dir / "logs").iterdir()]
    assert any("Timeout (0:00:10)!" in log for log in logs)
    assert "Timeout" not in text


def test_a_mesh_that_processes_cannot_share_is_refused(tmp_path):
    ended = run_workers(tmp_path / "run", 3)
    assert ended.code == 2
    assert "num_simulated_devices=8 cannot be shared by 3 processes" in ended.err
    assert ended.record["restarts"] == 0


def kill_one(live: LiveWorkers, rng: random.Random) -> None:
    """Kill one of the processes, and wait until all have ended."""
    pids = live.pids()
    os.kill(rng.choice(pids), signal.SIGKILL)
    live.wait_until(lambda: not living(pids), "the end of all processes")


def damage(folder: pathlib.Path) -> None:
    """Flip a bit in the middle of the largest file."""
    path = max((x for x in folder.rglob("*") if x.is_file()), key=os.path.getsize)
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)


def living(pids: list[int]) -> list[int]:
    """Return the ids of the processes that still exist."""
    return [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]
