"""Whole runs of train/main.py: what they leave, how they stop at a signal and go on,
on other devices too. test_resume.py kills them."""

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
from tests.support.plan_history import adopted_records, plan_records
from tests.support.run_main import (
    TOY,
    Live,
    checkpoint_record,
    command,
    corpus,
    listing,
    metric_lines,
    run,
)
from tests.support.run_schema import check_run
from train.config.gin_reader import load
from train.main import main

NUM_STEPS = 60
PREEMPTED = 75
STOPPED_STEP = 30
"""Step at which SIGTERM comes."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of an undisturbed run, and how it ended."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return run_dir, run(run_dir, flags=["--track=tensorboard"])


@pytest.fixture(scope="module")
def stopped(whole, tmp_path_factory):
    """The directory of a run that began with --fresh where a finished run was and got
    SIGTERM before STOPPED_STEP, and how it ended."""
    folder = tmp_path_factory.mktemp("stopped")
    run_dir, held = folder / "run", folder / "held"
    shutil.copytree(whole[0], run_dir)
    words = command(run_dir, flags=["--fresh"])
    child = [sys.executable, "-m", "tests.support.held_run", str(held)]
    with Live.__new__(Live) as live:
        live.start(run_dir, [*child, str(STOPPED_STEP), *words[2:]])
        live.wait_until(held.exists, f"step {STOPPED_STEP}")
        live.process.send_signal(signal.SIGTERM)
        held.unlink()
        return run_dir, live.end()


def assert_same_run(run_dir, ended, expected_dir, expected) -> None:
    """Assert that two runs agree bit for bit in all metrics and in the final state,
    with each line logged once."""
    assert (ended.code, ended.err) == (expected.code, expected.err) == (0, "")
    assert metric_lines(run_dir) == metric_lines(expected_dir)
    assert adopted_records(run_dir) == adopted_records(expected_dir)
    for name in ("step", "eval_loss", "digest", "load_le"):
        assert ended.record[name] == expected.record[name]
    step = ended.record["step"]
    arrays = checkpoint_record(run_dir, step)["arrays"]
    assert arrays == checkpoint_record(expected_dir, step)["arrays"]


def assert_goodput(ended, num_attempts: int) -> None:
    """Assert that the shares of a run's wall time add up to 1, and that the time of all
    attempts is in it."""
    goodput = ended.record["goodput"]
    share, wall_sec = goodput["share"], goodput["wall_sec"]
    assert abs(sum(share.values()) - 1) < 0.01
    assert goodput["num_attempts"] == num_attempts
    assert min(share.values()) >= 0
    assert share["useful"] > 0
    assert share["compile"] > 0
    assert share["saves"] > 0
    assert (share["restarts"] > 0) == (num_attempts > 1)
    assert wall_sec > ended.record["wall_sec"]
    assert f"goodput         {share['useful']:.1%} of {wall_sec:.0f} s" in ended.out


def assert_files_keep_their_schema(run_dir) -> None:
    """Assert that each line of an undisturbed run is as the schema has it."""
    counts = check_run(run_dir)
    assert counts.pop("goodput_line") >= 2
    assert counts == {
        "step": NUM_STEPS, "evaluation": NUM_STEPS // 10, "plan": 1, "summary": 1,
        "attempt_begin": 1, "attempt_end": 1,
    }  # fmt: skip
    (start,) = plan_records(run_dir)
    assert (start["step"], start["kind"]) == (1, "start")
    shown = shown_steps(run_dir / "tensorboard")
    assert shown["loss/train"] == list(range(1, NUM_STEPS + 1))
    assert start["slot_to_expert_lp"] == [list(range(8))] * 2


@pytest.mark.slow
def test_an_undisturbed_run_leaves_a_whole_record(whole):
    run_dir, ended = whole
    assert (ended.code, ended.err) == (0, "")
    assert_goodput(ended, 1)
    lines = metric_lines(run_dir)
    assert [x["step"] for x in lines if "loss" in x] == list(range(1, NUM_STEPS + 1))
    evaluated = [x["step"] for x in lines if "eval_loss" in x]
    assert evaluated == list(range(10, NUM_STEPS + 1, 10))
    losses = [x["loss"] for x in lines if "loss" in x]
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.5
    assert ended.record["eval_loss"] == lines[-1]["eval_loss"]
    cfg = load([TOY], [f"Data.corpus = '{corpus()}'"])
    assert load([run_dir / "config.gin"]) == cfg
    assert "Model.d_model = 32\n" in ended.out
    assert "Model.norm_eps" not in ended.out, "defaults are in config.gin alone"
    assert f"all of them are in {run_dir / 'config.gin'}\n" in ended.out
    assert "compiling for 8 devices" in ended.out
    assert "balancing       none (Balance.policy = 'home')" in ended.out
    assert_files_keep_their_schema(run_dir)
    saved = checkpoint_record(run_dir, NUM_STEPS)["meta"]["config"]
    assert saved == json.loads(json.dumps(cfg.to_dict()))  # tuples are lists there


@pytest.mark.long
def test_killed_before_its_summary_is_evaluated_once(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert_same_run(tmp_path / "run", run(tmp_path / "run"), *whole)


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_75(stopped):
    run_dir, ended = stopped
    assert (ended.code, ended.err) == (PREEMPTED, "")
    step = ended.record["step"]
    assert ended.record == {"step": step, "signal": 15, "run_dir": str(run_dir)}
    assert STOPPED_STEP <= step < NUM_STEPS
    assert f"stopped by signal 15 at step {step}; all is saved" in ended.out
    assert metric_lines(run_dir)[-1]["step"] == step
    assert checkpoint_record(run_dir, step)["step"] == step


@pytest.mark.slow
def test_fresh_keeps_the_old_run_under_another_name(whole, stopped):
    run_dir, ended = stopped
    old = run_dir.with_name("run.1")
    assert f"the run that was here is now {old}" in ended.out
    hashes = {name: sha for name, sha in listing(whole[0]).items() if name != ".lock"}
    assert listing(old) == hashes
    assert metric_lines(run_dir) == metric_lines(old)[: len(metric_lines(run_dir))]


@pytest.mark.slow
def test_stopped_and_resumed_is_the_same_run(whole, stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    ended = run(tmp_path / "run")
    assert_goodput(ended, 2)
    assert f"resumed at step {stopped[1].record['step']}" in ended.out
    assert_same_run(tmp_path / "run", ended, *whole)


@pytest.mark.long
@pytest.mark.parametrize(("data", "expert"), [(2, 2), (1, 1)])
def test_continues_on_fewer_devices(whole, stopped, tmp_path, data, expert):
    """A run continues on fewer devices and to another step; logged lines stay, and
    config.gin is the new configuration."""
    shutil.copytree(stopped[0], tmp_path / "run")
    first = stopped[1].record["step"] + 1
    ended = run(
        tmp_path / "run",
        f"Mesh.data = {data}",
        f"Mesh.expert = {expert}",
        f"Train.num_simulated_devices = {data * expert}",
        f"Train.num_steps = {first + 4}",
    )
    assert (ended.code, ended.err) == (0, "")
    assert f"changed since the checkpoint: mesh.expert: 4 saved, {expert} here" in (
        ended.out
    )

    def losses(run_dir):
        lines = [x for x in metric_lines(run_dir) if "loss" in x]
        assert [x["step"] for x in lines] == list(range(1, len(lines) + 1))
        return np.float32([x["loss"] for x in lines[first - 1 : first + 4]])

    assert_close(losses(tmp_path / "run"), losses(whole[0]))
    assert losses(tmp_path / "run").shape == (5,)
    before = metric_lines(stopped[0])
    assert metric_lines(tmp_path / "run")[: len(before)] == before
    config = (tmp_path / "run" / "config.gin").read_text()
    assert f"Train.num_steps = {first + 4}\n" in config


@pytest.mark.slow
def test_a_finished_run_says_so_and_how_to_go_on(whole, capfd):
    run_dir, first = whole
    before = listing(run_dir)
    capfd.readouterr()
    with mock.patch.dict(os.environ):
        assert main(command(run_dir)[2:]) == 0
    out, err = capfd.readouterr()
    line, record = out.splitlines()
    assert (json.loads(record), err) == (first.record, "")
    assert line.startswith(f"{run_dir} is finished: {NUM_STEPS} of {NUM_STEPS} steps")
    for flag in ("--gin_param='Train.num_steps = 120'", "--fresh", "--run_dir"):
        assert flag in line
    assert listing(run_dir) == before


@pytest.mark.long
def test_more_steps_go_on(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    ended = run(tmp_path / "run", f"Train.num_steps = {NUM_STEPS + 4}")
    assert (ended.code, ended.err) == (0, "")
    assert f"resumed at step {NUM_STEPS}" in ended.out
    assert "train.num_steps: 60 saved, 64 here" in ended.out
    assert (ended.record["step"], ended.record["run_dir"]) == (
        64,
        str(tmp_path / "run"),
    )
    lines = metric_lines(tmp_path / "run")
    assert lines[: len(metric_lines(whole[0]))] == metric_lines(whole[0])
    steps = [x["step"] for x in lines if "loss" in x]
    assert steps == list(range(1, NUM_STEPS + 5))
    assert "Train.num_steps = 64\n" in (tmp_path / "run" / "config.gin").read_text()


OTHER = [
    ("Model.d_model = 64", r"another model: model.d_model: 32 saved, 64 here"),
    ("Data.corpus = '{other}'", r"trained on other data: .*sha256 was"),
    (
        "Optimizer.mu_dtype = 'bfloat16'",
        r"optimizer.mu_dtype: 'float32' saved, 'bfloat",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [NUM_STEPS, NUM_STEPS + 2])
@pytest.mark.parametrize(("param", "match"), OTHER)
def test_a_checkpoint_of_another_run_is_left_alone(
    whole, capfd, num_steps, param, match
):
    """The run is refused whether it has ended or would go on."""
    before = listing(whole[0])
    param = param.format(other=corpus(seed=1))
    assert_refused(
        capfd, whole[0], param, f"Train.num_steps = {num_steps}", match=match
    )
    assert listing(whole[0]) == before


@pytest.mark.slow
@pytest.mark.long
def test_a_directory_in_use_is_left_alone(tmp_path, capfd):
    with Live(tmp_path / "run", "Train.num_steps = 100000") as live:
        live.wait_for_steps(3)
        live.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, live.process.pid, os.WSTOPPED)
        before = listing(tmp_path)
        for flags in ([], ["--fresh"]):
            match = rf"run is in use by pid {live.process.pid} on .*wait"
            assert_refused(capfd, tmp_path / "run", flags=flags, match=match)
        assert listing(tmp_path) == before


def assert_refused(capfd, run_dir, *params, match: str, flags=()) -> None:
    """Assert that a run in this process ends with one line of error that matches."""
    capfd.readouterr()
    with mock.patch.dict(os.environ):
        assert main(command(run_dir, *params, flags=flags)[2:]) == 2
    _, err = capfd.readouterr()
    assert re.fullmatch(rf"error: .*{match}.*\n", err), err
