"""Test the lines of the begin and the end of an attempt."""

import contextlib
import json

import pytest

from moejax.plan.layout import Topology
from tests.support.run_schema import check
from train.logs.attempts import begun, recorded
from train.logs.records import MetricsLog


def end_of(fault: BaseException | None, last_step: int) -> dict:
    """Return the line of the end of an attempt of 9 steps that has done `last_step`,
    and raises an error if one is given."""
    lines: list[dict] = []
    begin = begun(3, 2, 1e9, Topology(data=2, expert=4))
    with (
        contextlib.suppress(OSError, KeyboardInterrupt),
        recorded(lines.append, begin, lambda: last_step, 9),
    ):
        assert lines == [begin]
        if fault is not None:
            raise fault
    check("attempt_begin", begin)
    check("attempt_end", lines[-1])
    assert (len(lines), lines[1]["attempt"]) == (2, 2)
    return lines[1]


@pytest.mark.parametrize(
    ("fault", "last_step", "end", "why"),
    [
        (None, 9, "finished", ""),
        (None, 5, "stopped", ""),
        (OSError("no\nspace"), 5, "failed", "no space"),
        (KeyboardInterrupt(), 5, "failed", "KeyboardInterrupt"),
    ],
)
def test_the_end_says_how(fault, last_step, end, why):
    line = end_of(fault, last_step)
    assert (line["step"], line["end"], line["why"]) == (last_step, end, why)


@pytest.mark.parametrize("torn", ["", '{"step": 1}\n', '{"step": 1}\n{"st'])
def test_a_torn_line_damages_no_other(tmp_path, torn):
    path = tmp_path / "attempts.jsonl"
    path.write_text(torn)
    with MetricsLog(path) as log:
        log.end_torn_line()
        log.append({"step": 2})
    lines = path.read_text().splitlines()
    assert json.loads(lines[-1]) == {"step": 2}
    assert len(lines) == len(torn.splitlines()) + 1
