"""Runs whose planner is slow, and the ids of their planner processes."""

import contextlib
import os
import pathlib
import signal
from unittest import mock

from tests.support.pids import wait_until_gone
from tests.support.run_main import ROOT, Live, checkpoint_record
from tests.support.watched_run import BALANCED

SLOW_PLANNER = ROOT / "tests" / "support" / "slow_planner"


@contextlib.contextmanager
def slow_plans(sec: float):
    """Let the planners of the runs that are started here need so long for a plan."""
    words = {"MOEJAX_SLOW_PLAN_SEC": str(sec), "PYTHONPATH": str(SLOW_PLANNER)}
    with mock.patch.dict(os.environ, words):
        yield


def planners(run_pid: int) -> list[int]:
    """Return the ids of a run's planner processes."""
    pids = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            stat = path.with_name("stat").read_text().rpartition(") ")[2].split()
            if b"train.balance.planner_main" in words and int(stat[1]) == run_pid:
                pids.append(int(path.parent.name))
    return pids


def killed_in_a_plan(run_dir: pathlib.Path, saved_step: int, *params: str) -> dict:
    """Kill a run and its planner after a save with a plan in the making; return the
    meta record of that save."""
    with slow_plans(0.5), Live(run_dir, *params, gin_file=BALANCED) as live:
        saved = run_dir / "checkpoints" / str(saved_step)
        live.wait_until(saved.is_dir, f"checkpoint {saved_step}")
        (planner,) = planners(live.process.pid)
        assert live.end(signal.SIGKILL).code == -signal.SIGKILL
        wait_until_gone([planner])
    return checkpoint_record(run_dir, saved_step)["meta"]
