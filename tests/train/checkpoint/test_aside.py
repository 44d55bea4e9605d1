"""Test going back to an older checkpoint: what is renamed, and what is refused."""

import json

import pytest

from train.checkpoint.aside import go_back
from train.checkpoint.record import list_steps, make_record
from train.checkpoint.retention import Saved


@pytest.fixture
def run_dir(tmp_path):
    """A run directory with records of steps 4, 8 and 12, and a summary."""
    for step in (4, 8, 12):
        folder = tmp_path / "checkpoints" / str(step) / "record"
        folder.mkdir(parents=True)
        record = make_record(Saved(step, None), {}, {"of": step})
        (folder / "metadata").write_text(json.dumps(record))
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "checkpoints" / "8.later").mkdir()
    return tmp_path


def names(run_dir) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_later_checkpoints_are_renamed_and_none_is_lost(run_dir):
    seen = []
    lines = go_back(run_dir, 4, seen.append)
    assert seen == [{"of": 4}]
    assert names(run_dir) == ["12.later", "4", "8.later", "8.later-2"]
    assert list_steps(run_dir / "checkpoints") == [4]
    assert (run_dir / "summary.json.later").exists()
    assert len(lines) == 3
    assert lines[-1].endswith(f"8 renamed to {run_dir}/checkpoints/8.later-2")
    assert go_back(run_dir, 4, seen.append) == []


def test_a_step_that_is_not_there_or_damaged_is_refused_and_nothing_changes(run_dir):
    before = names(run_dir)

    def refuse(meta):
        raise ValueError("of another model")

    with pytest.raises(ValueError, match="no checkpoint of this step; it has 4, 8, 12"):
        go_back(run_dir, 5, print)
    with pytest.raises(ValueError, match="of another model"):
        go_back(run_dir, 8, refuse)
    (run_dir / "checkpoints" / "4" / "record" / "metadata").write_text("{}")
    with pytest.raises(ValueError, match=r"checkpoint .*/4 is damaged"):
        go_back(run_dir, 4, print)
    with pytest.raises(ValueError, match="it has none"):
        go_back(run_dir / "none", 4, print)
    assert names(run_dir) == before
    assert (run_dir / "summary.json").exists()
