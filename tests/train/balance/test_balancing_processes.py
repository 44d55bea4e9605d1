"""All processes of a run adopt the same plan at the same step, even if one is slow."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.close import assert_close
from tests.support.run_main import metric_lines
from tests.support.watched_run import BALANCED, MESH, run_here, speeds, watched
from tests.support.workers import LiveWorkers

pytestmark = [pytest.mark.slow, pytest.mark.long]  # minutes, with all programs cold
PROMISED = "one in a million: only the order of sums between devices differs"
STOPPED_SEC, RUNNING_SEC = 0.1, 0.2
COUNTED = (
    "rows_lw", "fullest_pair", "rounds", "device_max_over_bound",
    "expert_max_over_mean",
)  # fmt: skip


def test_a_slow_process_adopts_with_the_others(tmp_path):
    path = speeds(tmp_path / "speeds.json", MESH)
    params = ["Balance.max_slots_per_device = 3", f"Balance.calibration = '{path}'"]
    alone, run_dir = tmp_path / "alone", tmp_path / "workers"
    with watched() as house:
        run_here(house, alone, *params)
    balanced = [f"--gin_file={BALANCED}"]  # the last file wins
    with LiveWorkers(run_dir, 4, *params, of_main=balanced) as live:
        live.wait_for_text("compiled for")
        with slow_down(live.pids()[0]):
            ended = live.end()
    assert ended.code == 0, ended.err
    decisions, expected = read_decisions(run_dir), read_decisions(alone)
    assert {x["kind"] for x in decisions} >= {"swap", "relayout"}
    assert decisions == expected
    logs = [run_dir / "logs" / f"process-{i}.log" for i in range(1, 4)]
    adopted = [
        find_adoptions(text) for text in (ended.out, *(x.read_text() for x in logs))
    ]
    assert len(adopted[0]) >= 3
    assert all(each == adopted[0] for each in adopted)
    assert_close(read_losses(run_dir), read_losses(alone), factor=0.1, reason=PROMISED)


def test_two_processes_split_as_one(tmp_path):
    """Routing is recorded, so all counts of all steps are the same integers."""
    alone, run_dir = tmp_path / "alone", tmp_path / "workers"
    params = (
        "Balance.policy = 'micromoe'", "Dispatch.group = 'data_expert'",
        "Train.num_steps = 24",
    )  # fmt: skip
    with watched() as house:
        run_here(house, alone, *params)
    balanced = [f"--gin_file={BALANCED}"]
    with LiveWorkers(run_dir, 2, *params, of_main=balanced) as live:
        ended = live.end()
    assert ended.code == 0, ended.err
    counted, expected = (
        [{name: x[name] for name in COUNTED} for x in metric_lines(r) if "loss" in x]
        for r in (run_dir, alone)
    )
    assert len(counted) == 24
    assert counted == expected


@contextlib.contextmanager
def slow_down(pid: int) -> Iterator[None]:
    """Stop the process for a third of the time."""
    is_over = threading.Event()

    def brake() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not is_over.wait(RUNNING_SEC):
                os.kill(pid, signal.SIGSTOP)
                is_over.wait(STOPPED_SEC)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=brake)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def read_decisions(run_dir) -> list[dict]:
    return [x["decision"] for x in metric_lines(run_dir) if "decision" in x]


def find_adoptions(text: str) -> list[tuple[str, str]]:
    """Return the step and digest of each plan that the process adopted."""
    return re.findall(r"step (\d+)  adopted (\w+)", text)


def read_losses(run_dir) -> np.ndarray:
    return np.float32([x["loss"] for x in metric_lines(run_dir) if "loss" in x])
