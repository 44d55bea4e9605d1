"""Test the benchmark of saves and restarts: its figures, two tiny runs, bad input."""

import json

import pytest

from tests.support.close import assert_close
from tests.support.run_main import TOY, corpus
from tools.bench import reliability


def make_rows(*total_sec: float) -> list[dict]:
    """Return rows of a variant whose steps take 10 ms."""
    return [
        {"total_sec": sec, "saves_sec": 0.1, "step_msec": 10.0} for sec in total_sec
    ]


def test_the_cost_of_a_save_is_the_extra_time_over_the_extra_saves():
    rows, reference = make_rows(1.16, 1.3, 9.0), make_rows(1.1, 1.0, 1.0)
    record = reliability.compare(rows, reference, 3, 25)
    assert_close(record["extra_sec"]["median"], 0.3)
    assert_close(record["slowdown"], 0.3)
    assert_close(record["save_sec"], 0.1)
    assert_close(record["save_share"], 0.1 / 0.25)
    without_saves = reliability.compare(rows, reference, 0, 25)
    assert set(without_saves) == {"extra_sec", "slowdown"}


def test_the_last_step_ignores_a_line_that_is_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert reliability.last_step(path) == 0
    path.write_text('{"step": 3}\n{"step": 4}\n{"step": 5')
    assert reliability.last_step(path) == 4


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--part=steps", "--turns=0"], "at least 1"),
        (["--part=steps", "--variant=a"], "two --variant"),
        (["--part=saves", "--variant=a"], "is for --part steps"),
        (["--part=restarts", "--gin_param=Train.stepz=1"], "Train has no field stepz"),
        (["--part=restarts", "--gin_file=no.gin"], "no.gin"),
    ],
)
def test_bad_input_is_one_line(words, match, capsys):
    assert reliability.main(words) == 2
    text = capsys.readouterr().err
    assert match in text
    assert text.count("\n") == 1


@pytest.mark.long
def test_restarts_are_timed_with_and_without_the_cache(capsys, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # devices that conftest simulates
    params = f"--gin_param=Data.corpus = '{corpus()}'"
    words = ["--part=restarts", f"--gin_file={TOY}", params, "--turns=1", "--json"]
    assert reliability.main(words) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    on, off = (
        record["variants"][f"cache {x}"]["first_step_sec"] for x in ("on", "off")
    )
    assert 0 < on["median"] < off["median"]
