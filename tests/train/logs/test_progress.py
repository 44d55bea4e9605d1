"""Test what a run shows while it trains: lines in a file, a screen on a terminal."""

import signal

import pytest

from tests.support.terminal import obeying
from train.logs.progress import Lines, progress_text, shown

START = """
import contextlib, signal
from train.logs.progress import shown
from train.logs.screen import Outlook, Shown
from train.launch.program import say_loudly
record = dict(loss=2.5, tok_per_sec=6421.0, step_msec=192.0, mfu=None)
record.update(device_max_over_mean=[1.25, 1.125], expert_max_over_mean=[2.0, 3.5])
ends = contextlib.ExitStack()
display = ends.enter_context(shown(400))
display.begin(0)
""".strip().splitlines()


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
    with shown(5) as display:
        assert isinstance(display, Lines)
        display.begin(0)
        for step in range(1, 6):
            with display.during("waiting for data"):
                display.update(make_record(step))
        display.evaluated(5, 2.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/5", "step 5/5"]


def test_a_screen_shows_steps_decisions_and_what_is_done_between():
    with obeying(100, 20) as terminal:
        terminal.tell(*START)
        terminal.wait_for("waiting for the first step")
        terminal.tell("display.update(dict(record, step=105))")
        terminal.wait_for("step 105/400")
        terminal.wait_for("layer 0  device max/mean 1.25")
        decision = (
            "dict(step=20, kind='swap', adopt_step=24, why='pays', changes={},"
            "device_max_over_mean_before=1.33, device_max_over_mean_after=1.08)"
        )
        terminal.tell(
            f"seen = Outlook((Shown({decision}, 'adoption at step 24'),))",
            "display.begin(0, lambda: seen)",
        )
        terminal.wait_for("step 20  swap 1.33->1.08  adoption at step 24  pays")
        terminal.tell("ends.enter_context(display.during('evaluating'))")
        terminal.wait_for("now  evaluating, for 0:0")
        assert terminal.shows_cursor
        assert terminal.end() == 0


def test_lines_stay_above_the_screen_and_are_never_lost():
    with obeying(110, 14) as terminal:
        terminal.tell(*START, "display.update(dict(record, step=7))")
        terminal.wait_for("step 7/400")
        terminal.tell(
            "for i in range(60): print(f'line {i}', flush=True)",
            "say_loudly('LOUD')",
            "display.say('decided')",
            "print('no end of a line', end='', flush=True)",
            "display.update(dict(record, step=8))",
        )
        lines = terminal.wait_for("step 8/400")
        assert sum("/400" in line for line in lines) == 1, "the screen is there once"
        terminal.tell("ends.close()")
        assert terminal.end() == 0
        text = terminal.history()
    kept = [line for line in text if line]
    assert kept == [
        *(f"line {i}" for i in range(60)),
        *("LOUD", "decided"),
        f"no end of a linestep 8/400  {progress_text(make_record(8))}",
    ]


def test_a_terminal_that_is_resized_has_a_screen_of_its_size():
    with obeying(150, 12) as terminal:
        terminal.tell(*START, "display.update(dict(record, step=7))")
        terminal.wait_for("elapsed")
        terminal.tell("print('before')")
        terminal.wait_for("before")
        terminal.resize(46, 12)
        terminal.wait_for(  # at first the terminal wraps the lines of the old screen
            lambda lines: (
                max(map(len, lines)) <= 45
                and any(
                    x.startswith("step 7/400") and "elapsed" not in x for x in lines
                )
            )
        )
        terminal.resize(120, 12)
        terminal.wait_for("elapsed")
        terminal.tell("ends.close()", "print('after')")
        assert terminal.end() == 0
        assert {"before", "after"} <= set(terminal.history())


def test_a_terminal_that_becomes_lower_has_a_lower_screen():
    record = "record.update(device_max_over_mean=[1.5 + i / 99 for i in range(40)])"
    with obeying(99, 60) as terminal:
        terminal.tell(*START, record, "display.update(dict(record, step=7))")
        lines = terminal.wait_for("and 5 more even layers")
        terminal.resize(99, 10)
        terminal.tell("print('below')")
        lines = terminal.wait_for(  # the screen may be lower before anything is printed
            lambda lines: "below" in lines and "and 37 more even layers" in lines
        )
        assert sum("/400" in line for line in lines) == 1
        assert terminal.end() == 0


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("raise KeyError('what is missing')", 1, "KeyError: 'what is missing'"),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_an_exception_leaves_a_traceback_and_no_screen(end, code, last):
    with obeying(90, 30) as terminal:
        terminal.tell(*START, "display.update(dict(record, step=7))")
        terminal.wait_for("step 7/400")
        terminal.tell(f"with ends: {end}")
        assert terminal.end() == code
        lines = [line for line in terminal.lines() if line]
        assert terminal.shows_cursor
    assert lines[0] == f"step 7/400  {progress_text(make_record(7))}"
    assert (lines[1], lines[-1]) == ("Traceback (most recent call last):", last)
    assert not any("now  training" in line for line in lines)


@pytest.mark.parametrize(
    "env", [{"TERM": "dumb"}, {"TTY_INTERACTIVE": "0"}, {"TTY_COMPATIBLE": "0"}]
)
def test_a_terminal_that_can_have_no_screen_gets_lines(env):
    with obeying(90, 30, **env) as terminal:
        terminal.tell(*START, "display.update(dict(record, step=400))", "ends.close()")
        assert terminal.end() == 0
        assert b"\x1b" not in terminal.raw
        assert terminal.lines()[0].startswith("step 400/400  loss 2.500  6,421 tok/s")


def test_plain_lines_can_be_asked_for_on_a_terminal():
    with obeying(90, 30) as terminal:
        start = "\n".join(START).replace("shown(400)", "shown(400, is_plain=True)")
        terminal.tell(*start.splitlines(), "display.update(dict(record, step=400))")
        assert terminal.end() == 0
        assert b"\x1b" not in terminal.raw
        assert terminal.lines()[0].startswith("step 400/400  loss 2.500  6,421 tok/s")


def test_no_color_and_a_locale_without_utf8_are_heeded():
    with obeying(90, 30, LC_ALL="C", NO_COLOR="1") as terminal:
        terminal.tell(*START, "display.update(dict(record, step=7))")
        terminal.wait_for("step 7/400")
        terminal.wait_for("####")
        terminal.tell("print('näher')", "ends.close()")
        assert terminal.end() == 0
        text = terminal.raw.replace("näher".encode(), b"")
    assert text.isascii()
    assert b"\x1b[3" not in text, "no colour was set"
    assert b";3" not in text, "no colour was set"
