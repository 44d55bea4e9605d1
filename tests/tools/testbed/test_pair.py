"""Test tools/testbed/run.py pair: turns, figures, and two short runs on a cluster."""

import json
import pathlib
import subprocess
import sys
import types

import pytest

from tests.support.run_main import ROOT
from tools.testbed.pair import make_record
from tools.testbed.turns import Block, Metrics, Run, order, take_turns
from train.config import gin_reader

TOOL = ROOT / "tools" / "testbed" / "run.py"
ARMS = sorted((ROOT / "configs" / "race").glob("*.gin"))


class FakeProgram:
    """A program that writes a line of metrics whenever it is let go on, and the
    beginning of the next one."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.step, self.is_held = path, 0, True

    def go_on(self) -> None:
        self.is_held = False

    def hold(self) -> None:
        self.is_held = True

    def require_running(self) -> None:
        assert not self.is_held
        self.step += 1
        with self.path.open("a") as file:
            file.write(json.dumps({"step": self.step, "step_msec": 1.0}) + "\n")
            file.write('{"step": 99, "step_ms')
            file.truncate(file.tell() - len('{"step": 99, "step_ms'))


def test_turns_alternate_in_mirrored_pairs():
    assert order(2, 4) == [0, 1, 1, 0, 0, 1, 1, 0]
    assert order(3, 3) == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_runs_take_turns_and_one_is_always_held(tmp_path):
    programs = [FakeProgram(tmp_path / f"{index}.jsonl") for index in range(2)]
    runs = [
        Run(name, program, Metrics(program.path))
        for name, program in zip("AB", programs)
    ]
    for run in runs:
        run.advance(2, 60.0)
    blocks = take_turns(runs, 3, 2, 60.0)
    assert [(b.run, b.first_step, b.last_step) for b in blocks] == [
        ("A", 3, 5), ("B", 3, 5), ("B", 6, 8), ("A", 6, 8),
    ]  # fmt: skip
    assert all(program.is_held for program in programs)
    assert blocks[0].num_steps == 3
    assert blocks[0].step_sec == blocks[0].sec / 3


def test_a_ratio_is_that_of_a_pair_of_blocks():
    """A slow minute of the machine slows both blocks of a pair."""
    blocks = [
        Block("A", 3, 6, 4.0), Block("B", 3, 6, 2.0),
        Block("B", 7, 10, 8.0), Block("A", 7, 10, 16.0),
        Block("A", 11, 14, 4.0), Block("B", 11, 14, 3.0),
    ]  # fmt: skip
    msec = {3: 9e3, 4: 9e3, 5: 1e3, 6: 1e3, 9: 1e3, 10: 2e3, 13: 3e3, 14: 4e3}
    steps = [
        {"step": step, "step_msec": x, "modelled_step_msec": x / 2}
        for step, x in msec.items()
    ]
    steps += [{"step": 3, "loss": 5.0, "device_max_over_mean": [1.0, 2.0]}]
    steps += [{"step": 14, "loss": 4.0}]
    metrics = types.SimpleNamespace(records=steps)
    runs = [Run(name, None, metrics) for name in "AB"]
    record = make_record(runs, blocks)
    assert record["ratios"] == [[0.5, 0.5, 0.75]]
    assert (record["ratio"], record["num_steps"]) == ([0.5], [12, 12])
    # The first two steps of a block follow a switch.
    assert record["steady_sec"] == [1.5, 1.5]
    assert record["modelled_sec"] == [0.75, 0.75]
    assert record["step_sec"] == [1.0, 0.75]
    assert (record["last_loss"], record["device_max_over_mean"]) == (
        [4.0] * 2,
        [2.0] * 2,
    )


@pytest.mark.parametrize("path", ARMS, ids=lambda path: path.stem)
def test_every_file_of_the_race_is_valid_and_trains_the_same_model(path):
    cfg, home = (
        gin_reader.load([file]) for file in (path, ROOT / "configs" / "race_cpu.gin")
    )
    assert (cfg.model, cfg.moe, cfg.mesh) == (home.model, home.moe, home.mesh)
    assert cfg != home


@pytest.mark.long
@pytest.mark.root
def test_two_configurations_on_a_cluster(tmp_path):
    toy, other = ROOT / "tests" / "support" / "race.gin", tmp_path / "other.gin"
    other.write_text(f"include '{toy}'\nModel.d_model = 64\n")
    words = ["pair", toy, other, "--rate_mbit", "1000", "100"]
    limits = ["--quota=0.5", "--blocks=2", "--block_steps=3"]
    done = subprocess.run(
        [sys.executable, TOOL, *words, *limits, "--json"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert [at["rate_mbit"] for at in record["rates"]] == [1000, 100]
    for at in record["rates"]:
        assert at["num_steps"] == [6, 6]
        assert [block["run"] for block in at["blocks"]] == ["A", "B", "B", "A"]
        assert len(at["ratios"][0]) == 2
