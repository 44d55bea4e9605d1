"""Test the time that a stopped run needs, and when it is said."""

import os
import pathlib

import pytest

from train.checkpoint.orbax_quirks import remove_unfinished
from train.checkpoint.save_time import describe, needs_saying, probe, stop_sec

GB = 1e9


@pytest.mark.parametrize(
    ("num_bytes", "rate", "sec"),
    [
        (366 * GB, 2 * GB, 430),  # two saves of 183 s, and a minute
        (366 * GB, 0.5 * GB, 1530),
        (1 * GB, 1 * GB, 70),
        (0, 1 * GB, 60),
    ],
)
def test_a_stop_has_time_for_two_saves(num_bytes, rate, sec):
    assert stop_sec(num_bytes, rate) == sec


@pytest.mark.parametrize(
    ("expected_sec", "measured_sec", "is_said"),
    [
        (100, 190, False),
        (100, 210, True),
        (100, 49, True),
        (100, 51, False),
        (1, 29, False),  # both are short
        (1, 31, True),
        (None, 29, False),  # small checkpoints, of which nothing was said
        (None, 31, True),
    ],
)
def test_a_time_is_said_again_when_it_is_another(expected_sec, measured_sec, is_said):
    expected = 366 * GB / expected_sec if expected_sec else None
    assert needs_saying(int(366 * GB), expected, 366 * GB / measured_sec) == is_said


def test_the_line_names_the_flags():
    assert describe(int(366 * GB), 2 * GB, "takes about", "the last save") == (
        "a checkpoint has 366 GB and takes about 183 s at 2 GB/s (the last save): give "
        "a stopped run at least 430 s (SLURM: --signal=TERM@430; tools/launch/local.py:"
        " --grace_sec=430)"
    )


def test_a_probe_that_was_killed_goes_as_an_unfinished_save(tmp_path, monkeypatch):
    def kill(descriptor):
        raise SystemExit

    monkeypatch.setattr(os, "fsync", kill)
    monkeypatch.setattr(pathlib.Path, "unlink", lambda *_, **__: None)
    with pytest.raises(SystemExit):
        probe(tmp_path, 2**22)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_leaves_nothing(tmp_path):
    assert probe(tmp_path, 2**22) > 0
    assert list(tmp_path.iterdir()) == []
    assert probe(tmp_path / "missing", 2**22) is None
