"""Test tools/chaos.py: its plan, its judgements, and a few faults in a real run."""

import contextlib
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.balanced_run import new_planner
from tests.support.run_main import ROOT
from tests.support.waiting import wait_until
from tools import chaos
from tools.faults import promises, run, worker
from tools.faults.damage import damage_metrics
from tools.faults.plan import make_plan
from tools.faults.run import NUM_STEPS, Broken
from tools.faults.table import FAULTS, NAMES
from train.balance.record import BalanceRecord
from train.checkpoint.record import make_record
from train.checkpoint.retention import Saved

TOOL = ROOT / "tools" / "chaos.py"
FAST = "kill,checkpoint,metrics line"


def play(folder: pathlib.Path, *flags: str) -> tuple[int, str]:
    """Run tools/chaos.py, and return its exit code and what it printed."""
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    words = [sys.executable, TOOL, f"--out={folder}", f"--cache={cache}", *flags]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_three_faults_in_one_run_are_survived(tmp_path):
    flags = ["--faults=3", f"--only={FAST}", "--processes=1", "--json"]
    code, text = play(tmp_path / "out", *flags)
    assert code == 0, text
    record = json.loads(text.splitlines()[-1])
    assert {row["fault"]: row["kept"] for row in record["faults"]} == {
        "kill": 1, "checkpoint": 1, "metrics line": 1,
    }  # fmt: skip
    assert (record["num_kept"], record["broken"]) == (3, [])


@pytest.mark.slow
@pytest.mark.long
def test_ten_faults_in_runs_of_several_processes_are_survived(tmp_path):
    code, text = play(tmp_path / "out", "--faults=10", "--seed=5")
    assert code == 0, text


def test_a_plan_follows_from_its_seed_and_has_every_kind():
    plan = make_plan(FAULTS, 100, 0, (1, 2, 4))
    assert plan == make_plan(FAULTS, 100, 0, (1, 2, 4))
    assert plan != make_plan(FAULTS, 100, 1, (1, 2, 4))
    names = [fault.name for scenario in plan for fault in scenario.faults]
    times = [names.count(name) for name in NAMES]
    assert sum(times) == 100
    assert max(times) - min(times) <= 1
    assert {scenario.num_processes for scenario in plan} == {1, 2, 4}


def test_a_plan_rests_once_in_each_run_and_gives_each_fault_its_processes():
    for scenario in make_plan(FAULTS, 200, 3, (1, 2, 4)):
        states = [fault.state for fault in scenario.faults]
        changes = sum(a != b for a, b in itertools.pairwise(states))
        assert changes <= 2, scenario
        assert all(scenario.num_processes >= x.min_processes for x in scenario.faults)


def test_faults_that_need_mounts_are_left_out_and_named():
    chosen, left_out = chaos.choose("", may_mount=False, most=4)
    assert left_out == ["full disk", "read-only disk"]
    assert len(chosen) + 2 == len(FAULTS)


def test_faults_that_need_more_processes_are_left_out_and_named():
    chosen, left_out = chaos.choose("", may_mount=True, most=1)
    assert left_out == ["mismatch"]
    assert len(make_plan(chosen, 100, 0, [1])) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--faults=0"], "--faults=0 and --minutes=45 must be positive"),
        (["--only=fire"], "--only: no fault is called 'fire'"),
        (["--only=mismatch", "--processes=1"], "--only=mismatch cannot be made here"),
        (["--run=99"], "--run=99: the plan has no such run"),
        ([f"--out={ROOT}"], "is not an empty folder"),
    ],
)
def test_bad_flags_are_one_line_and_code_2(words, message, capsys):
    assert chaos.main([*words, "--plan"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def write_run(folder: pathlib.Path, **changes) -> pathlib.Path:
    """Write the files of a finished run. `changes` replace the lines of its files."""
    steps = range(1, NUM_STEPS + 1)
    lines = {
        "metrics": [{"step": step, "loss": 1 / step} for step in steps],
        "samples-0": [{"step": s, "rows": [0, 1], "ids": ["a", "b"]} for s in steps],
    }
    folder.mkdir()
    for name, records in (lines | changes).items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
    goodput = {"share": {"useful": 0.25, "other": 0.75}}
    summary = {"digest": "12ab", "goodput": goodput}
    (folder / "summary.json").write_text(json.dumps(summary))
    write_record(folder / "checkpoints", 5)
    return folder


def write_record(folder: pathlib.Path, checksum: int) -> None:
    """Write the record of the last step's checkpoint, with one array."""
    array = {"dtype": "float32", "shape": [2], "checksum": checksum}
    task, snapshot = new_planner()
    balance = BalanceRecord(snapshot.planner.state, 1, task, snapshot.to_json())
    meta = {"plan": "p", "balance": balance.to_json()}
    record = make_record(Saved(NUM_STEPS, 1.5), {"w": array}, meta)
    path = folder / str(NUM_STEPS) / "record" / "metadata"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def test_a_whole_run_is_accepted(tmp_path):
    result = promises.read_result(write_run(tmp_path / "run"))
    promises.expect_same(result, result)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("metrics", lambda x: x[:5] + x[6:], r"lines of the steps \[6\] are missing"),
        ("metrics", lambda x: [*x, x[3]], "metrics.jsonl has two lines of"),
        ("metrics", lambda x: [*x, [7]], "line 73 of metrics.jsonl is bad"),
        ("samples-0", lambda x: [*x, x[0]], "row 0 of step 1 was fed twice"),
        ("samples-0", lambda x: x[1:], r"samples: lines of the steps \[1\]"),
    ],
)
def test_lost_and_repeated_lines_are_broken_promises(tmp_path, name, spoil, message):
    good = write_run(tmp_path / "good") / f"{name}.jsonl"
    records = [json.loads(line) for line in good.read_text().splitlines()]
    with pytest.raises(Broken, match=message):
        promises.read_result(write_run(tmp_path / "bad", **{name: spoil(records)}))


