"""Test that processes of which one finds a fault agree: all replace the same, and the
run goes on as if the plain form had been chosen."""

import re

import pytest

from tests.support.run_main import ROOT, metric_lines
from tests.support.workers import run_apart

FAILED = 3
PLANTED = str(ROOT / "tests" / "support" / "planted.py")
PARAMS = ("Train.num_steps = 3", "Train.eval_every_steps = 3")


@pytest.mark.slow
@pytest.mark.long
def test_one_process_with_a_wrong_kernel(tmp_path):
    expected = run_apart(tmp_path / "plain", [PARAMS] * 2)
    assert [x.code for x in expected] == [0, 0]
    before = (PLANTED, "wrong", "1")
    ended = run_apart(tmp_path / "run", [PARAMS] * 2, before=before)
    assert [x.code for x in ended] == [0, 0], ended
    first, second = (x.err for x in ended)
    assert second == ""
    lines = first.splitlines()
    assert [x.split(" (")[0] for x in lines] == [
        "WRONG ON THESE DEVICES: wgrad of gate and up",
        "WRONG ON THESE DEVICES: wgrad of down",
    ]
    for line in lines:
        assert re.search(
            r", on device \d+(, \d+){3} \(process 1\): the run goes on", line
        )
    logs = ended[0].out, (tmp_path / "run" / "logs" / "process-1.log").read_text()
    for log in logs:
        assert "as they are quarantined: wgrad (found wrong at start, wgrad of " in log
    assert metric_lines(tmp_path / "run") == metric_lines(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.long
def test_a_process_that_takes_no_part_ends_all(tmp_path):
    params = (*PARAMS, "Processes.watchdog_sec = 20")
    before = (PLANTED, "silent", "1")
    ended = run_apart(tmp_path / "run", [params] * 2, before=before)
    assert [x.code for x in ended] == [FAILED, FAILED], ended
    for x in ended:
        assert x.err.count("\n") == 1
        assert "DOCTOR HANGS: the checks of padded rows along expert have not" in x.err
        assert x.record["exit_code"] == FAILED
    assert not (tmp_path / "run").exists()
