"""Test the lines that a run prints while it trains."""

import io

import pytest

from train.logs import progress
from train.logs.progress import Bar, elapsed_shown, progress_text


def make_record(step: int) -> dict:
    return {
        "step": step,
        "loss": 2.5,
        "tok_per_sec": 6421.0,
        "device_max_over_mean": [1.25, 1.125],
        "expert_max_over_mean": [2.0, 3.5],
    }


def test_both_ratios_have_names_and_the_devices_comes_first():
    assert progress_text(make_record(1)) == (
        "loss 2.500  6,421 tok/s  device max/mean 1.25  expert max/mean 3.50"
    )


def test_without_a_terminal_the_first_and_the_last_step_have_a_line(capsys):
    with Bar(5, 0) as bar:
        for step in range(1, 6):
            bar.update(make_record(step))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/5", "step 5/5"]


def fake_stdout(monkeypatch, *, is_terminal: bool) -> io.StringIO:
    out = io.StringIO()
    out.isatty = lambda: is_terminal
    monkeypatch.setattr(progress.sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return out


def test_a_terminal_of_80_columns_shows_steps_and_both_ratios(monkeypatch):
    out = fake_stdout(monkeypatch, is_terminal=True)
    with Bar(400, 0) as bar:
        bar.update(make_record(105))
    assert "105/400" in out.getvalue()
    assert progress_text(make_record(105)) in out.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_elapsed_time_is_shown_on_a_terminal_alone(monkeypatch, is_terminal):
    out = fake_stdout(monkeypatch, is_terminal=is_terminal)
    with elapsed_shown("compiling"):
        pass
    assert ("compiling" in out.getvalue()) == is_terminal
    assert ("0:00:00" in out.getvalue()) == is_terminal
