"""Test tools/bringup.py: its record, its processes, its order and budget, quarantine,
and what it says of a machine on which less runs, or nothing."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from moejax.kernels import device_file, quarantine
from moejax.kernels.permute.choose import choose_permute
from tests.support import fake_checks
from tests.support.waiting import wait_until
from tools import bringup, tune_kernels
from tools.stages import (
    kernel_checks,
    machine,
    numerics,
    pack,
    record,
    runner,
    screen,
    session,
)
from tools.stages.machine import ROOT, Devices
from tools.stages.stage import DRY_KIND, Settings, Task
from tools.stages.table import BY_NAME, STAGES

KEY = {"code": "1", "device": "x", "versions": {}, "plants": []}
H200 = Devices("gpu", "NVIDIA H200", 1, "9.0", 2**37)


@pytest.fixture
def own_caches(monkeypatch, tmp_path):
    """Let a bring-up write to no cache of this machine."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def make_settings(folder: pathlib.Path, **changes) -> Settings:
    settings = Settings(
        out=str(folder),
        work=str(folder),
        is_dry=True,
        device_kind=DRY_KIND,
        num_devices=1,
        is_hopper=True,
        gin_files=(),
        corpus="words.txt",
    )
    return dataclasses.replace(settings, **changes)


def make_bringup(folder: pathlib.Path, **changes) -> session.BringUp:
    settings = make_settings(folder, is_dry=False)
    run = session.BringUp(settings, KEY, "580.1", False, [], {})
    return dataclasses.replace(run, **changes)


def read_lines(folder: pathlib.Path) -> list[dict]:
    text = (folder / session.LINES).read_text()
    return [json.loads(line) for line in text.splitlines()]


def end_at_once(monkeypatch, states=None) -> list[str]:
    """Let stages end at once, in given states, and return a list of those that ran."""
    ran = []

    def ended(self, stage, limit_sec):
        ran.append(stage.name)
        state = (states or {}).get(stage.name, "passed")
        return {"state": state, "sec": 1.0, "why": "so", "figures": {}}

    monkeypatch.setattr(session.BringUp, "ended", ended)
    return ran


def test_a_record_counts_what_was_cut_off(tmp_path):
    path = tmp_path / "stages.jsonl"
    begun, over = {"stage": "a", "state": "begun"}, {"stage": "a", "state": "passed"}
    for line in (begun, over | {"sec": 1}, begun, begun, begun | {"stage": "b"}):
        record.append(path, line | {"key": KEY})
    path.write_bytes(path.read_bytes() + b'{"stage": "b", "sta')  # a torn line
    record.append(path, over | {"stage": "c", "key": KEY})
    record.append(path, over | {"stage": "b", "key": KEY | {"device": "y"}})
    past = record.read(path, KEY)
    assert past["a"].is_over
    assert (past["a"].num_cut_off, past["b"].num_cut_off) == (2, 1)
    assert past["b"].ended is None
    assert past["c"].is_over
    failed = record.Past(over | {"state": "failed"})
    assert not failed.is_over


def test_a_hang_is_killed_with_its_children(tmp_path):
    pid = tmp_path / "pid"
    text = f"sleep 100 & echo $! > {pid}; wait"
    end = runner.run(["sh", "-c", text], 0.5, tmp_path / "log")
    assert end.code is None
    assert end.why.startswith("no end after")
    wait_until(lambda: b"sleep\x00100" not in command_line(pid.read_text().strip()))
    assert runner.run(["sh", "-c", "kill -SEGV $$"], 5, tmp_path / "log").why == (
        "crashed with SIGSEGV"
    )


def test_a_call_goes_on_where_the_last_one_ended(tmp_path, monkeypatch, own_caches):
    ran = end_at_once(monkeypatch, {"attention": "failed", "layer": "quarantined"})
    stages = [BY_NAME[name] for name in ("machine", "attention", "products", "layer")]
    first = make_bringup(tmp_path)
    first.play(stages, 3600)
    assert ran == ["machine", "attention", "products", "layer"]
    record.append(tmp_path / session.LINES, {"stage": "steps", "state": "begun"}
                  | {"key": KEY})  # fmt: skip
    ran.clear()
    again = make_bringup(tmp_path)
    again.play([*stages, BY_NAME["steps"]], 3600)
    assert ran == ["steps", "attention"], "what failed before comes last"
    assert set(again.results) == {*(s.name for s in stages), "steps"}
    ran.clear()
    make_bringup(tmp_path, key=KEY | {"code": "2"}).play(stages, 3600)
    assert len(ran) == 4, "another commit"
    make_bringup(tmp_path, is_again=True).play(stages[:1], 3600)
    assert ran[4:] == ["machine"]


