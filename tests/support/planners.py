"""Runs whose planner is held at a plan, and the ids of their planner processes."""

import contextlib
import os
import pathlib
import signal
import tempfile
from collections.abc import Callable, Iterator
from unittest import mock

from moejax.balance.planning import Observed
from tests.support.pids import wait_until_gone
from tests.support.run_main import ROOT, Live, checkpoint_record
from tests.support.watched_run import BALANCED
from train.balance.record import BalanceRecord

SLOW_PLANNER = ROOT / "tests" / "support" / "slow_planner"


@contextlib.contextmanager
def held_plans(*steps: int) -> Iterator[Callable[[int], None]]:
    """Hold the plans of these steps in all planners that are started in the block.
    Yield a function that lets the plan of a step go on."""
    with tempfile.TemporaryDirectory(prefix="held-") as folder:
        for step in steps:
            pathlib.Path(folder, str(step)).touch()
        words = {"MOEJAX_HELD_PLANS": folder, "PYTHONPATH": str(SLOW_PLANNER)}
        with mock.patch.dict(os.environ, words):
            yield lambda step: pathlib.Path(folder, str(step)).unlink()


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


def killed_in_a_plan(
    run_dir: pathlib.Path, saved_step: int, asked_step: int, *params: str
) -> None:
    """Kill a run and its planner after a save, while the plan of `asked_step` is in the
    making. Assert that the saved planner has not taken the loads of that step."""
    with held_plans(asked_step), Live(run_dir, *params, gin_file=BALANCED) as live:
        saved = run_dir / "checkpoints" / str(saved_step)
        live.wait_until(saved.is_dir, f"checkpoint {saved_step}")
        (planner,) = planners(live.process.pid)
        assert live.end(signal.SIGKILL).code == -signal.SIGKILL
        wait_until_gone([planner])
    meta = checkpoint_record(run_dir, saved_step)["meta"]
    snapshot = BalanceRecord.from_json(meta["balance"]).planner
    steps = [x.step for x in snapshot.events if isinstance(x, Observed)]
    assert asked_step in steps
