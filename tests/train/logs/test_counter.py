"""Test the bars of long tools: amounts, rates and times left, on a terminal alone."""

import json

import pytest

from tests.support.terminal import obeying
from train.logs.counter import BYTES, Counter, amount, counted, rate_text
from train.logs.region import cells


def text_of(counter: Counter, width: int = 99) -> str:
    lines = counter.draw(width, 24)
    assert all(cells(line) <= width for line in lines)
    return "\n".join("".join(text for text, _ in line) for line in lines)


def make_counter(unit: str, total: float | None, sec: float) -> Counter:
    clock = iter([0.0, *[sec] * 9])
    return Counter("plans", unit, total, monotonic=lambda: next(clock))


def test_a_counter_shows_share_rate_and_time_left():
    counter = make_counter("samples", 600, 20.0)
    counter.advance(150)
    text = text_of(counter)
    for part in ("plans  150 of 600 samples", "25%", "7.5 samples/s", "ETA 1:00"):
        assert part in text
    assert text.count("━") == 10
    assert text.count("─") == 30


def test_a_counter_without_a_total_has_no_bar_and_no_time_left():
    counter = make_counter("candidates", None, 120.0)
    counter.advance(60)
    counter.text = "bucket 2 of 9"
    assert text_of(counter) == "plans  60 candidates  30.0 candidates/min  2:00  " + (
        "bucket 2 of 9"
    )


def test_nothing_done_has_no_rate():
    assert "/s" not in text_of(make_counter("samples", 600, 3.0))
    assert "ETA" not in text_of(make_counter("samples", 600, 3.0))


def test_a_counter_can_be_polled():
    counter = Counter("reading", BYTES, 4_000_000_000, poll=lambda: 1_234_000_000)
    assert "reading  1.2 GB of 4.0 GB" in text_of(counter)


@pytest.mark.parametrize("width", [20, 40, 60, 199])
def test_every_width_is_kept_to(width):
    counter = make_counter("samples", 600, 20.0)
    counter.advance(150)
    counter.text = "a long text about what is going on" * 3
    assert "150 of 600" in text_of(counter, width)


@pytest.mark.parametrize(
    ("number", "unit", "text", "rate"),
    [
        (0.002, "arms", "0 arms", "7.2 arms/h"),
        (0.5, "faults", "0 faults", "30.0 faults/min"),
        (1234.5, "plans", "1,234 plans", "1,234 plans/s"),
        (999, BYTES, "999 B", "999 B/s"),
        (123_456_789, BYTES, "123 MB", "123 MB/s"),
    ],
)
def test_amounts_and_rates(number, unit, text, rate):
    assert (amount(number, unit), rate_text(number, unit)) == (text, rate)


def test_no_terminal_shows_nothing(capsys):
    with counted("plans", "samples", 3) as counter:
        counter.advance()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_the_bar_and_json_stays_the_last_line():
    """The lines of a tool stay above its bar, which is gone at the end."""
    with obeying(90, 12) as terminal:
        terminal.tell(
            "import contextlib, json; from train.logs.counter import counted",
            "ends = contextlib.ExitStack()",
            "counter = ends.enter_context(counted('plans', 'samples', 8))",
            "counter.advance(2); counter.text = 'eplb'; print('first')",
        )
        parts = ("2 of 8 samples", "25%", "eplb")
        terminal.wait_for(lambda lines: any(all(p in x for p in parts) for x in lines))
        terminal.tell("ends.close()", "print(json.dumps({'done': 8}))")
        assert terminal.end() == 0
        lines = [line for line in terminal.lines() if line]
    assert lines == ["first", json.dumps({"done": 8})]
