"""Test tools/chaos.py: its plan, its judgements, and a few faults in a real run."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.run_main import ROOT
from tools import chaos
from tools.faults import promises, run, worker
from tools.faults.plan import make_plan
from tools.faults.run import NUM_STEPS, Broken
from tools.faults.table import FAULTS, NAMES

TOOL = ROOT / "tools" / "chaos.py"
FAST = "kill,checkpoint,metrics line"


def play(folder: pathlib.Path, *flags: str) -> tuple[int, str]:
    """Run tools/chaos.py, and return its exit code and what it printed."""
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    words = [sys.executable, TOOL, f"--out={folder}", f"--cache={cache}", *flags]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


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
    chosen, left_out = chaos.choose("", may_mount=False)
    assert left_out == ["full disk", "read-only disk"]
    assert len(chosen) + 2 == len(FAULTS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--faults=0"], "--faults=0 and --minutes=45 must be positive"),
        (["--only=fire"], "--only: no fault is called 'fire'"),
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
    (folder / "summary.json").write_text(json.dumps({"digest": "12ab"}))
    return folder


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
