"""Test which checkpoints are kept, going back to an older one, and bad records."""

import json
import pathlib

import pytest

from moejax.config import Checkpoint
from train.checkpoint.load import find_checkpoints
from train.checkpoint.record import (
    DamagedCheckpointError,
    go_back,
    list_steps,
    make_record,
    newest_meta,
    num_written_bytes,
    read_record,
    step_before,
    steps_to_remove,
)


def records(*steps_and_losses, num_skipped: int = 0) -> list[dict]:
    return [
        make_record(step, {}, {}, loss, num_skipped) for step, loss in steps_and_losses
    ]


SCORED = records((1, 3.0), (2, 1.0), (3, 2.0), (4, None))


@pytest.mark.parametrize(
    ("steps", "good", "keep_last", "keep_best", "removed"),
    [
        ([1, 2, 3, 4], SCORED, 1, 0, [1, 2, 3]),
        ([1, 2, 3, 4], SCORED, 1, 1, [1, 3]),
        ([1, 2, 3, 4], SCORED, 2, 1, [1]),
        # Damaged ones (1 and 9) go with their age, and newer ones stay.
        ([1, 2, 3, 9], records((2, None), (3, None)), 1, 0, [1, 2]),
    ],
)
def test_the_newest_and_the_best_are_kept(steps, good, keep_last, keep_best, removed):
    cfg = Checkpoint(keep_last=keep_last, keep_best=keep_best)
    assert steps_to_remove(steps, good, cfg) == removed


@pytest.mark.parametrize("keep_last", [1, 3])
def test_the_checkpoint_from_before_a_streak_stays_as_long_as_it_lasts(keep_last):
    """Saves every 4 steps; all updates from step 11 to 59 are skipped."""
    cfg, there = Checkpoint(keep_last=keep_last, keep_best=0), []
    for step in range(4, 100, 4):
        num_skipped = step - 10 if 10 < step < 60 else 0
        there += records((step, None), num_skipped=num_skipped)
        gone = steps_to_remove([x["step"] for x in there], there, cfg)
        there = [x for x in there if x["step"] not in gone]
        if num_skipped:
            assert step_before(there, updated_step=10) == 8
    assert [x["step"] for x in there] == [100 - 4 * i for i in range(keep_last, 0, -1)]


def test_parameters_whose_gradient_is_not_finite_are_the_second_choice():
    """Step 8 has the parameters of the streak, and step 4 has older ones."""
    four, eight = records((4, None), (8, None))
    streak = records((12, None), num_skipped=4)
    assert step_before([four, eight, *streak], 8) == 4
    assert step_before([eight, *streak], 8) == 8
    assert step_before(streak, 8) is None


@pytest.fixture
def run_dir(tmp_path):
    """A run directory with records of steps 4, 8 and 12, and a summary."""
    for step in (4, 8, 12):
        write_record(tmp_path, step, json.dumps(make_record(step, {}, {"of": step})))
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "checkpoints" / "8.later").mkdir()
    return tmp_path


def write_record(run_dir: pathlib.Path, step: int, text: str) -> None:
    folder = run_dir / "checkpoints" / str(step) / "record"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata").write_text(text)


def names(run_dir) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_later_checkpoints_are_renamed_and_none_is_lost(run_dir):
    seen = []
    assert len(go_back(run_dir, 4, seen.append)) == 3
    assert seen == [{"of": 4}]
    assert names(run_dir) == ["12.later", "4", "8.later", "8.later-2"]
    assert list_steps(run_dir / "checkpoints") == [4]
    assert (run_dir / "summary.json.later").exists()
    assert go_back(run_dir, 4, seen.append) == []


def test_a_step_that_is_not_there_or_damaged_is_refused_and_nothing_changes(run_dir):
    before = names(run_dir)

    def refuse(meta):
        raise ValueError("of another model")

    with pytest.raises(ValueError, match="no checkpoint of this step; it has 4, 8, 12"):
        go_back(run_dir, 5, print)
    with pytest.raises(ValueError, match="of another model"):
        go_back(run_dir, 8, refuse)
    write_record(run_dir, 4, "{}")
    with pytest.raises(ValueError, match=r"checkpoint .*/4 is damaged"):
        go_back(run_dir, 4, print)
    assert names(run_dir) == before
    assert (run_dir / "summary.json").exists()


@pytest.mark.parametrize("text", ["[]", "{", "{}", "[" * 10**5, '{"a":[' * 5000])
def test_what_is_no_record_is_damaged(tmp_path, text):
    write_record(tmp_path, 7, text)
    with pytest.raises(DamagedCheckpointError, match="its record: "):
        read_record(tmp_path / "checkpoints", 7)
    assert newest_meta(tmp_path / "checkpoints") is None
    with pytest.raises(ValueError, match=r"checkpoint 7 in .* is damaged: its record"):
        find_checkpoints(tmp_path)


def test_written_bytes_grow_and_links_are_not_followed(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1000))
    before = num_written_bytes(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path)
    assert before <= num_written_bytes(tmp_path) < before + 1000
    assert num_written_bytes(tmp_path / "nothing") == 0
