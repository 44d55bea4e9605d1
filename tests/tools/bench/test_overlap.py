"""Figures and bad input of the benchmark of overlap. docs/testbed.md has what it
measures on slow links, which takes a minute."""

import pytest

from tools.bench import overlap


def seconds(both: float, halves: float) -> dict[str, float]:
    """Return the times of programs whose exchange takes 4 s and whose products take
    6 s."""
    sec = {"exchange": 4.0, "products_loop": 6.0, "whole_loop": 10.0}
    return sec | {"both_loop": both, "halves_loop": halves}


@pytest.mark.parametrize(("both", "share"), [(10.0, 0.0), (8.0, 0.5), (6.0, 1.0)])
def test_all_of_the_shorter_is_hidden_where_it_is_free(both, share):
    assert overlap.hidden(seconds(both, 10.0), "loop") == share


@pytest.mark.parametrize(("halves", "share"), [(10.0, 0.0), (8.0, 1.0), (11.0, -0.5)])
def test_halves_hide_half_of_the_shorter_at_most(halves, share):
    assert overlap.hidden_in_halves(seconds(10.0, halves), "loop") == share


def test_a_share_is_the_median_of_turns_and_not_of_medians():
    """The machine is slower in the second turn, and the same share is hidden."""
    sec = seconds(8.0, 10.0)
    times = {name: [value, 3 * value, value] for name, value in sec.items()}
    assert overlap.median_of(overlap.hidden, times, "loop") == 0.5
    assert overlap.medians(times) == sec


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--turns=0"], "--turns 0 and --width 256 must be at least 1"),
        (["--devices=1"], "--devices 1 at least 2"),
        (["--mib=0.003"], "--mib 0.003 is 3 rows of --width 256, which must be a"),
        (["--mib=0"], "--mib 0 is 0 rows"),
        (["--variant=a: Model.remat = 'none'"], "at least two --variant"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(words, message, capsys):
    assert overlap.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
