"""Test that a record that is nested too deeply is a damaged one."""

import pytest

from train.checkpoint.load import find_checkpoints
from train.checkpoint.record import DamagedCheckpointError, newest_meta, read_record


@pytest.mark.parametrize("text", ["[" * 10**5, '{"meta": ' * 10**5, '{"a":[' * 5000])
def test_a_deeply_nested_record_is_damaged(tmp_path, text):
    directory = tmp_path / "checkpoints"
    record = directory / "7" / "record" / "metadata"
    record.parent.mkdir(parents=True)
    record.write_text(text)
    with pytest.raises(DamagedCheckpointError, match="its record: RecursionError"):
        read_record(directory, 7)
    assert newest_meta(directory) is None
    with pytest.raises(ValueError, match=r"checkpoint 7 in .* is damaged: its record"):
        find_checkpoints(tmp_path)