def test_another_loss_is_a_broken_promise(tmp_path):
    good = promises.read_result(write_run(tmp_path / "good"))
    records = [{"step": s, "loss": 1 / max(s, 2)} for s in range(1, NUM_STEPS + 1)]
    bad = promises.read_result(write_run(tmp_path / "bad", metrics=records))
    with pytest.raises(Broken, match=r"metrics differ .* first at \(1, 'loss'\)"):
        promises.expect_same(bad, good)


def test_another_array_in_the_last_checkpoint_is_a_broken_promise(tmp_path):
    folder = write_run(tmp_path / "run")
    good = promises.read_result(folder)
    write_record(folder / "checkpoints", 6)
    with pytest.raises(Broken, match=r"arrays differ .* first at w"):
        promises.expect_same(promises.read_result(folder), good)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "summary.json cannot be read: FileNotFoundError"),
        ("[]", "summary.json cannot be read: TypeError"),
        (
            '{"digest": "12ab", "goodput": {"share": {"useful": 0.5}}}',
            "summary.json has no digest, or shares of the time",
        ),
    ],
)
def test_a_bad_summary_is_a_broken_promise(tmp_path, text, message):
    path = write_run(tmp_path / "run") / "summary.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(Broken, match=message):
        promises.read_result(path.parent)


def make_resting_run(folder: pathlib.Path, *steps: int) -> run.Run:
    """Return a run that has saved these steps, and whose launcher does not run."""
    place = run.Place(folder, folder / "shards", folder / "a", folder / "programs")
    place.make()
    for step in steps:
        (place.checkpoints / str(step)).mkdir(parents=True)
    return run.Run(place, 1, 60.0, 0.0)


@pytest.mark.parametrize(
    ("resumed", "spoiled", "is_kept"),
    [(12, {}, True), (6, {}, False), (None, {}, False), (6, {12}, True)],
)
def test_a_run_that_loses_saved_steps_is_a_broken_promise(
    tmp_path, monkeypatch, resumed, spoiled, is_kept
):
    disturbed = make_resting_run(tmp_path, 6, 12)
    disturbed.spoiled = set(spoiled)
    line = "" if resumed is None else f"resumed at step {resumed}\n"
    words = [sys.executable, "-c", f"print({line!r})"]
    monkeypatch.setattr(disturbed, "_command", lambda: words)
    disturbed.start()
    disturbed.expect_end(0, 30.0)
    with contextlib.nullcontext() if is_kept else pytest.raises(Broken, match="12 was"):
        disturbed.expect_resumed()


def test_a_traceback_is_a_broken_promise(tmp_path, monkeypatch):
    disturbed = make_resting_run(tmp_path)
    words = [sys.executable, "-c", "print('Traceback (most recent call last):')"]
    monkeypatch.setattr(disturbed, "_command", lambda: words)
    disturbed.start()
    with pytest.raises(Broken, match="exit code 0, but with a traceback"):
        disturbed.expect_end(0, 30.0)


