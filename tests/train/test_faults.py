"""Test runs whose saves fail or whose updates are not finite: they report the fault,
stop after a limit, and lose nothing that was saved."""

import pathlib
import re
import resource

import pytest

from tests.support.run_main import Live, checkpoint_record, metric_lines, run
from tests.support.workers import LiveWorkers

FAILED = 3
ENDLESS = "Train.num_steps = 1000000"
BYTES_OF_LOGS = 2**16
"""Limit on the size of a file: more than the logs of these runs need, and less than the
arrays of a checkpoint."""


def steps_saved(run_dir: pathlib.Path) -> list[int]:
    """Return the steps of all checkpoints in ascending order."""
    names = [path.name for path in (run_dir / "checkpoints").glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


@pytest.mark.long
def test_saves_that_keep_failing_stop_the_run(tmp_path):
    """Three failed saves in a row stop the run, and the last good checkpoint is
    restored.

    A limit on the size of files stands in for a full disk, which would need root.
    """
    run_dir = tmp_path / "run"
    with Live(run_dir, ENDLESS) as live:
        live.wait_until(lambda: steps_saved(run_dir), "the first checkpoint")
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = (BYTES_OF_LOGS, hard)
        resource.prlimit(live.process.pid, resource.RLIMIT_FSIZE, limit)
        ended = live.end()
    assert ended.code == FAILED
    failures = re.findall(
        r"SAVE FAILED, (\d) of 3 in a row: checkpoint (\d+)", ended.out
    )
    assert [count for count, _ in failures[:2]] == ["1", "2"]
    assert ended.out.count("training continues") == 2
    good, last = steps_saved(run_dir)[-1], good_and_last(ended.err)[1]
    assert good_and_last(ended.err) == (good, last)
    assert last == good + 21
    assert ended.record["error"] == ended.err.removeprefix("error: ").strip()
    steps = [x["step"] for x in metric_lines(run_dir) if "loss" in x]
    assert steps == list(range(1, steps[-1] + 1))
    assert steps[-1] >= last
    assert not list((run_dir / "checkpoints").glob("*tmp*"))
    again = run(run_dir, f"Train.num_steps = {good + 1}")
    assert (again.code, again.err) == (0, "")
    assert f"resumed at step {good}\n" in again.out


def good_and_last(err: str) -> tuple[int, int]:
    """Return the steps of the last good checkpoint and of the lost one, from the line
    that the run ends with."""
    match = re.fullmatch(
        r"error: SAVE FAILED, 3 of 3 in a row: checkpoint (\d+) in .*; the last good "
        r"one is (\d+): .*\n",
        err,
    )
    assert match, err
    return int(match[2]), int(match[1])


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1])
def test_a_save_that_fails_on_one_process_ends_all(tmp_path, index):
    """The others learn of it, though they wait in orbax for that process, and the
    launcher does not start again."""
    run_dir = tmp_path / "run"
    with LiveWorkers(run_dir, 2, ENDLESS, flags=["--max_restarts", "1"]) as live:
        live.wait_until(lambda: steps_saved(run_dir), "the first checkpoint")
        pids, num_steps = live.pids(), len(metric_lines(run_dir))
        limit = (BYTES_OF_LOGS // 4, resource.RLIM_INFINITY)
        resource.prlimit(pids[index], resource.RLIMIT_FSIZE, limit)
        live.wait_until(
            lambda: len(metric_lines(run_dir)) >= num_steps + 8 or not live.pids(),
            "the next save",
        )
        ended = live.end()
    assert (ended.code, ended.record["restarts"]) == (FAILED, 0)
    assert re.search(
        r"error: SAVE FAILED: checkpoint \d+ in .*/run/checkpoints: .*File too large; "
        r"it needs [\d,]+ bytes, and [\d,]+ are free in .*/run/checkpoints; the last "
        r"good one is \d+: free disk space, and start the run again\n",
        ended.err,
    )
    assert f"process {index} has ended the run: SAVE FAILED" in ended.err


@pytest.mark.long
def test_a_run_that_diverged_goes_on_from_before_with_a_lower_rate(tmp_path):
    """The checkpoint from before the streak is kept, and named where the run ends."""
    run_dir = tmp_path / "run"
    common = ("Train.accumulate_steps = 1", "Checkpoint.every_steps = 4")
    common += ("Checkpoint.keep_last = 1", "Checkpoint.keep_best = 0")
    assert run(run_dir, *common, "Train.num_steps = 8").code == 0
    diverging = ("Train.num_steps = 30", "Optimizer.learning_rate = 1e30")
    ended = run(run_dir, *common, *diverging)
    assert ended.code == FAILED
    assert ended.err.count("\n") == 1
    assert "up to step 19" in ended.err
    assert "those of step 9" in ended.err
    assert "--from_step=8" in ended.err
    assert steps_saved(run_dir) == [8, 16]

    again = run(run_dir, *common, "Train.num_steps = 20", flags=["--from_step=8"])
    assert (again.code, again.err) == (0, "")
    assert "checkpoints/16 renamed to " in again.out
    assert "resumed at step 8\n" in again.out
    lines = [x for x in metric_lines(run_dir) if "loss" in x]
    assert [x["step"] for x in lines] == list(range(1, 21))
    assert all(x["loss"] is not None and not x["skipped"] for x in lines)
    assert steps_saved(run_dir) == [20]
    assert (run_dir / "checkpoints" / "16.later" / "state").is_dir()

    finished = run(run_dir, *common, "Train.num_steps = 20", flags=["--from_step=8"])
    assert finished.code == 2
    assert "no checkpoint of this step; it has 20" in finished.err


@pytest.mark.long
def test_updates_that_are_not_finite_change_nothing_and_stop_the_run(tmp_path):
    """Updates that are not finite are skipped, and five in a row stop the run.

    With a learning rate of 1e30 the first update is finite, and no gradient after it.
    """
    ended = run(
        tmp_path / "run",
        "Optimizer.learning_rate = 1e30",
        "Optimizer.max_skipped_in_a_row = 5",
        "Train.accumulate_steps = 1",
        "Checkpoint.every_steps = 1",
        "Checkpoint.keep_last = 20",
    )
    assert ended.code == FAILED
    assert ended.err.count("\n") == 1
    assert "up to step 6" in ended.err
    assert "those of step 1;" in ended.err
    lines = [x for x in metric_lines(tmp_path / "run") if "loss" in x]
    assert [x["skipped_in_a_row"] for x in lines] == [0, 1, 2, 3, 4, 5]
    assert [x["skipped"] for x in lines] == [False] + 5 * [True]
    assert ended.out.count("loss or gradient not finite, update skipped") == 5

    saved = {step: arrays(tmp_path / "run", step) for step in (1, 2, 5)}
    assert saved[2] == saved[5] == saved[1]
    assert len(saved[1]) > 10


def arrays(run_dir: pathlib.Path, step: int) -> dict:
    """Return the checksums of a checkpoint's parameters, router bias and moments,
    without the counters."""
    checksums = checkpoint_record(run_dir, step)["arrays"]
    counters = ("step", "skipped_in_a_row")
    return {k: v for k, v in checksums.items() if not any(c in k for c in counters)}
