"""Test that runs which are killed, stopped or moved to other devices and then resumed
have the results of an undisturbed run."""

import json
import random
import shutil
import signal
import sys
import time

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


def assert_goodput(ended, num_attempts: int, last_sec: float = 0.0) -> None:
    """Assert that the shares of a run's wall time add up to 1, and that the time of all
    attempts, the last of which took `last_sec`, is in it."""
    goodput = ended.record["goodput"]
    share, wall_sec = goodput["share"], goodput["wall_sec"]
    assert abs(sum(share.values()) - 1) < 0.01
    assert goodput["num_attempts"] == num_attempts
    assert min(share.values()) >= 0
    assert share["useful"] > 0
    assert share["compile"] > 0
    assert share["saves"] > 0
    restarts_sec, useful_sec = share["restarts"] * wall_sec, share["useful"] * wall_sec
    assert (restarts_sec > 0.5) == (num_attempts > 1)
    assert useful_sec < 1.1 * NUM_STEPS / ended.record["steps_per_sec"] + 5
    assert wall_sec > max(last_sec, ended.record["wall_sec"])
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
    assert shown["load/over_mean"] == [50]
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


@pytest.mark.parametrize(
    ("num_kills", "num_steps"),
    [
        pytest.param(3, 2 * NUM_STEPS, marks=pytest.mark.long),
        pytest.param(20, 300, marks=pytest.mark.long),
    ],
)
def test_killed_and_resumed_is_the_same_run(tmp_path, num_kills, num_steps):
    """The kills come long before the end of the run, so that none is too late."""
    steps = f"Train.num_steps = {num_steps}"
    expected = tmp_path / "whole", run(tmp_path / "whole", steps)
    rng, run_dir = random.Random(num_kills), tmp_path / "run"
    for index in range(num_kills):
        with Live(run_dir, steps) as live:
            if index % 3 == 1:
                live.wait_for_save()
            else:
                live.wait_for_steps(rng.randint(1, 15))
            time.sleep(0.04 * rng.random())
            assert live.end(signal.SIGKILL).code == -signal.SIGKILL
    ended = run(run_dir, steps)
    assert_same_run(run_dir, ended, *expected)
    assert_goodput(ended, num_kills + 1)


@pytest.mark.long
def test_killed_before_its_summary_is_evaluated_once(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert_same_run(tmp_path / "run", run(tmp_path / "run"), *whole)


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_75(stopped):
    run_dir, ended = stopped
    assert ended.code == PREEMPTED
    [line] = ended.err.splitlines()
    assert line.startswith("signal 15: the run stops after the next step")
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
    begin_sec = time.time()
    ended = run(tmp_path / "run")
    assert_goodput(ended, 2, time.time() - begin_sec)
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
def test_a_finished_run_says_so_and_how_to_go_on(whole):
    run_dir, first = whole
    before = listing(run_dir)
    ended = run(run_dir)
    assert (ended.code, ended.err) == (0, "")
    assert ended.record == first.record
    line, _ = ended.out.splitlines()
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


@pytest.mark.long
def test_a_bfloat16_moment_learns_alike_and_is_not_resumed_in_float32(whole, tmp_path):
    """Held-out losses differ by less than bfloat16's tolerance: 3.5018 nats per byte
    and 3.5044 with float32, on docs/log.md."""
    run_dir = tmp_path / "run"
    ended = run(run_dir, "Optimizer.mu_dtype = 'bfloat16'")
    assert ended.code == 0
    pair = (np.float32(x.record["eval_loss"]) for x in (ended, whole[1]))
    assert_close(*pair, dtype="bfloat16")
    arrays = checkpoint_record(run_dir, NUM_STEPS)["arrays"]
    dtypes = {array["dtype"] for name, array in arrays.items() if "/mu/" in name}
    assert dtypes == {"bfloat16"}
    again = run(run_dir, "Train.num_steps = 61")
    assert again.code == 2
    (line,) = again.err.splitlines()
    assert "optimizer.mu_dtype: 'bfloat16' saved, 'float32' here" in line
