"""Runs in which a device flips a bit end with its name, and go on from the checkpoint
before it; honest runs under a balancer raise nothing.

All tests in this file share programs.
"""

import contextlib
import json
import re
from unittest import mock

import pytest

from tests.support.flips import flip_leaf
from tests.support.watched_run import (
    MESH,
    assert_same_run,
    run_here,
    speeds,
    watched,
)
from train.balance.balancing import Balancing
from train.replicas import replay
from train.replicas.watch import ReplicasDiffer

pytestmark = pytest.mark.slow
OFTEN = "Train.check_replicas_every_steps = 4"
SHORT = ("Train.num_steps = 16", "Checkpoint.every_steps = 7", OFTEN)
TWO = ("Mesh.data = 1", "Mesh.dc = 2", "Balance.policy = 'home'")
GATE = "params/cycles/blocks/0/moe/gate_edf"


@pytest.fixture(scope="module")
def house():
    with watched() as house:
        yield house


@pytest.fixture(scope="module")
def undisturbed(house, tmp_path_factory):
    return run_here(house, tmp_path_factory.mktemp("undisturbed") / "run", *SHORT)


@contextlib.contextmanager
def flipping(step: int, name: str, device: int, bit: int):
    """Have runs flip a bit of one device's shard before a step."""
    before = Balancing.before

    def flipped(self, next_step, state):
        state = before(self, next_step, state)
        return flip_leaf(state, name, device, bit) if next_step == step else state

    with mock.patch.object(Balancing, "before", flipped):
        yield


def saved(run_dir) -> list[int]:
    names = [path.name for path in (run_dir / "checkpoints").iterdir()]
    return sorted(map(int, filter(str.isdecimal, names)))


def ended(house, run_dir, *params: str) -> str:
    """Run until replicas differ, and return the line that says so."""
    with pytest.raises(ReplicasDiffer) as error:
        run_here(house, run_dir, *params)
    return str(error.value)


def test_a_run_names_leaf_device_and_steps(house, undisturbed, tmp_path):
    """A run saves nothing after a flip, and a new start ends as an undisturbed run."""
    run_dir, leaf, bit = tmp_path / "run", "moe/router_de", 29
    with flipping(10, f"params/cycles/blocks/0/{leaf}", 6, bit):
        line = ended(house, run_dir, *SHORT)
    assert re.fullmatch(
        rf"REPLICAS DIFFER after step 12: params/cycles/blocks/0/{leaf}.* is wrong on "
        r"device 6 \(process 0, data=1, expert=2\): the 7 other replicas agree; they "
        r"were equal after step 8; start again to go on from checkpoint 7, .*",
        line,
    ), line
    assert saved(run_dir) == [7]
    done = run_here(house, run_dir, *SHORT)
    assert_same_run(done.run_dir, undisturbed.run_dir)


def test_a_save_compares_first(house, tmp_path):
    """The key is wrong before step 6, so the comparison before save 7 finds it."""
    with flipping(6, "key", 3, 0):
        line = ended(house, tmp_path / "run", *SHORT)
    assert line.startswith("REPLICAS DIFFER after step 7: key is wrong on device 3 ")
    assert "there is no checkpoint, so that a new start begins at step 1" in line
    assert saved(tmp_path / "run") == []


@pytest.mark.long
def test_of_two_replicas_a_replay_says_which_is_wrong(house, tmp_path, monkeypatch):
    """Too far from the checkpoint, or without one, it is not known."""
    for device, other in ((2, 6), (6, 2)):
        run_dir = tmp_path / f"run-{device}"
        with flipping(10, GATE, device, 20):
            line = ended(house, run_dir, *SHORT, *TWO)
        start = f"REPLICAS DIFFER after step 12: {GATE} is wrong on device {device} "
        assert line.startswith(start)
        assert "a replay of steps 8 to 13 comes nearer to the other" in line
        assert f"device {other} is off by " in line
    monkeypatch.setattr(replay, "MAX_STEPS", 5)
    for step, why in ((10, "checkpoint 7 is 6 steps back, and 5 are"), (2, "no check")):
        with flipping(step, GATE, 2, 20):
            line = ended(house, tmp_path / f"far-{step}", *SHORT, *TWO)
        places = f"{GATE}: on devices 2 and 6; which one is wrong is not known: "
        assert f"{places}{'there is ' * (step == 2)}{why}" in line


@pytest.mark.long
@pytest.mark.parametrize(
    "params",
    [
        ("Balance.policy = 'flexmoe'",),
        ("Balance.policy = 'smartmoe'", "Balance.horizon_steps = 1000000"),
        ("Balance.policy = 'eplb'",),
        ("Balance.policy = 'micromoe'", "Dispatch.store = 'transient'"),
    ],
    ids=["resident", "owned", "sharded", "transient"],
)
def test_honest_runs_raise_nothing(house, tmp_path, params):
    """Replicas are equal after each of 30 steps under each store."""
    every = "Train.check_replicas_every_steps = 1"
    done = run_here(house, tmp_path / "run", *params, "Train.num_steps = 30", every)
    assert len(done.steps) == 30


@pytest.mark.long
def test_a_relayout_changes_nothing(house, tmp_path):
    """A flip after a relayout is found, and none is found before."""
    cheap = speeds(tmp_path / "cheap.json", MESH)
    params = (f"Balance.calibration = '{cheap}'", OFTEN, "Train.num_steps = 39")
    with flipping(33, "moe/router_de", 1, 29):
        line = ended(house, tmp_path / "run", *params)
    assert "after step 36: params/cycles/blocks/0/moe/router_de" in line
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    kinds = [x["decision"]["kind"] for x in map(json.loads, lines) if "decision" in x]
    assert "relayout" in kinds


def test_no_comparison_with_0(house, tmp_path):
    params = (*SHORT, "Train.check_replicas_every_steps = 0", "Train.num_steps = 9")
    with flipping(3, "key", 3, 0):
        run_here(house, tmp_path / "run", *params)
    assert saved(tmp_path / "run") == [7, 9]
