"""Whole runs of train/main.py: what they leave, how they stop at a signal and go on, on
other devices and with two processes too. test_resume.py kills them."""

import json
import os
import re
import shutil
import signal
import sys
from unittest import mock

import numpy as np
import pytest

from tests.support.close import assert_close
from tests.support.event_files import shown_steps
from tests.support.plan_history import plan_records
from tests.support.run_main import (
    Live,
    checkpoint_record,
    command,
    corpus,
    listing,
    metric_lines,
    run,
)
from tests.support.run_schema import check_run
from tests.support.watched_run import assert_same_run
from tests.support.workers import WORKERS, assert_same_training, run_workers
from train.config.gin_reader import load
from train.main import main

pytestmark = pytest.mark.slow
NUM_STEPS = 20
PREEMPTED = 75
STOPPED_STEP = 10
"""Step at which SIGTERM comes."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of an undisturbed run, and how it ended."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return run_dir, run(run_dir, flags=["--track=tensorboard"], gin_file=WORKERS)


@pytest.fixture(scope="module")
def stopped(whole, tmp_path_factory):
    """The directory of a run that began with --fresh where a finished run was and got
    SIGTERM before STOPPED_STEP, and how it ended."""
    folder = tmp_path_factory.mktemp("stopped")
    run_dir, held = folder / "run", folder / "held"
    shutil.copytree(whole[0], run_dir)
    words = command(run_dir, flags=["--fresh"], gin_file=WORKERS)
    child = [sys.executable, "-m", "tests.support.held_run", str(held)]
    with Live.__new__(Live) as live:
        live.start(run_dir, [*child, str(STOPPED_STEP), *words[2:]])
        live.wait_until(held.exists, f"step {STOPPED_STEP}")
        live.process.send_signal(signal.SIGTERM)
        held.unlink()
        return run_dir, live.end()


def assert_goodput(ended, num_attempts: int) -> None:
    """Assert that the shares of a run's wall time add up to 1, and that the time of all
    attempts is in it."""
    goodput = ended.record["goodput"]
    share = goodput["share"]
    assert abs(sum(share.values()) - 1) < 0.01
    assert goodput["num_attempts"] == num_attempts
    assert min(share.values()) >= 0
    assert min(share[name] for name in ("useful", "compile", "saves")) > 0
    assert (share["restarts"] > 0) == (num_attempts > 1)
    assert goodput["wall_sec"] > ended.record["wall_sec"]


def test_an_undisturbed_run_leaves_a_whole_record(whole):
    """Each line is as the schema has it, and the loss falls."""
    run_dir, ended = whole
    assert (ended.code, ended.err) == (0, "")
    assert_goodput(ended, 1)
    lines, steps = metric_lines(run_dir), list(range(1, NUM_STEPS + 1))
    assert [x["step"] for x in lines if "loss" in x] == steps
    evaluated = [x["step"] for x in lines if "eval_loss" in x]
    assert evaluated == steps[9::10]
    losses = [x["loss"] for x in lines if "loss" in x]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    assert ended.record["eval_loss"] == lines[-1]["eval_loss"]
    counts = check_run(run_dir)
    assert counts.pop("goodput_line") >= 2
    assert counts == {
        "step": NUM_STEPS, "evaluation": NUM_STEPS // 10, "plan": 1, "summary": 1,
        "attempt_begin": 1, "attempt_end": 1,
    }  # fmt: skip
    (start,) = plan_records(run_dir)
    assert (start["step"], start["kind"]) == (1, "start")
    assert start["slot_to_expert_lp"] == [list(range(8))]
    assert shown_steps(run_dir / "tensorboard")["loss/train"] == steps
    loads = {x["step"]: x["tokens_le"] for x in lines if "tokens_le" in x}
    with (run_dir / "loads.jsonl").open() as file:
        sources = {x["step"]: np.array(x["load_lwe"]) for x in map(json.loads, file)}
    assert sources.keys() == loads.keys()
    for step, load_lwe in sources.items():  # a mean over the two groups of the mesh
        assert load_lwe.shape == (1, 4, 8)
        assert (2 * load_lwe.sum(axis=1)).tolist() == loads[step]
    cfg = load([WORKERS], [f"Data.corpus = '{corpus()}'"])
    assert load([run_dir / "config.gin"]) == cfg
    saved = checkpoint_record(run_dir, NUM_STEPS)["meta"]["config"]
    assert saved == json.loads(json.dumps(cfg.to_dict()))  # tuples are lists there


def test_a_stopped_run_has_saved_its_step_and_kept_the_run_before_it(whole, stopped):
    run_dir, ended = stopped
    assert (ended.code, ended.err) == (PREEMPTED, "")
    step = ended.record["step"]
    assert ended.record == {"step": step, "signal": 15, "run_dir": str(run_dir)}
    assert STOPPED_STEP <= step < NUM_STEPS
    assert metric_lines(run_dir)[-1]["step"] == step
    assert checkpoint_record(run_dir, step)["step"] == step
    hashes = {name: sha for name, sha in listing(whole[0]).items() if name != ".lock"}
    assert listing(run_dir.with_name("run.1")) == hashes


def test_stopped_and_resumed_is_the_same_run(whole, stopped, tmp_path):
    """All metrics and the final state agree bit for bit, and each line is logged
    once."""
    run_dir = shutil.copytree(stopped[0], tmp_path / "run")
    ended = run(run_dir, gin_file=WORKERS)
    assert (ended.code, ended.err) == (0, "")
    assert_goodput(ended, 2)
    assert f"resumed at step {stopped[1].record['step']}" in ended.out
    assert_same_run(run_dir, whole[0])
    loads = [folder / "loads.jsonl" for folder in (run_dir, whole[0])]
    assert loads[0].read_text() == loads[1].read_text()
    for name in ("step", "eval_loss", "digest", "load_le"):
        assert ended.record[name] == whole[1].record[name]


def test_two_processes_are_one(whole, tmp_path):
    run_dir = tmp_path / "run"
    ended = run_workers(run_dir, 2)
    assert ended.code == 0, ended.err
    assert_same_training(run_dir, whole[0])
    log = (run_dir / "logs" / "process-1.log").read_text()
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in log


@pytest.mark.long
def test_continues_on_fewer_devices_and_to_another_step(whole, stopped, tmp_path):
    """Logged lines stay, and config.gin is the new configuration."""
    run_dir = shutil.copytree(stopped[0], tmp_path / "run")
    last = stopped[1].record["step"] + 5
    params = ["Mesh.data = 2", "Mesh.expert = 2", "Train.num_simulated_devices = 4"]
    ended = run(run_dir, *params, f"Train.num_steps = {last}", gin_file=WORKERS)
    assert (ended.code, ended.err) == (0, "")
    assert "changed since the checkpoint: mesh.expert: 4 saved, 2 here" in ended.out
    losses, expected = (
        [x["loss"] for x in metric_lines(path) if "loss" in x][:last]
        for path in (run_dir, whole[0])
    )
    assert len(losses) == last
    assert_close(np.float32(losses), np.float32(expected))
    before = metric_lines(stopped[0])
    assert metric_lines(run_dir)[: len(before)] == before
    assert f"Train.num_steps = {last}\n" in (run_dir / "config.gin").read_text()


@pytest.mark.parametrize(
    ("params", "code", "line"),
    [
        ((), 0, r".* is finished: 20 of 20 steps.*Train.num_steps = 40.*--fresh.*"),
        (
            ("Model.d_model = 64",),
            2,
            "error: .*another model: model.d_model: 32 saved, 64 here.*",
        ),
        (
            ("Data.corpus = '{other}'", f"Train.num_steps = {NUM_STEPS + 2}"),
            2,
            "error: .*trained on other data: .*sha256 was.*",
        ),
        (
            ("Optimizer.mu_dtype = 'bfloat16'", f"Train.num_steps = {NUM_STEPS + 2}"),
            2,
            "error: .*optimizer.mu_dtype: 'float32' saved, 'bfloat.*",
        ),
    ],
)
def test_a_finished_run_is_left_alone(whole, capfd, params, code, line):
    """A line says that it has ended. Another model or other data are refused, whether
    the run has ended or would go on."""
    before = listing(whole[0])
    params = [param.format(other=corpus(seed=1)) for param in params]
    capfd.readouterr()
    with mock.patch.dict(os.environ):
        assert main(command(whole[0], *params, gin_file=WORKERS)[2:]) == code
    out, err = capfd.readouterr()
    assert re.search(rf"^{line}$", err if code else out, re.MULTILINE)
    if not code:
        assert json.loads(out.splitlines()[-1]) == whole[1].record
    assert listing(whole[0]) == before
