"""Test that trackers get the records of a run, and that nothing about them can hold or
end it."""

import json
import math
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from moejax.config import Config
from tests.support.close import assert_close
from tests.support.event_files import read_events, shown_steps
from tests.support.run_main import ROOT, TOY
from train.logs import trackers
from train.logs.scalars import scalars
from train.logs.trackers import Background, Trackers, parse_names, require_installed

LIMIT_SEC = 120.0
KEY = "5ec2e7" * 7
RECORD = {
    "loss": 1.5,
    "balance_loss": [1.0, 2.0],
    "sequence_balance_loss": [],
    "lr": 1e-3,
    "expert_max_over_mean": [1.25, 3.0],
    "plan": "a09e",
    "rows_lw": np.array([[1, 3], [9, 7]]),
    "rounds": [1, 4],
    "skipped": True,
    "mfu": None,
    "dead_experts": [0, 3],
    "data_wait_msec": 0.25,
}
TAGS = {
    "loss/train": 1.5,
    "loss/balance": 1.5,
    "optimizer/lr": 1e-3,
    "optimizer/skipped": 1.0,
    "load/expert_max_over_mean": 3.0,
    "load_by_layer/00_expert_max_over_mean": 1.25,
    "load_by_layer/01_expert_max_over_mean": 3.0,
    "exchange/rounds": 4.0,
    "router/dead_experts": 3.0,
    "other/data_wait_msec": 0.25,
}


class Scripted:
    """A tracker that waits in `log` for an event, and raises an error at some step."""

    def __init__(self, failing_step: int = 0) -> None:
        self.taken, self.failing_step = [], failing_step
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.is_closed = False

    def log(self, waiting) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(LIMIT_SEC)
        steps = [step for step, _ in waiting]
        if self.failing_step in steps:
            raise OSError("no space left\nhere")
        self.taken += steps

    def close(self) -> None:
        self.is_closed = True


def test_a_tracker_that_hangs_holds_neither_a_step_nor_the_end():
    messages: list[str] = []
    tracker = Scripted()
    background = Background(
        "wandb", lambda: tracker, max_waiting=8, say=messages.append
    )
    background.append({"step": 1})
    assert tracker.has_begun.wait(LIMIT_SEC)
    for step in range(2, 101):
        background.append({"step": step})
    background.finish()
    background.join(time.monotonic())
    behind, left = messages
    assert behind.startswith("TRACKER wandb IS BEHIND from step 10 on")
    assert "left behind: 100 of 100 records" in left
    tracker.may_go_on.set()
    background.join(time.monotonic() + LIMIT_SEC)
    assert tracker.is_closed
    assert tracker.taken == list(range(1, 10)), "what had room was kept for it"
    assert messages[2] == "tracker wandb: 91 of 100 records did not reach it"


@pytest.mark.parametrize("failing_step", [0, 3])
def test_an_error_ends_a_tracker_and_is_said(failing_step):
    """At its start, or at a step."""
    messages: list[str] = []

    def make():
        if not failing_step:
            raise OSError("no space left\nhere")
        tracker = Scripted(failing_step)
        tracker.may_go_on.set()
        return tracker

    background = Background("mlflow", make, say=messages.append)
    for step in range(1, 6):
        background.append({"step": step})
    background.finish()
    background.join(time.monotonic() + LIMIT_SEC)
    ended, lost = messages
    assert ended.startswith("TRACKER mlflow ENDED: no space left here; training")
    assert lost.startswith("tracker mlflow: ")
    assert lost.endswith(" of 5 records did not reach it")


def test_a_broken_file_of_trackers_is_named_and_starts_none(tmp_path, capsys):
    (tmp_path / trackers.FILE).write_text("[")
    with Trackers(("tensorboard",), tmp_path, 0, Config(), "") as started:
        started.append({"step": 1})
    assert (
        f"TRACKERS NOT STARTED: {tmp_path / trackers.FILE}" in capsys.readouterr().err
    )
    assert not (tmp_path / "tensorboard").exists()


def test_names_are_trackers():
    assert parse_names("") == ()
    assert parse_names("tensorboard, mlflow,tensorboard") == ("tensorboard", "mlflow")
    with pytest.raises(ValueError, match="'tensorbord' is no tracker: give some"):
        parse_names("tensorbord")


def test_a_package_that_is_missing_is_one_line_and_code_2(monkeypatch, capfd, tmp_path):
    from train.main import main

    require_installed(("tensorboard",))
    missing = {"wandb": ("no_such_package", "pip install it")}
    monkeypatch.setattr(trackers, "PACKAGES", trackers.PACKAGES | missing)
    flags = [f"--gin_file={TOY}", "--track=wandb", f"--run_dir={tmp_path / 'r'}"]
    assert main(flags) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "--track=wandb needs the package no_such_package" in line
    assert not (tmp_path / "r").exists()


