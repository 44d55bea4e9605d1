"""Test what a run does about wrong kernels and collectives, what it remembers, and
what `train/main.py --check` prints."""

import dataclasses
import json
import os
import pathlib
from unittest import mock

import jax
import numpy as np
import pytest

from moejax.axes import make_mesh
from moejax.kernels import quarantine
from moejax.moe.exchange.transport import TRANSPORTS
from moejax.resolve.resolved import resolve
from tests.support.planted import plant_hopper, swap_ends, wrong_wgrad
from tests.support.run_main import TOY, command, corpus
from train.config import gin_reader
from train.doctor import doctor, memory
from train.doctor.outcome import Outcome, from_text, merge, to_text
from train.launch.program import RunFailed
from train.main import main

BAD_INPUT, FAILED = 2, 3
DC = ("Mesh.data = 1", "Mesh.dc = 2", "Dispatch.group = 'dc_expert'")


def make_cfg(*params: str):
    return gin_reader.load([str(TOY)], [f"Data.corpus = '{corpus()}'", *params])


def resolve_here(cfg):
    return resolve(cfg, make_mesh(cfg.mesh))


@pytest.fixture
def said():
    return []


@pytest.fixture
def cache(tmp_path):
    """The folder of the compilation cache, in which results are remembered."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def quick(monkeypatch, cache):
    """Devices that are checked at start, with few checks: of the gradients of matrices
    and of the transport."""
    monkeypatch.setattr(doctor, "is_for", lambda run: True)
    every = doctor.product_checks

    def kernel_checks(run):
        return [c for c in every(run) if c.name.startswith("wgrad of down")]

    monkeypatch.setattr(doctor, "kernel_checks", kernel_checks)
    monkeypatch.setattr(doctor, "collective_checks", lambda run: [])
    yield
    quarantine.release()


@pytest.fixture
def examined(monkeypatch):
    """Names of the checks that have run."""
    names, examine = [], doctor.examine

    def noting(run, checks):
        names.extend(checks.names)
        return examine(run, checks)

    monkeypatch.setattr(doctor, "examine", noting)
    return names


def test_the_worst_of_all_processes_counts():
    wrong = Outcome("b", "", 2.0, 1.0, (5, 4), 1, "2 came as 3")
    texts = [to_text([Outcome("a", "", 0.5, 1.0), Outcome("b", "", 9.0, 1.0, (1,))])]
    texts.append(to_text([Outcome("a", "", 0.7, 1.0, process=1), wrong]))
    a, b = from_text(merge(texts))
    assert (a.error, a.process, a.is_right) == (0.7, 1, True)
    assert (b.error, b.process, b.devices) == (9.0, 0, (1, 4, 5))
    infinite = from_text(merge([to_text([Outcome("a", "", np.inf, 1.0)])]))
    assert infinite[0].record()["error"] is None


@pytest.mark.slow
def test_a_wrong_kernel_is_named_and_replaced(
    monkeypatch, quick, examined, said, capfd
):
    plant_hopper(monkeypatch, wgrad=wrong_wgrad)
    cfg = make_cfg("Moe.d_expert = 64")
    before = resolve_here(cfg)
    monkeypatch.setattr(doctor, "transport_checks", lambda run: [])
    healed = doctor.heal(before, resolve_here, said.append)
    after = resolve_here(healed).kernels["grouped_dot"]
    assert healed == cfg
    assert examined == [f"wgrad of down ({x}, 96 rows)" for x in ("hopper", "blocked")]
    (line,) = said
    assert line.startswith("WRONG ON THESE DEVICES: wgrad of down (hopper, 96 rows): ")
    assert ", allowed 3e-05, on device 0, 1, 2, 3, 4, 5, 6, 7 (process 0)" in line
    assert line.endswith("the run goes on with the next implementation")
    assert "by blocked, as they are quarantined: wgrad (found wrong at" in after.why
    assert "doctor: 1 checks are right, in " in capfd.readouterr().out


@pytest.mark.slow
def test_a_wrong_transport_is_replaced(monkeypatch, quick, examined, said):
    wrong = swap_ends(TRANSPORTS["hierarchical"])
    monkeypatch.setitem(TRANSPORTS, "hierarchical", wrong)
    monkeypatch.setattr(doctor, "kernel_checks", lambda run: [])
    cfg = make_cfg(*DC, "Dispatch.transport = 'hierarchical'")
    healed = doctor.heal(resolve_here(cfg), resolve_here, said.append)
    assert healed == make_cfg(*DC)
    assert examined == [
        f"{x} rows along dc x expert" for x in ("hierarchical", "padded")
    ]
    assert said[0].endswith("the run goes on with Dispatch.transport = 'padded'")
    assert " came as " in said[0]

    monkeypatch.setitem(TRANSPORTS, "padded", wrong)
    with pytest.raises(RunFailed, match=r"padded rows .* has no plain form"):
        doctor.heal(resolve_here(cfg), resolve_here, said.append)


def test_what_was_right_is_remembered_except_for_ragged(
    monkeypatch, quick, examined, said, cache
):
    """Nothing runs, since CPUs have no ragged transport: all is found right."""

    def all_right(checks, mesh):
        return [Outcome(check.name, check.subject, 0.0, 0.0) for check in checks]

    monkeypatch.setattr(doctor, "run_collectives", all_right)
    monkeypatch.setattr(doctor, "kernel_checks", lambda run: [])
    plain, ragged = (
        resolve_here(make_cfg(f"Dispatch.transport = '{name}'"))
        for name in ("padded", "ragged")
    )
    for run in (plain, plain, ragged, ragged):
        assert doctor.heal(run, resolve_here, said.append) is None
    assert examined == ["padded rows along expert", *2 * ["ragged rows along expert"]]
    assert said == []
    paths = list((cache / "doctor").iterdir())
    assert len(paths) == 2

    for path in paths:
        path.write_text("{")
    assert doctor.heal(plain, resolve_here, said.append) is None
    assert examined[3:] == ["padded rows along expert"]
    (line,) = said
    assert line.startswith("DOCTOR'S MEMORY NOT READ: ")
    assert line.endswith(": the devices are checked again")


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"digest": "another"}'])
def test_a_damaged_memory_costs_a_check(cache, said, text):
    memory.remember("0123456789abcdef0", said.append)
    assert memory.is_remembered("0123456789abcdef0", said.append)
    (path,) = (cache / "doctor").iterdir()
    path.write_text(text)
    assert not memory.is_remembered("0123456789abcdef0", said.append)
    assert not memory.is_remembered("another digest", said.append)
    assert len(said) == 1


def test_a_memory_that_cannot_be_used_costs_a_line(cache, said):
    cache.write_text("a file where the folder should be")
    memory.remember("0123", said.append)
    assert not memory.is_remembered("0123", said.append)
    assert [line.split(":")[0] for line in said] == [
        "DOCTOR'S MEMORY NOT WRITTEN", "DOCTOR'S MEMORY NOT READ",
    ]  # fmt: skip
    for folder in ("gs://bucket/cache", None):
        jax.config.update("jax_compilation_cache_dir", folder)
        memory.remember("0123", said.append)
        assert not memory.is_remembered("0123", said.append)
    assert len(said) == 2


def test_what_decides_the_result_is_in_the_fingerprint(monkeypatch, tmp_path):
    run = resolve_here(make_cfg())
    digest = memory.fingerprint(run, ["a", "b"])
    assert memory.fingerprint(run, ["a"]) != digest
    for param in ("Mesh.data = 1", "Mesh.expert = 8"), ("Model.d_model = 64",):
        other = resolve_here(make_cfg(*param))
        assert memory.fingerprint(other, ["a", "b"]) != digest
    assert memory.fingerprint(run, ["a", "b"]) == digest
    monkeypatch.setenv("MOEJAX_TUNED", str(tmp_path))
    (tmp_path / "cpu.json").write_text('{"tiles": {}}')
    assert memory.fingerprint(run, ["a", "b"]) != digest


def check_here(capfd, *params, flags=()):
    """Run train/main.py --check here; return exit code, output and errors."""
    args = command("unused", *params, flags=["--check", *flags])[2:]
    with mock.patch.dict(os.environ):
        code = main(args)
    return code, *capfd.readouterr()


def test_check_prints_a_table_and_a_record(monkeypatch, quick, capfd):
    wrong: dict = {}

    def found(checks, mesh):
        return [Outcome(c.name, c.subject, **{"error": 0.0, "allowed": 0.0} | wrong)
                for c in checks]  # fmt: skip

    monkeypatch.setattr(doctor, "kernel_checks", lambda run: [])
    monkeypatch.setattr(doctor, "run_collectives", found)
    code, out, err = check_here(capfd)
    record = json.loads(out.splitlines()[-1])
    assert (code, err, record["exit_code"], record["is_right"]) == (0, "", 0, True)
    assert [c["name"] for c in record["checks"]] == ["padded rows along expert"]
    assert "\nright  padded rows along expert" in out
    assert "1 checks on 8 x cpu in " in out
    assert not pathlib.Path("unused").exists()

    wrong |= {"error": 7.0, "devices": (2, 5), "detail": "3 came as 4"}
    code, out, err = check_here(capfd)
    record = json.loads(out.splitlines()[-1])
    assert (code, err, record["exit_code"], record["is_right"]) == (
        FAILED,
        "",
        3,
        False,
    )
    assert record["checks"][0]["devices"] == [2, 5]
    assert "\nWRONG  padded rows along expert" in out
    assert (
        "1 wrong\npadded rows along expert: error 7, allowed 0, on device 2, 5 " in out
    )


@pytest.mark.parametrize(
    ("flags", "params", "match"),
    [
        (["--dry_run"], [], "--check compares kernels and collectives, and trains"),
        (["--fresh"], [], "without --dry_run, --fresh and --from_step"),
        (["--from_step=3"], [], "without --dry_run, --fresh and --from_step"),
        ([], ["Dispatch.transport = 'ragged'"], "XLA:CPU has no ragged_all_to_all"),
        ([], ["Train.num_stps = 3"], "Train has no field num_stps"),
    ],
)
def test_bad_input_of_check(capfd, flags, params, match):
    code, _, err = check_here(capfd, *params, flags=flags)
    assert code == BAD_INPUT
    assert match in err
    assert err.count("\n") == 1


def test_a_check_without_data_runs(monkeypatch, quick, capfd):
    monkeypatch.setattr(doctor, "kernel_checks", lambda run: [])
    monkeypatch.setattr(doctor, "transport_checks", lambda run: [])
    code, out, _ = check_here(capfd, "Data.corpus = 'no/such.txt'")
    assert code == 0
    assert "0 checks on 8 x cpu" in out


def test_limit_names_what_hangs(monkeypatch):
    ended = []
    monkeypatch.setattr(doctor.failures, "end_all", lambda *args: ended.append(args))
    slow = dataclasses.make_dataclass("Slow", ["name"])
    with doctor.Limit(0.05) as limit:
        limit.at([slow("one"), slow("two")])
        limit._timer.join(10)
    ((code, line),) = ended
    assert code == FAILED
    assert line.startswith("DOCTOR HANGS: the checks of one, two have not ended after ")
    with doctor.Limit(0) as limit:
        limit.at([slow("one")])
        assert limit._timer is None
