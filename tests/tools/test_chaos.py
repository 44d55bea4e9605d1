"""Test what is promised of runs that faults hit (tools/faults/table.py), by the player
of tools/chaos.py."""

import dataclasses

import pytest

from tests.support.run_main import ROOT
from tools import chaos
from tools.chaos import make_plan
from tools.faults.reference import expect_same, read_result
from tools.faults.run import Broken
from tools.faults.table import FAULTS, NAMES


@pytest.mark.long
def test_every_fault_in_runs_of_several_processes_is_survived(tmp_path, capsys):
    """A run goes on from the newest good checkpoint after each fault, has the arrays,
    metrics and samples of an undisturbed run at its end, and leaves nothing behind.
    What differs is found."""
    out = tmp_path / "out"
    code = chaos.main([f"--faults={len(FAULTS)}", f"--out={out}"])
    assert code == 0, capsys.readouterr().out
    run_dir = next(out.glob("undisturbed-*")) / "disk" / "run"
    good, metrics = read_result(run_dir), run_dir / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    for bad, message in (
        (lines[:5] + lines[6:], "lines of the steps .* missing"),
        ([*lines, lines[3]], "two lines of"),
        ([*lines, b"[7]\n"], "of metrics.jsonl is bad"),
    ):
        metrics.write_bytes(b"".join(bad))
        with pytest.raises(Broken, match=message):
            read_result(run_dir)
    for field in ("samples", "metrics", "arrays", "balancer"):
        held = dict(getattr(good, field))
        held[min(held)] = "another"
        with pytest.raises(Broken, match=field):
            expect_same(dataclasses.replace(good, **{field: held}), good)


def test_a_plan_follows_from_its_seed_and_has_every_kind():
    num_faults = 5 * len(FAULTS)
    plan = make_plan(FAULTS, num_faults, 0, (1, 2, 4))
    assert plan == make_plan(FAULTS, num_faults, 0, (1, 2, 4))
    assert plan != make_plan(FAULTS, num_faults, 1, (1, 2, 4))
    names = [fault.name for scenario in plan for fault in scenario.faults]
    assert [names.count(name) for name in NAMES] == [5] * len(NAMES)
    for scenario in plan:
        assert all(scenario.num_processes >= x.min_processes for x in scenario.faults)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--faults=0"], "--faults=0"),
        (["--only=fire"], "'fire'"),
        (["--only=mismatch", "--processes=1"], "--only=mismatch"),
        (["--run=99"], "--run=99"),
        ([f"--out={ROOT}"], f"--out={ROOT}"),
    ],
)
def test_bad_flags_are_one_line_and_code_2(words, message, capsys):
    assert chaos.main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