def test_a_process_that_hangs_writes_its_stacks_and_is_killed(tmp_path, monkeypatch):
    disturbed = make_resting_run(tmp_path)
    code = (
        "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); "
        "print('begun', flush=True); time.sleep(60)"
    )
    words = ["env", "MOEJAX_PROCESS_ID=0", sys.executable, "-c", code]
    monkeypatch.setattr(disturbed, "_command", lambda: words)
    disturbed.start()
    disturbed.wait_until(lambda: "begun" in disturbed.text(), "a start", 30.0)
    disturbed.write_stacks()
    stack = 'File "<string>", line 1'
    disturbed.wait_until(lambda: stack in disturbed.text(), "stacks", 30.0)
    disturbed.close()
    assert run.marked_pids(tmp_path) == []


@pytest.mark.parametrize("fault", [x for x in FAULTS if x.name.endswith("cache")])
def test_damage_that_hits_nothing_is_no_kept_promise(tmp_path, fault):
    with pytest.raises(Broken, match="there were no"):
        fault.act(make_resting_run(tmp_path), random.Random(0))


def test_lines_that_are_damaged_must_be_named_and_kept_aside(tmp_path):
    disturbed = make_resting_run(tmp_path)
    path = disturbed.place.run_dir / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    damage = damage_metrics(disturbed, random.Random(0))
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 4
    assert lines[-1] == b'{"st', "a torn line stays torn"
    with pytest.raises(Broken, match="nothing is said"):
        damage.check("")
    text = f"METRICS DAMAGED: 1 lines of {path} are moved to metrics.jsonl.damaged"
    aside = path.with_name("metrics.jsonl.damaged")
    aside.write_bytes(b"other\n")
    with pytest.raises(Broken, match="has not the bad line"):
        damage.check(text)
    aside.write_bytes(path.read_bytes())
    damage.check(text)


def test_files_outside_of_the_run_directory_are_broken_promises(tmp_path):
    place = make_resting_run(tmp_path).place
    for path in (place.corpus, place.run_dir):
        path.mkdir()
    for path in (place.speeds, place.run_dir / ".lock"):
        path.touch()
    before = promises.listing(place)
    promises.expect_nothing_left(place)
    for path in (place.root / "tmp" / "key.pem", place.disk / "a"):
        path.touch()
        with pytest.raises(Broken, match=path.name):
            promises.expect_nothing_left(place)
        path.unlink()
    (place.root / "stray").touch()
    with pytest.raises(Broken, match="stray"):
        promises.expect_untouched(before, promises.listing(place))


@pytest.mark.parametrize("name", ["config.gin.tmp", "7.orbax-checkpoint-tmp"])
def test_leftovers_are_broken_promises(tmp_path, name):
    place = run.Place(tmp_path, tmp_path, tmp_path, tmp_path)
    place.run_dir.mkdir(parents=True)
    (place.run_dir / ".lock").touch()
    promises.expect_nothing_left(place)
    (place.run_dir / name).touch()
    with pytest.raises(Broken, match=name):
        promises.expect_nothing_left(place)


def test_a_process_that_lives_on_is_a_broken_promise(tmp_path):
    environ = os.environ | {run.MARK: str(tmp_path)}
    orphan = subprocess.Popen(["sleep", "60"], env=environ)
    try:
        wait_until(lambda: run.marked_pids(tmp_path))
        assert run.marked_pids(tmp_path) == [orphan.pid]
    finally:
        orphan.kill()
        orphan.wait()
    assert run.marked_pids(tmp_path) == []


def test_a_flip_changes_one_bit_of_one_replica():
    mesh = Mesh(np.array(jax.devices()[:4]), "x")
    whole, cut = (NamedSharding(mesh, PartitionSpec(*x)) for x in ((), ("x",)))
    state = {
        "params": {
            "cut": jax.device_put(jnp.ones(8), cut),
            "whole": jax.device_put(jnp.arange(6.0), whole),
        },
        "step": jax.device_put(jnp.int32(3), whole),
    }
    order = {"leaf": 5, "device": 6, "element": 9, "bit": 20}
    name, device, flipped = worker.flip(state, order)
    assert name == "params/whole"
    assert device == mesh.devices[2].id
    copies = [np.array(x.data) for x in flipped["params"]["whole"].addressable_shards]
    different = [np.flatnonzero(copy != np.arange(6)).tolist() for copy in copies]
    assert different == [[], [], [3], []]
    words = copies[2].view(np.uint32) ^ np.arange(6, dtype=np.float32).view(np.uint32)
    assert words.tolist() == [0, 0, 0, 1 << 20, 0, 0]