def send(run_dir: pathlib.Path, first: int, last: int, *names: str) -> None:
    """Send the records of steps to trackers, as a run that resumes before them, and
    write their steps to metrics.jsonl."""
    with (
        (run_dir / "metrics.jsonl").open("a") as metrics,
        Trackers(names, run_dir, first - 1, Config(), "a = 1\n") as started,
    ):
        for step in range(first, last + 1):
            started.append(RECORD | {"step": step})
            metrics.write(json.dumps({"step": step}) + "\n")
        started.append({"step": last, "eval_loss": 2.5})


def test_tensorboard_shows_the_numbers_of_a_record(tmp_path):
    decision = {
        "kind": "swap", "step": 7, "adopt_step": 11, "policy": "eplb", "why": "pays",
        "device_max_over_mean_before": 1.5, "device_max_over_mean_after": 1.25,
        "num_moves": 3, "modelled_gain_sec": 0.5,
        "modelled_cost_sec": 2.0, "changes": {},
    }  # fmt: skip
    ratios = {
        "balance/device_max_over_mean_before": 1.5,
        "balance/device_max_over_mean_after": 1.25,
    }
    records = {
        1: (RECORD, TAGS),
        2: ({"eval_loss": 2.5}, {"loss/held_out": 2.5}),
        3: (
            {"decision": decision},
            ratios | {
                "balance/num_moves": 3.0, "balance/modelled_gain_msec": 500.0,
                "balance/modelled_cost_msec": 2000.0,
            },
        ),
        4: ({"decision": decision | {"kind": "keep", "num_moves": 0}}, ratios),
    }  # fmt: skip
    with Trackers(("tensorboard",), tmp_path, 0, Config(), "Moe.top_k = 2") as started:
        for step, (record, _) in records.items():
            started.append(record | {"step": step})
        started.append({"step": 5, "loss": math.nan, "grad_norm": math.inf})
    _, _, config, *events, odd = read_events(tmp_path / "tensorboard")
    text = config.summary.value[0]
    assert text.tag.startswith("config")
    assert text.tensor.string_val[0] == b"    Moe.top_k = 2"
    for event, (_, expected) in zip(events, records.values(), strict=True):
        values = {value.tag: value.simple_value for value in event.summary.value}
        assert_close(values, expected, dtype=np.float32)
        assert list(values) == list(dict(scalars(records[event.step][0])))
    loss, norm = odd.summary.value
    assert math.isnan(loss.simple_value)
    assert norm.simple_value == math.inf


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path, monkeypatch):
    """A run is killed after step 9, resumed from 6, killed after 8, resumed from 7."""
    for now, (first, last) in enumerate(((1, 9), (7, 8), (8, 12)), start=10**9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        send(tmp_path, first, last, "tensorboard")
    steps = shown_steps(tmp_path / "tensorboard")
    assert steps["loss/train"] == list(range(1, 13))


@pytest.fixture
def offline(tmp_path, monkeypatch) -> str:
    """Set W&B and MLflow up without a network, W&B with a key; return MLflow's URI."""
    uri = f"file://{tmp_path / 'store'}"
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return uri


def read_back(run_dir: pathlib.Path, uri: str) -> dict:
    """Return what W&B and MLflow have stored."""
    words = [sys.executable, "-P", "-m", "tests.support.read_trackers"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.check_output([*words, str(run_dir), uri], env=env, cwd=run_dir)
    return json.loads(out)


def assert_no_key(run_dir: pathlib.Path) -> None:
    """Assert that no file of a run has the key."""
    paths = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(paths) > 5
    assert not [path for path in paths if KEY.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.trackers
def test_a_resumed_run_goes_on_in_wandb_and_mlflow(tmp_path, offline, monkeypatch):
    """Both have one run with each step once, also those that the first attempt had done
    after its checkpoint."""
    monkeypatch.setattr(trackers, "CLOSE_SEC", LIMIT_SEC)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    send(run_dir, 1, 9, "wandb", "mlflow")
    send(run_dir, 7, 12, "wandb", "mlflow")
    found = read_back(run_dir, offline)
    for name in ("wandb", "mlflow"):
        assert len(found[name]["ids"]) == 1
        assert found[name]["steps"]["loss/train"] == list(range(1, 13))
        assert found[name]["steps"]["load/expert_max_over_mean"] == list(range(1, 13))
        assert found[name]["steps"]["loss/held_out"] == [9, 12]
    assert found["mlflow"]["status"] == ["FINISHED"]
    (params,) = found["mlflow"]["params"]
    assert params["moe.top_k"] == str(Config().moe.top_k)
    assert_no_key(run_dir)
