"""The study of what 8-bit values cost: that it runs, and that its rows say what the
formats are made for."""

import json

import pytest

from moejax.kernels.shapes import Shape
from tools import study_fp8


def test_the_study(capsys, monkeypatch):
    shape = Shape(rows=256, d=128, f=256, groups=2)
    monkeypatch.setattr(study_fp8, "SHAPE", shape)
    monkeypatch.setattr(study_fp8, "SPREAD", 3.0)
    monkeypatch.setattr(study_fp8, "INPUTS", ("normal", "rows"))
    monkeypatch.setattr(study_fp8, "PASSES", ("dgrad",))
    assert study_fp8.main(["--seed", "3", "--json"]) == 0
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    record = json.loads(last)
    assert record["seed"] == 3
    rows = {(r["pass"], r["inputs"], r["arm"]): r for r in record["rows"]}
    told = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(record["rows"]) == len(told)
    assert len(rows) == len(study_fp8.INPUTS) * len(study_fp8.ARMS)
    for which in study_fp8.PASSES:
        for kind in study_fp8.INPUTS:
            arms = {arm: rows[which, kind, arm]["row_error"] for arm in study_fp8.ARMS}
            # 8 bits of mantissa, 3 and 2; one row in ten is off by a bit more.
            assert arms["bfloat16"] < 0.01 < arms["e4m3 blocks"] < arms["e5m2 blocks"]
            assert arms["e4m3 blocks"] < 0.06
            assert arms["e5m2 blocks"] < 0.1
        # One scale for rows so unlike leaves the small ones little in e4m3.
        of_rows = {arm: rows[which, "rows", arm]["row_error"] for arm in study_fp8.ARMS}
        assert of_rows["e4m3 tensor"] > 1.5 * of_rows["e4m3 blocks"]


def test_bad_input(capsys):
    with pytest.raises(SystemExit) as error:
        study_fp8.main(["--seed", "none"])
    assert error.value.code == 2
    assert "invalid int value" in capsys.readouterr().err