def test_a_stage_that_was_cut_off_twice_is_left_out(tmp_path, monkeypatch, own_caches):
    ran = end_at_once(monkeypatch)
    for _ in range(2):
        line = {"stage": "layer", "state": "begun", "key": KEY}
        record.append(tmp_path / session.LINES, line)
    run = make_bringup(tmp_path)
    run.play([BY_NAME["layer"], BY_NAME["attention"]], 3600)
    assert ran == ["attention"]
    assert run.results["layer"]["state"] == "failed"
    assert "cut off 2 times" in run.results["layer"]["why"]


def test_stages_share_the_time(tmp_path, monkeypatch, own_caches):
    """A stage gets what it needs and what the later ones leave; those that do not fit
    are left for the next call."""
    run, later = make_bringup(tmp_path), list(STAGES[1:])
    needs = sum(stage.need_sec for stage in STAGES)
    first = STAGES[0]
    assert run.share_sec(first, later, needs + 20) == first.need_sec + 20
    assert run.share_sec(first, later, 10 * needs) == first.limit_sec
    assert run.share_sec(first, later, first.need_sec - 1) is None
    ran = end_at_once(monkeypatch)
    run.play([BY_NAME["machine"], BY_NAME["numerics"]], BY_NAME["machine"].need_sec + 1)
    assert (ran, run.left) == (["machine"], ["numerics"])
    assert "the same command goes on" in "\n".join(run.finish()["lines"])


def test_a_planted_hang_is_killed_and_the_rest_done(
    tmp_path, monkeypatch, capsys, own_caches
):
    monkeypatch.setattr(session, "PLANTED_LIMIT_SEC", 2.0)
    out = tmp_path / "out"
    flags = ["--dry", f"--out={out}", "--stages=machine,sanitizer", "--json"]
    code = bringup.main([*flags, "--plant=hang:machine"])
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert code == 1
    assert result["stages"]["machine"]["state"] == "failed"
    assert "no end after 2 s: killed" in result["stages"]["machine"]["why"]
    assert result["stages"]["sanitizer"]["state"] == "not_here"
    assert 1 <= len(list(out.iterdir())) <= 8
    states = [(line["stage"], line["state"]) for line in read_lines(out)]
    assert states.count(("machine", "begun")) == 1
    assert (out / session.SCREEN).read_text() in printed


def test_killing_the_bringup_ends_its_stages(tmp_path):
    """Also SIGKILL. The next call goes on."""
    out = tmp_path / "out"
    words = [sys.executable, "-c", "import sys; from tools import bringup; "
             "from tools.stages import session; "
             "session.PLANTED_LIMIT_SEC = 60; sys.exit(bringup.main(sys.argv[1:]))",
             "--dry", f"--out={out}", "--stages=sanitizer",
             f"--work={tmp_path / 'work'}", "--plant=hang:sanitizer"]  # fmt: skip
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    log = tmp_path / "work" / "sanitizer.log"
    wait_until(lambda: log.is_file() and "as planted" in log.read_text())
    process.kill()
    process.wait()
    name = str(tmp_path / "work").encode()
    wait_until(lambda: not any(name in text for text in command_lines()))
    assert [line["state"] for line in read_lines(out)] == ["begun"]


def command_lines() -> list[bytes]:
    """Return the command lines of all processes."""
    folders = pathlib.Path("/proc").glob("[0-9]*")
    return [command_line(folder.name) for folder in folders]


def command_line(pid: str) -> bytes:
    """Return the words of a process, each with a NUL behind; b"" if it has ended."""
    try:
        return pathlib.Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


def make_task(folder: pathlib.Path, **changes) -> Task:
    settings = make_settings(folder, **changes)
    settings.save(folder / "settings.json")
    return Task(settings, folder / "numerics.json", time.monotonic() + 100)


