"""Test train/main.py on a terminal: its screen, resizing, and Ctrl-C."""

import signal

import pytest

from tests.support.run_main import command
from tests.support.terminal import Terminal


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_the_terminal_in_order(tmp_path):
    words = command(tmp_path / "run", "Train.num_steps = 9000")
    with Terminal(words, 200, 30) as terminal:
        terminal.wait_for("now  compiling the first steps, for")
        terminal.wait_for("compiled for 8 devices")
        lines = terminal.wait_for(
            lambda lines: any(x.startswith("layer 1  device max/mean") for x in lines)
        )
        assert sum("/9000" in line for line in lines) == 1
        terminal.wait_for("held-out loss")
        assert terminal.end(signal.SIGINT) == 75
        lines = [line for line in terminal.lines() if line]
        assert terminal.shows_cursor
    assert not any("now  " in line or "layer 1" in line for line in lines)
    assert lines[-1].startswith('{"step": ')
    assert lines[-2].startswith("stopped by signal 2 at step")
    assert lines[-3].startswith("step ")
