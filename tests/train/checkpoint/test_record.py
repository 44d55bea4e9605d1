"""Test that a record that is nested too deeply, or has other fields than a save writes,
is a damaged one."""

import json

import pytest

from train.checkpoint.load import find_checkpoints
from train.checkpoint.record import (
    DamagedCheckpointError,
    newest_meta,
    read_record,
    record_sha256,
)


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


ARRAY = {"dtype": "int32", "shape": [], "checksum": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("meta", None),
        ("meta", []),
        ("eval_loss", "low"),
        ("num_skipped", 0.5),
        ("arrays", []),
        ("arrays", {"x": 1}),
        ("arrays", {"x": ARRAY | {"shape": 8}}),
        ("arrays", {"x": ARRAY | {"checksum": None}}),
    ],
)
def test_a_signed_record_with_other_fields_is_damaged(field, value, tmp_path):
    record = {"step": 7, "eval_loss": None, "meta": {}, "arrays": {"x": ARRAY}}
    metadata = tmp_path / "7" / "record" / "metadata"
    metadata.parent.mkdir(parents=True)
    record["sha256"] = record_sha256(record)
    metadata.write_text(json.dumps(record))
    assert read_record(tmp_path, 7) == record
    record[field] = value
    metadata.write_text(json.dumps(record | {"sha256": record_sha256(record)}))
    with pytest.raises(DamagedCheckpointError, match=f"than a save writes: {field}$"):
        read_record(tmp_path, 7)
