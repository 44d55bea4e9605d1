"""Test the region of a terminal that is drawn again and again."""

import time

from tests.support.terminal import obeying
from train.logs import region

START = """
from train.logs.region import Region
import sys, threading
seen, held = [], threading.Event()
def draw(width, rows): seen.append(width); return [[(f'drawing {len(seen)}', '')]]
drawn = Region(sys.stdout, draw)
""".strip().splitlines()


def last_drawing(lines: list[str]) -> int:
    """Return the number of the drawing that a terminal shows; 0 before the first."""
    return max((int(x.split()[1]) for x in lines if "drawing" in x), default=0)


def test_a_region_is_drawn_four_times_a_second_at_most():
    with obeying() as terminal:
        begun_sec = time.monotonic()
        terminal.tell(*START, "drawn.__enter__()")
        terminal.wait_for(lambda lines: last_drawing(lines) >= 4)
        assert time.monotonic() - begun_sec >= 3 * region.MIN_SEC
        terminal.tell(*["print('.')"] * 20, "drawn.__exit__()", "print(len(seen))")
        terminal.wait_for(lambda lines: any(line.isdigit() for line in lines))
        assert terminal.end() == 0


def test_an_error_in_drawing_is_shown_and_ends_nothing():
    with obeying() as terminal:
        terminal.tell(*START, "def fail(width, rows): raise KeyError('x')")
        terminal.tell("drawn = Region(sys.stdout, fail)", "drawn.__enter__()")
        terminal.wait_for("the screen cannot be drawn: KeyError: 'x'")
        terminal.tell("drawn.__exit__()", "print('goes on')")
        assert terminal.end() == 0
        assert terminal.lines()[0] == "goes on"


def test_standard_output_that_is_no_terminal_is_left_alone(tmp_path):
    """A region on standard error does not take the lines of a file or a pipe."""
    path = tmp_path / "out.txt"
    with obeying() as terminal:
        terminal.tell(
            f"import sys; sys.stdout = open({str(path)!r}, 'w')",
            *START,
            "drawn = Region(sys.stderr, draw)",
            "with drawn: print('into the file'); print('above', file=sys.stderr)",
            "sys.stdout.close(); sys.stdout = sys.__stdout__",
        )
        assert terminal.end() == 0
        assert "above" in terminal.lines()
    assert path.read_text() == "into the file\n"


def test_what_is_written_past_python_is_not_lost():
    """C++ code writes to the file descriptor, between two drawings."""
    with obeying() as terminal:
        terminal.tell(*START, "drawn.__enter__()", "import os")
        terminal.wait_for("drawing")
        terminal.tell("os.write(2, b'a warning of C++\\n')")
        terminal.wait_for("a warning of C++")
        number = last_drawing(terminal.lines())
        lines = terminal.wait_for(lambda lines: last_drawing(lines) >= number + 2)
        assert sum("drawing" in line for line in lines) == 1
        terminal.tell("print('printed')", "drawn.__exit__()")
        assert terminal.end() == 0
        kept = [line for line in terminal.lines() if line]
    assert kept == ["a warning of C++", "printed"]
