"""Test how a run ends where something is wrong, what `train/main.py --check` prints,
and that processes agree."""

import dataclasses
import json
import os
import pathlib
import threading
from unittest import mock

import numpy as np
import pytest

from moejax.axes import make_mesh
from moejax.resolve.resolved import resolve
from tests.support.run_main import ROOT, TOY, command, corpus
from tests.support.workers import run_apart
from train.config import gin_reader
from train.doctor import doctor
from train.doctor.outcome import Outcome, from_text, merge, to_text
from train.launch.program import RunFailed
from train.main import main

DONE, FAILED = 0, 3
PLANTED = str(ROOT / "tests" / "support" / "planted.py")
WRONG = {"error": 7.0, "devices": (2, 5), "detail": "3 came as 4"}


@pytest.fixture
def found(monkeypatch):
    """Fields of the outcome of every check. Kernels and collectives do not run."""
    fields: dict = {}

    def finding(check, _):
        right = Outcome(check.name, check.avoided_by, error=0.0, allowed=0.0)
        return dataclasses.replace(right, **fields)

    monkeypatch.setattr(doctor, "run_kernel", finding)
    monkeypatch.setattr(doctor, "run_collective", finding)
    return fields


def resolve_here(*params: str):
    cfg = gin_reader.load([str(TOY)], [f"Data.corpus = '{corpus()}'", *params])
    return resolve(cfg, make_mesh(cfg.mesh))


def check_here(capfd, *params):
    """Run train/main.py --check here; return exit code, output and errors."""
    args = command("unused", *params, flags=["--check"])[2:]
    with mock.patch.dict(os.environ):
        code = main(args)
    return code, *capfd.readouterr()


def test_the_worst_of_all_processes_counts():
    a, b = (Outcome(name, "", error=0.5, allowed=1.0) for name in "ab")
    first = [a, dataclasses.replace(b, error=9.0, devices=(1,))]
    second = [
        dataclasses.replace(a, error=0.7, process=1),
        dataclasses.replace(b, error=2.0, devices=(5, 4), process=1),
    ]
    a, b = from_text(merge([to_text(first), to_text(second)]))
    assert (a.error, a.process, a.is_right) == (0.7, 1, True)
    assert (b.error, b.process, b.devices) == (9.0, 0, (1, 4, 5))
    (infinite,) = from_text(merge([to_text([dataclasses.replace(a, error=np.inf)])]))
    assert infinite.record()["error"] is None


def test_check_prints_a_table_and_a_record(found, capfd):
    code, out, err = check_here(capfd, "Data.corpus = 'no/such.txt'")
    record = json.loads(out.splitlines()[-1])
    assert (code, err, record["exit_code"], record["is_right"]) == (DONE, "", 0, True)
    names = [x["name"] for x in record["checks"]]
    assert names[0].startswith("swiglu (blocked, float32 32x32 rows ")
    assert "padded rows along expert" in names
    assert not pathlib.Path("unused").exists()

    found |= WRONG
    code, out, err = check_here(capfd)
    record = json.loads(out.splitlines()[-1])
    expected = (FAILED, "", 3, False)
    assert (code, err, record["exit_code"], record["is_right"]) == expected
    assert record["checks"][0]["devices"] == [2, 5]
    assert "\nWRONG  padded rows along expert " in out


def test_a_run_ends_with_the_option_that_avoids_what_is_wrong(found):
    padded = resolve_here()
    ragged = resolve_here("Dispatch.transport = 'ragged'")
    assert doctor.require_right(padded) > 6
    found |= WRONG
    with pytest.raises(RunFailed, match=r"^WRONG ON THESE DEVICES: swiglu .*: error 7"):
        doctor.require_right(padded)
    match = r"ragged rows .* 3 came as 4: Dispatch.transport = 'padded' avoids it; "
    with pytest.raises(RunFailed, match=match):
        doctor.require_right(ragged)


def test_what_raises_is_wrong_and_the_rest_is_judged(found, monkeypatch):
    def fails(check, devices):
        raise NotImplementedError("no such instruction")

    monkeypatch.setattr(doctor, "run_kernel", fails)
    *kernels, psum = doctor.check(resolve_here())
    assert "NotImplementedError: no such instruction: no option" in str(kernels[0])
    assert kernels[0].devices == tuple(range(8))
    assert psum.is_right


def test_a_check_that_hangs_ends_the_run_with_its_name(found, monkeypatch):
    ended, has_ended = [], threading.Event()

    def end_all(code, line):
        ended.append((code, line))
        has_ended.set()

    def hangs(check, mesh):
        assert has_ended.wait(300)
        raise OSError("no answer")

    monkeypatch.setattr(doctor.failures, "end_all", end_all)
    monkeypatch.setattr(doctor, "run_collective", hangs)
    run = resolve_here("Processes.watchdog_sec = 1")
    monkeypatch.setattr(doctor, "kernel_checks", lambda run: [])
    collectives = doctor.collective_checks(run)
    monkeypatch.setattr(doctor, "collective_checks", lambda run: collectives[:1])
    doctor.check(run)
    code, line = ended[0]
    assert code == FAILED
    assert line.startswith("DOCTOR HANGS: the check of padded rows along expert has ")


@pytest.mark.slow
@pytest.mark.long
def test_processes_agree_on_what_one_has_found(tmp_path):
    """Process 1 has a wrong product. Both end alike, and process 0 names it."""
    ended = run_apart(tmp_path / "run", [(), ()], before=(PLANTED, "1"))
    assert [x.code for x in ended] == [FAILED, FAILED], ended
    wrong = [x for x in ended[0].record["checks"] if not x["is_right"]]
    assert [x["name"].partition(" ")[0] for x in wrong] == ["wgrad", "wgrad"]
    assert [(len(x["devices"]), x["process"]) for x in wrong] == [(4, 1), (4, 1)]
    assert not (tmp_path / "run").exists()
