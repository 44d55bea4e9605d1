"""Test files of records: what is written can be read, and damage costs its lines."""

import errno
import json
import math
import os

import numpy as np
import pytest

from train.logs import record_lines
from train.logs.record_lines import MetricsLog, read_records


def write_steps(path, *steps: int, end: bytes = b"") -> None:
    """Write a line for each step, and then `end`."""
    lines = [json.dumps({"step": step}).encode() + b"\n" for step in steps]
    path.write_bytes(b"".join(lines) + end)


def read_steps(path) -> list[int]:
    """Return the steps of a file without damaged lines."""
    return [record["step"] for record in read_records(path, say=pytest.fail)]


def test_each_line_is_json_and_there_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(
            {
                "step": 1,
                "loss": np.float32(1.5),
                "bad": [math.nan, -math.inf, {"deep": (np.float64("inf"), 2.0)}],
                "rounds_l": np.array([1, 2]),
                "ratio_l": np.array([np.nan, 1.25], np.float32),
            }
        )
        (line,) = path.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": 1.5,
        "bad": [None, None, {"deep": [None, 2.0]}],
        "rounds_l": [1, 2],
        "ratio_l": [None, 1.25],
    }


@pytest.mark.parametrize("torn", [b"", b'{"step": 2}', b"\0" * 70_000])
@pytest.mark.parametrize("step", [0, 2, 9])
def test_a_resume_cuts_later_lines_and_a_torn_end(tmp_path, step, torn):
    path, messages = tmp_path / "metrics.jsonl", []
    write_steps(path, 1, 2, 2, 3, end=torn)
    with MetricsLog(path, say=messages.append) as log:
        log.cut_back(step)
        kept = [k for k in (1, 2, 2, 3) if k <= step]
        assert read_steps(path) == kept
        assert log.ends_with(step, "step") == (step in kept)
        log.append({"step": step + 1})
    assert read_steps(path) == [*kept, step + 1]
    assert len(messages) == bool(torn)
    assert all(f"{path} was torn" in line for line in messages)


@pytest.mark.parametrize(
    "bad",
    [b"[2]\n", b"\xff\n", b"{}\n", b"[" * 10**5 + b"\n", b'{"step": 3'],
)
def test_readers_leave_damaged_lines_out_and_say_so(tmp_path, bad):
    path, messages = tmp_path / "metrics.jsonl", []
    write_steps(path, 1, 2, end=bad)
    steps = [record["step"] for record in read_records(path, say=messages.append)]
    assert steps == [1, 2]
    (message,) = messages
    assert message.startswith(f"LINES LEFT OUT: 1 of {path}")
    assert message.endswith("the first is line 3")
    assert list(read_records(tmp_path / "none.jsonl", say=pytest.fail)) == []


def test_full_disk_costs_lines_and_not_the_run():
    messages = []
    log = MetricsLog("/dev/full", say=messages.append)
    for k in range(3):
        log.append({"step": k})
    (message,) = messages
    assert "METRICS NOT WRITTEN from step 0 on" in message
    assert "No space left" in message


def test_line_that_fits_in_part_is_taken_back(tmp_path, monkeypatch):
    path, messages = tmp_path / "metrics.jsonl", []
    log = MetricsLog(path, say=messages.append)
    log.append({"step": 1})
    whole = log._file

    class Short:
        write = staticmethod(lambda line: whole.write(line[:4]))
        fileno, truncate = whole.fileno, whole.truncate

    monkeypatch.setattr(log, "_file", Short)
    log.append({"step": 2})
    log.append({"step": 3})
    monkeypatch.setattr(log, "_file", whole)
    log.append({"step": 4})
    log.close()
    assert read_steps(path) == [1, 4]
    assert len(messages) == 2
    assert "written again, without 2 lines" in messages[1]


def test_an_error_of_a_sync_names_the_file(tmp_path, monkeypatch):
    """At the end of a run it is said; a resume it ends."""
    path, messages = tmp_path / "metrics.jsonl", []
    write_steps(path, 1, 2)

    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(record_lines.os, "fsync", fail)
    log = MetricsLog(path, say=messages.append)
    with pytest.raises(OSError, match=r"error: '.*metrics.jsonl'"):
        log.cut_back(1)
    log.close()
    (message,) = messages
    assert message.startswith("METRICS MAY BE LOST")
    assert str(path) in message
