"""Test what is promised of runs that faults hit (tools/faults/table.py), by the player
of tools/chaos.py."""

import dataclasses
import random

import pytest

from tests.support.run_main import ROOT
from tools import chaos
from tools.chaos import Scenario, make_plan
from tools.faults.reference import Result, Workshop, expect_same, read_result
from tools.faults.run import Broken
from tools.faults.table import FAULTS, NAMES

FAULT_BY_NAME = {fault.name: fault for fault in FAULTS}
QUICK = ("kill in a save", "checkpoint")
"""Faults of one run of `make test`, in their order. Before a checkpoint is damaged,
SIGTERM stops the run. It has no balancer: one program is to be compiled, and not
four."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("chaos"), ("Balance.policy = 'home'",))
    shop.furnish()
    return shop


@pytest.fixture(scope="module")
def undisturbed(workshop) -> Result:
    return workshop.undisturbed(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param(("full disk",), marks=pytest.mark.root)],
    ids=", ".join,
)
def test_a_run_that_faults_hit_is_the_undisturbed_run(workshop, undisturbed, names):
    """It goes on from the newest good checkpoint after each fault, has the same arrays,
    metrics and samples at its end, and leaves nothing behind."""
    faults = tuple(FAULT_BY_NAME[name] for name in names)
    scenario = Scenario(len(names), 1, faults)
    verdicts, broken = chaos.play(scenario, workshop, undisturbed, random.Random(0))
    assert broken == []
    assert [verdict.fault.name for verdict in verdicts] == list(names)
    assert all(verdict.is_kept for verdict in verdicts)


@pytest.mark.slow
@pytest.mark.long
def test_every_fault_in_runs_of_several_processes_is_survived(tmp_path, capsys):
    code = chaos.main([f"--faults={len(FAULTS)}", f"--out={tmp_path / 'out'}"])
    assert code == 0, capsys.readouterr().out


@pytest.mark.slow
def test_what_differs_from_the_undisturbed_run_is_a_broken_promise(
    workshop, undisturbed
):
    run_dir = workshop.root / "undisturbed-1" / "disk" / "run"
    metrics = run_dir / "metrics.jsonl"
    good = metrics.read_bytes()
    lines = good.splitlines(keepends=True)
    for bad, message in (
        (lines[:5] + lines[6:], "lines of the steps .* missing"),
        ([*lines, lines[3]], "two lines of"),
        ([*lines, b"[7]\n"], "of metrics.jsonl is bad"),
    ):
        try:
            metrics.write_bytes(b"".join(bad))
            with pytest.raises(Broken, match=message):
                read_result(run_dir)
        finally:
            metrics.write_bytes(good)
    for field in ("samples", "metrics", "arrays", "balancer"):
        held = dict(getattr(undisturbed, field))
        held[min(held)] = "another"
        with pytest.raises(Broken, match=field):
            expect_same(dataclasses.replace(undisturbed, **{field: held}), undisturbed)
    expect_same(read_result(run_dir), undisturbed)


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
    assert chaos.main([*words, "--plan"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
