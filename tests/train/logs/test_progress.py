"""Test what a run shows while it trains: lines in a file, a bar on a terminal."""

import io

import pytest
from rich.console import Console

from train.logs import progress
from train.logs.progress import Bar, Lines, shown


def make_record(step: int) -> dict:
    return {
        "step": step,
        "loss": 2.5,
        "tok_per_sec": 6421.0,
        "device_max_over_mean": [1.25, 1.125],
        "expert_max_over_mean": [2.0, 3.5],
    }


def test_without_a_terminal_the_first_and_the_last_step_have_a_line(capsys):
    with shown(5) as display:
        assert isinstance(display, Lines)
        display.begin(0)
        for step in range(1, 6):
            with display.during("waiting for data"):
                display.update(make_record(step))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/5", "step 5/5"]


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_terminal_has_a_bar_unless_lines_are_asked_for(monkeypatch, capsys, is_plain):
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=200, highlight=False)
    monkeypatch.setattr(progress, "Console", lambda **_: terminal)
    with shown(5, is_plain=is_plain) as display:
        assert isinstance(display, Lines if is_plain else Bar)
        display.begin(2)
        with display.during("evaluating"):
            display.update(make_record(3))
        display.say("[a line that stays]")
    assert "[a line that stays]" in file.getvalue()
    assert ("step 3/5" in capsys.readouterr().out) == (not is_plain)