def test_a_crash_a_hang_and_a_wrong_kernel_are_quarantined(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEJAX_TUNED", str(tmp_path))
    monkeypatch.setattr(numerics, "CHECKS", "tests.support.fake_checks")
    monkeypatch.setattr(numerics, "KERNEL_SEC", {True: 3.0})
    task = make_task(tmp_path)
    result = numerics.work(task)
    assert result.state == "quarantined"
    wrong = (fake_checks.WRONG, fake_checks.CRASHES, fake_checks.HANGS)
    names = [unit.split("/")[0] for unit in wrong]
    whys = [quarantine.find(name, DRY_KIND).why for name in names]
    assert whys[0] == "error 0.3, at most 0.01"
    assert whys[1] == "crashed with SIGSEGV"
    assert "killed" in whys[2]
    found = result.figures["kernels"]
    right = [unit for unit, own in found.items() if not own["why"]]
    others = len(quarantine.KERNELS) - len(wrong)
    assert len(right) == 2 * others, "all others were checked, in both forms"


@pytest.mark.slow
def test_a_planted_wrong_kernel_is_found_and_fallen_back_from(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEJAX_TUNED", str(tmp_path))
    task = make_task(tmp_path, plants=("wrong:permute",), is_small=True)
    begun, over = kernel_checks.check("permute/first", task.settings)
    assert not begun["is_over"]
    assert "error" in over["why"]
    right = dataclasses.replace(task.settings, plants=("wrong:wgrad",))
    assert not list(kernel_checks.check("permute/first", right))[-1]["why"]
    numerics.hold(task, {"permute/first": over["why"]})
    device = AbstractDevice(DRY_KIND, None, "gpu")
    mesh = AbstractMesh((1,), ("expert",), (AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        choice = choose_permute("bfloat16", 1024)
    assert choice.implementation == "xla"
    assert over["why"] in choice.why


@pytest.mark.slow
@pytest.mark.long
def test_a_dry_run_with_planted_faults(tmp_path):
    """All stages, a wrong kernel that is found and fallen back from, a hang."""
    out = tmp_path / "out"
    words = [sys.executable, "tools/bringup.py", "--dry", f"--out={out}", "--json",
             f"--work={tmp_path / 'work'}", "--plant=wrong:wgrad",
             "--plant=wrong:attention", "--plant=hang:products"]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    states = {name: own["state"] for name, own in result["stages"].items()}
    assert states == dict.fromkeys(BY_NAME, "passed") | {
        "numerics": "quarantined", "products": "failed", "sanitizer": "not_here",
    }  # fmt: skip
    assert set(result["quarantined"]) == {"wgrad", "attention"}
    kernels = result["stages"]["steps"]["figures"]["kernels"]
    assert "wgrad" in kernels["grouped_dot"][1]
    assert kernels["attention"][0] == "cudnn"
    assert "quarantined" in kernels["attention"][1]
    assert len(list(out.iterdir())) <= 8
    words.append("--stages=machine,numerics")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "at most" not in done.stdout.split("bring-up:")[0], "nothing runs again"


def refused(capsys, *flags: str) -> tuple[int, str]:
    code = bringup.main(list(flags))
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return code, err


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--stages=numeric"], "did you mean 'numerics'?"),
        (["--minutes=0"], "--minutes=0 must be above 0"),
        (["--plant=wrong:gemm"], "--plant=wrong:gemm must be wrong:KERNEL"),
        (["--dry", "--plant=wrong:swiglu/second"], "forward and wgrad alone; plant it"),
        (["--gin_file=no.gin"], "--gin_file=no.gin is not a file"),
    ],
)
def test_bad_flags_are_one_line(capsys, flags, match):
    code, err = refused(capsys, *flags)
    assert (code, match in err) == (2, True), err


def test_a_machine_without_a_gpu(capsys, tmp_path, monkeypatch, own_caches):
    monkeypatch.setattr(machine, "find_driver", lambda: None)
    cpu = Devices("cpu", "cpu", 1, "", None)
    monkeypatch.setattr(machine, "find_devices", lambda: cpu)
    code, err = refused(capsys, f"--out={tmp_path / 'out'}")
    assert code == 2
    assert "no GPU here" in err
    assert "--dry" in err


def test_a_driver_that_is_too_old(capsys, tmp_path, monkeypatch, own_caches):
    monkeypatch.setattr(machine, "find_driver", lambda: "535.104.05")
    monkeypatch.setattr(machine, "versions", lambda: {machine.PLUGIN: "0.11.2"})
    code, err = refused(capsys, f"--out={tmp_path / 'out'}")
    assert code == 2
    assert "535.104.05, and CUDA 13 needs 580" in err
    monkeypatch.setattr(machine, "versions", lambda: {})
    machine.require_driver("535.104.05")  # another CUDA has its own rule


def test_a_folder_that_cannot_be_written(capsys, tmp_path, own_caches):
    (tmp_path / "file").write_text("")
    code, err = refused(capsys, "--dry", f"--out={tmp_path / 'file' / 'out'}")
    assert code == 2
    assert "cannot be written" in err


def test_choices_that_the_repository_does_not_take(tmp_path, monkeypatch):
    """Every stage runs, and a line says how runs find the choices."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOEJAX_TUNED", str(tmp_path / "file" / "tuned"))
    run = make_bringup(tmp_path)
    run.choices_file().write_text("{}")
    run.give_choices()
    run.give_choices()
    assert len(run.lines) == 1
    assert f"MOEJAX_TUNED={tmp_path}" in run.lines[0]


def test_choices_reach_the_runs_of_this_machine(tmp_path, monkeypatch):
    known = tmp_path / "tuned"
    monkeypatch.setenv("MOEJAX_TUNED", str(known))
    quarantine.store(DRY_KIND, "permute", "first", "error 1")
    run = make_bringup(tmp_path)
    run.take_choices()
    assert run.choices_file().read_bytes() == device_file.path_of(DRY_KIND).read_bytes()
    run.choices_file().write_text("{}")
    dataclasses.replace(run, settings=make_settings(tmp_path)).give_choices()
    assert device_file.path_of(DRY_KIND).read_text() != "{}", "a dry run gives nothing"
    run.give_choices()
    assert device_file.path_of(DRY_KIND).read_text() == "{}"


def test_another_gpu_and_missing_modules_leave_some_stages(tmp_path, monkeypatch):
    a100 = make_settings(tmp_path, is_hopper=False, device_kind="NVIDIA A100")
    why, lines = session.lacking(a100)
    assert set(why) == {stage.name for stage in STAGES if stage.needs_hopper}
    assert "for Hopper, not NVIDIA A100: machine, attention" in lines[0]
    monkeypatch.setattr(machine, "missing", lambda modules: ["gin", "grain"])
    why, lines = session.lacking(make_settings(tmp_path))
    assert "numerics" not in why
    assert "gin-config==0.5.0" in why["steps"]
    assert len(lines) == 1
    assert "gin-config==0.5.0, grain==" in lines[0]
    assert "numerics" in lines[0]
    assert "--pack DIR" in lines[0]


def test_the_driver_is_read_from_the_kernel(monkeypatch, tmp_path):
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Rel"
    monkeypatch.setattr(pathlib.Path, "is_file", lambda self: True)
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self: text)
    assert machine.find_driver() == "580.159.04"


def test_stages_are_ordered_by_what_they_need():
    names = list(BY_NAME)
    for stage in STAGES:
        assert all(names.index(other) < names.index(stage.name) for other in
                   stage.after), stage  # fmt: skip
        assert stage.need_sec <= stage.limit_sec


def test_the_screen_is_one_screen(tmp_path):
    run = make_bringup(tmp_path)
    long = {"state": "passed", "sec": 12.0, "why": "figures " * 100, "figures": {}}
    run.results = dict.fromkeys(BY_NAME, long)
    lines = screen.draw(run.finish()).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= screen.WIDTH


def test_the_pack_names_versions_and_keeps_its_size(tmp_path, monkeypatch, capsys):
    taken = []

    def download(names, folder):
        folder.mkdir()
        taken.extend(names)
        (folder / "a.whl").write_bytes(bytes(1000))

    def write_corpus(folder):
        folder.mkdir()

    monkeypatch.setattr(pack, "download", download)
    monkeypatch.setattr(pack, "write_corpus", write_corpus)
    assert bringup.main([f"--pack={tmp_path / 'pack'}"]) == 0
    assert all("==" in name for name in taken)
    assert {"gin-config==0.5.0", "grain==0.2.18"} <= set(taken)
    assert "pip install --no-index" in (tmp_path / "pack" / "INSTALL.txt").read_text()
    code, err = refused(capsys, f"--pack={tmp_path / 'pack'}")
    assert (code, "not an empty folder" in err) == (2, True)
    monkeypatch.setattr(pack, "MAX_BYTES", 500)
    code, err = refused(capsys, f"--pack={tmp_path / 'other'}")
    assert (code, "more than 0" in err) == (2, True)


def test_the_pack_has_the_wheels_of_make_peers():
    text = (ROOT / "Makefile").read_text()
    (line,) = (x for x in text.splitlines() if x.startswith("PEER_WHEELS"))
    assert line.partition(":= ")[2].split() == list(pack.PEERS)


def test_jax_has_not_started_in_the_bringup():
    """The process that holds the order must hold no GPU."""
    text = "import tools.bringup, sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True)
    assert jax.__version__ in machine.versions()["jax"]


def test_tuning_keeps_the_quarantine():
    held = {"wgrad": {"form": "first", "why": "error 1"}}
    known = device_file.empty(DRY_KIND) | {"quarantined": held}
    row = {"bucket": "forward", "tiles": {"rows": 128}, "msec": 1.0}
    assert tune_kernels.add_bucket(known, row)["quarantined"] == held
