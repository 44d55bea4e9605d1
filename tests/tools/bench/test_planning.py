"""Test the benchmark of the planner: a tiny run, and bad input."""

import json

import pytest

from tools.bench import planning

TINY = "--devices=2 --experts=4 --layers=1 --steps=30 --step_sec=0 --json"


def test_each_plan_is_collected_by_the_loop_and_timed(capsys):
    assert planning.main([*TINY.split(), "--policy=eplb"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = record["policies"]["eplb"]
    assert "swap" in found["kinds"]
    assert len(found["plan_wait_sec"]) == len(found["kinds"])
    assert len(found["plan_sec"]) >= len(found["kinds"])


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ("--devices=3 --experts=4", "must be a multiple of --devices 3"),
        ("--steps=1 --policy=eplb", "no plan was due"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, arguments, rule):
    assert planning.main([*TINY.split(), *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert rule in err
    assert err.count("\n") == 1
