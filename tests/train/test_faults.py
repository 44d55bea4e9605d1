"""A run whose updates are not finite skips them, stops after a limit, and goes on from
a checkpoint before them. checkpoint/test_saves.py has saves that fail."""

import pathlib

import pytest

from tests.support.run_main import checkpoint_record, metric_lines, run

FAILED, BAD_INPUT = 3, 2
COMMON = (
    "Train.accumulate_steps = 1", "Checkpoint.every_steps = 4",
    "Checkpoint.keep_last = 2", "Checkpoint.keep_best = 0",
    "Optimizer.max_skipped_in_a_row = 8",
)  # fmt: skip


@pytest.mark.long
def test_a_run_that_diverged_goes_on_from_before_with_a_lower_rate(tmp_path):
    """With a learning rate of 1e30 one more update is finite, and no gradient after it.
    The checkpoint from before is kept, and named where the run ends."""
    run_dir = tmp_path / "run"
    assert run(run_dir, *COMMON, "Train.num_steps = 8").code == 0
    diverging = ("Train.num_steps = 30", "Optimizer.learning_rate = 1e30")
    ended = run(run_dir, *COMMON, *diverging)
    assert ended.code == FAILED
    assert ended.err.count("\n") == 1
    for words in ("up to step 17", "those of step 9", "--from_step=8"):
        assert words in ended.err
    lines = [x for x in metric_lines(run_dir) if "loss" in x]
    assert [x["skipped_in_a_row"] for x in lines] == [*[0] * 9, *range(1, 9)]
    assert [x["skipped"] for x in lines] == [*[False] * 9, *[True] * 8]
    assert steps_saved(run_dir) == [8, 12, 16]
    assert arrays(run_dir, 12) == arrays(run_dir, 16) != arrays(run_dir, 8)

    again = run(run_dir, *COMMON, "Train.num_steps = 20", flags=["--from_step=8"])
    assert (again.code, again.err) == (0, "")
    assert "resumed at step 8\n" in again.out
    lines = [x for x in metric_lines(run_dir) if "loss" in x]
    assert [x["step"] for x in lines] == list(range(1, 21))
    assert not any(x["skipped"] for x in lines)
    assert steps_saved(run_dir) == [16, 20]
    assert (run_dir / "checkpoints" / "16.later" / "state").is_dir()
    finished = run(run_dir, *COMMON, "Train.num_steps = 20", flags=["--from_step=8"])
    assert finished.code == BAD_INPUT
    assert "no checkpoint of this step; it has 16, 20" in finished.err


def steps_saved(run_dir: pathlib.Path) -> list[int]:
    """Return the steps of all checkpoints in ascending order."""
    names = [path.name for path in (run_dir / "checkpoints").glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


def arrays(run_dir: pathlib.Path, step: int) -> dict:
    """Return the checksums of a checkpoint's parameters, router bias and moments,
    without the counters."""
    checksums = checkpoint_record(run_dir, step)["arrays"]
    counters = ("step", "skipped_in_a_row")
    return {k: v for k, v in checksums.items() if not any(c in k for c in counters)}
