"""Test train/main.py on a terminal: its screen, decisions, and Ctrl-C."""

import signal

import pytest

from tests.support.run_main import ROOT, command
from tests.support.terminal import Terminal

BALANCED = ROOT / "tests" / "support" / "balanced.gin"


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_the_terminal_in_order(tmp_path):
    words = command(tmp_path / "run", "Train.num_steps = 9000", gin_file=BALANCED)
    with Terminal(words, 200, 40) as terminal:
        terminal.wait_for("now  compiling the first steps, for")
        terminal.wait_for("compiled for 8 devices")
        lines = terminal.wait_for("  adopted at step ")
        shown = [line.split()[0] for line in lines[lines.index("") + 1 :] if line]
        assert sum("/9000" in line for line in lines) == 1
        assert {"loss", "now", "layer"} <= set(shown)
        assert terminal.end(signal.SIGINT) == 75
        lines = [line for line in terminal.lines() if line]
        assert terminal.shows_cursor
    assert not any("now  " in line or "layer 0" in line for line in lines)
    assert lines[-1].startswith('{"step": ')
    assert lines[-2].startswith("stopped by signal 2 at step")
    assert lines[-3].startswith("step ")
