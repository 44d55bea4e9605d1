"""Test which checkpoints are kept, with the one to go back to, and what is removed."""

import pytest

from moejax.config import Checkpoint
from train.checkpoint.retention import Saved, remove, step_before, steps_to_remove


def removed(saved: list[Saved], keep_last: int = 2, keep_best: int = 0) -> list[int]:
    cfg = Checkpoint(keep_last=keep_last, keep_best=keep_best)
    return steps_to_remove([x.step for x in saved], saved, cfg)


def test_the_newest_and_the_best_are_kept():
    saved = [Saved(1, 3.0), Saved(2, 1.0), Saved(3, 2.0), Saved(4, None)]
    assert removed(saved, keep_last=1) == [1, 2, 3]
    assert removed(saved, keep_last=1, keep_best=1) == [1, 3]
    assert removed(saved, keep_last=2, keep_best=1) == [1]


def test_damaged_ones_go_with_their_age_and_newer_ones_stay():
    cfg = Checkpoint(keep_last=1, keep_best=0)
    assert steps_to_remove([1, 2, 3, 9], [Saved(2, None), Saved(3, None)], cfg) == [
        1,
        2,
    ]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_checkpoint_from_before_a_streak_stays_as_long_as_it_lasts(keep_last):
    """Saves every 4 steps; all updates from step 11 on are skipped."""
    there: list[Saved] = []
    for step in range(4, 60, 4):
        there.append(Saved(step, None, max(0, step - 10)))
        gone = removed(there, keep_last)
        there = [x for x in there if x.step not in gone]
    assert 8 in [x.step for x in there]
    assert step_before(there, updated_step=10) == 8
    for step in range(60, 100, 4):
        there.append(Saved(step, None))
        gone = removed(there, keep_last)
        there = [x for x in there if x.step not in gone]
    assert [x.step for x in there] == [100 - 4 * i for i in range(keep_last, 0, -1)]


def test_parameters_whose_gradient_is_not_finite_are_the_second_choice():
    """Step 8 has the parameters of the streak, and step 4 has older ones."""
    streak = [Saved(12, None, 4), Saved(16, None, 8)]
    assert step_before([Saved(4, None), Saved(8, None), *streak], 8) == 4
    assert step_before([Saved(8, None), *streak], 8) == 8
    assert step_before(streak, 8) is None
    assert removed([Saved(4, None), Saved(8, None), *streak]) == [8]


def test_links_and_files_stay_and_are_named(tmp_path):
    """A link stays, for its target is somebody else's, in the directory or outside."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    folder = tmp_path / "ck"
    (folder / "3" / "state").mkdir(parents=True)
    (folder / "1").symlink_to(precious)
    (folder / "2").touch()
    (folder / "4").symlink_to(tmp_path / "nothing")
    lines = remove(folder, [1, 2, 3, 4])
    assert sorted(x.name for x in folder.iterdir()) == ["1", "2", "4"]
    assert (precious / "file").exists()
    assert [line.split(" and stays")[0] for line in lines] == [
        f"old checkpoint {folder}/1 is a symbolic link",
        f"old checkpoint {folder}/2 is no directory",
        f"old checkpoint {folder}/4 is a symbolic link",
    ]
