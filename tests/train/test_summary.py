"""Test that a damaged summary.json is set aside, that the run goes on, and what the
printed summary calls the loads."""

import json
import types

import pytest

from moejax.config import Config, Train
from train.summary import (
    FILE,
    MAX_FILE_BYTES,
    finished_summary,
)

GOOD = {"step": 5, "eval_loss": 2.5, "digest": "ab", "run_dir": "runs/a"}
JOB = types.SimpleNamespace(cfg=Config(train=Train(num_steps=5)))


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"null", b"5", b'"step"', b"{}", b"{", b"\xff\xfe", b"\0" * 40,
        b"[" * 10**5, b"1" * 5000, b" " * (MAX_FILE_BYTES + 1),
        *(
            json.dumps(GOOD | {name: value}).encode()
            for name, value in [
                ("step", "5"), ("step", True), ("step", None), ("step", 5.0),
                ("step", -1), ("step", 2**64), ("eval_loss", "low"), ("eval_loss", []),
                ("eval_loss", float("nan")), ("eval_loss", float("inf")),
                ("run_dir", None), ("digest", 7),
            ]
        ),
        *(
            json.dumps({k: v for k, v in GOOD.items() if k != name}).encode()
            for name in GOOD
        ),
    ],
    ids=range(28),
)  # fmt: skip
def test_a_damaged_summary_is_set_aside(tmp_path, capsys, text):
    (tmp_path / FILE).write_bytes(text)
    assert finished_summary(tmp_path, JOB) is None
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json.damaged"]
    assert (tmp_path / "summary.json.damaged").read_bytes() == text
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"SUMMARY DAMAGED: {tmp_path / FILE} is not")


@pytest.mark.parametrize("loss", [None, 2, 2.5])
def test_a_whole_summary_is_read(tmp_path, loss):
    summary = GOOD | {"eval_loss": loss}
    (tmp_path / FILE).write_text(json.dumps(summary))
    assert finished_summary(tmp_path, JOB) == summary
    longer = types.SimpleNamespace(cfg=Config(train=Train(num_steps=6)))
    assert finished_summary(tmp_path, longer) is None
    assert (tmp_path / FILE).is_file()
