"""Runs of several processes that are killed, stopped and restarted, and whose number
changes. tests/train/test_runs.py compares two processes with one.
"""

import functools
import os
import pathlib
import re
import shutil
import signal

import pytest

from tests.support.run_main import checkpoint_record, metric_lines, run
from tests.support.workers import (
    WORKERS,
    LiveWorkers,
    assert_same_training,
    run_workers,
    sample_ids,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]
PREEMPTED = 75
NUM_STEPS = 20


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


def test_other_numbers_of_processes_lose_and_repeat_no_sample(alone, tmp_path):
    """A run of two processes, then four, then one has the samples of one process.

    The newest checkpoint is damaged after the first part, and all processes must agree
    to set it aside.
    """
    run_dir = tmp_path / "run"
    assert run_workers(run_dir, 2, "Train.num_steps = 8").code == 0
    damage(run_dir / "checkpoints" / "8" / "state")
    workers = run_workers(run_dir, 4, "Train.num_steps = 14")
    assert workers.code == 0, workers.err
    assert "CORRUPT CHECKPOINT 8 renamed" in workers.out
    assert "resumed at step 4\n" in workers.out
    ended = run(run_dir, gin_file=WORKERS)
    assert (ended.code, ended.err) == (0, "")
    assert "resumed at step 14" in ended.out
    assert_same_training(run_dir, alone)


def test_workers_that_lose_a_process_restart_and_are_the_same_run(pair, tmp_path):
    """Metrics, samples and final arrays are the same, bit for bit."""
    run_dir, flags = tmp_path / "run", ["--max_restarts", "3"]
    with LiveWorkers(run_dir, 2, flags=flags, of_main=["--fresh"]) as live:
        for attempt in (1, 2):
            live.wait_for_text("compiled for", attempt)
            folders = [pathlib.Path(f"/proc/{pid}") for pid in live.pids()]
            os.kill(int(folders[attempt - 1].name), signal.SIGKILL)
            is_over = functools.partial(are_gone, folders)
            live.wait_until(is_over, "the end of all processes")
        ended = live.end()
    assert ended.code == 0, ended.err
    assert ended.record["restarts"] == 2
    assert not list(tmp_path.glob("run.*")), "--fresh archives no restart"
    assert metric_lines(run_dir) == metric_lines(pair)
    assert sample_ids(run_dir) == sample_ids(pair)
    arrays, expected = (
        checkpoint_record(x, NUM_STEPS)["arrays"] for x in (run_dir, pair)
    )
    assert arrays == expected


def test_sigterm_saves_one_step_on_all_processes(pair, tmp_path):
    """A signal before the first step of a resumed run is not lost."""
    run_dir = shutil.copytree(pair, tmp_path / "run")
    for line in (f"resumed at step {NUM_STEPS}", "compiled for"):
        with LiveWorkers(run_dir, 2, "Train.num_steps = 100000") as live:
            live.wait_for_text(line)
            ended = live.end(signal.SIGTERM)
        assert ended.code == PREEMPTED, ended.err
        assert set(ended.record["attempts"][-1]["codes"]) == {PREEMPTED}
        stopped = re.search(r"stopped by signal 15 at step (\d+)", ended.out)
        step = int(stopped[1])
        log = (run_dir / "logs" / "process-1.log").read_text()
        assert f"stopped by signal 15 at step {step};" in log
        assert checkpoint_record(run_dir, step)["step"] == step
        steps = [x["step"] for x in metric_lines(run_dir) if "loss" in x]
        assert steps == list(range(1, step + 1))


def test_a_process_that_hangs_ends_with_stacks(tmp_path):
    """The watchdog of the other process ends the run with stacks; the launcher is set
    not to notice the stopped process."""
    run_dir = tmp_path / "run"
    flags = ["--max_restarts", "0", "--stopped_sec", "1000"]
    params = ("Train.num_steps = 100000", "Processes.watchdog_sec = 10")
    with LiveWorkers(run_dir, 2, *params, flags=flags) as live:
        live.wait_for_steps(2)
        os.kill(live.pids()[1], signal.SIGSTOP)
        ended = live.end()
    assert ended.code not in (0, PREEMPTED)
    text = ended.out + ended.err
    assert re.search(r"WATCHDOG .*step \d+ takes", text)
    logs = [path.read_text() for path in (run_dir / "logs").iterdir()]
    assert any("Timeout (0:00:10)!" in log for log in logs)
    assert "Timeout" not in text


def are_gone(folders: list[pathlib.Path]) -> bool:
    return not any(folder.exists() for folder in folders)


def damage(folder: pathlib.Path) -> None:
    """Flip a bit in the middle of the largest file."""
    path = max((x for x in folder.rglob("*") if x.is_file()), key=os.path.getsize)
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)
