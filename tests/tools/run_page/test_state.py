"""Test how the page tells whether a run goes on, and how it ended."""

import json
import os
import socket

import pytest

from tests.support.run_folders import finish, make_folder
from tools.run_page.read import RunReader
from train.logs.run_dir import claim


def state(folder) -> tuple[str, str]:
    run = RunReader(folder).data()
    return run["state"], run["state_text"]


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that has ended on this host, an hour ago."""
    folder = make_folder(tmp_path / "run")
    with claim(folder):
        pass
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    return folder


def leave_lock_of(folder, holder: str) -> None:
    (folder / ".lock").write_text(holder)


def test_a_run_that_a_process_holds_is_running(folder):
    with claim(folder):
        assert state(folder) == ("running", "running: step 40 of 40")
        finish(folder)
        assert state(folder)[0] == "running"
        (folder / "metrics.jsonl").write_text("")
        assert state(folder) == ("running", "running: no step yet")
    assert state(folder)[0] == "finished"


def test_a_process_that_reuses_a_number_holds_nothing(folder):
    leave_lock_of(folder, f"pid {os.getpid()} on {socket.gethostname()}")
    assert state(folder)[0] == "stopped"


@pytest.mark.parametrize("holder", ["pid 1 on elsewhere", "", None])
def test_where_locks_cannot_be_seen_a_run_that_grows_is_running(folder, holder):
    (folder / ".lock").unlink()
    if holder is not None:
        leave_lock_of(folder, holder)
    assert state(folder)[0] == "stopped"
    os.utime(folder / "metrics.jsonl")
    assert state(folder)[0] == "running"
    finish(folder)
    assert state(folder)[0] == "finished"


def test_a_run_that_saved_its_last_step_was_stopped(folder):
    name, text = state(folder)
    assert name == "stopped"
    assert (
        text == "stopped after step 40 of 40, which is saved: start it again to go on"
    )


def test_a_run_with_steps_after_its_last_checkpoint_has_crashed(folder):
    (folder / "checkpoints" / "40").rename(folder / "checkpoints" / "30")
    name, text = state(folder)
    assert name == "crashed"
    assert text.endswith("a new start goes on from step 30")
    (folder / "checkpoints" / "30").rmdir()
    assert state(folder)[1] == (
        "ended after step 40 of 40, unsaved; a new start goes on from the start, "
        "without a checkpoint"
    )


def test_a_run_that_an_error_has_ended_has_crashed(folder):
    path = folder / "attempts.jsonl"
    end = {"step": 40, "attempt": 2, "at": 1e9, "end": "failed", "why": "the loss"}
    begins = path.read_text()
    path.write_text(begins + json.dumps(end) + "\n")
    assert state(folder) == (
        "crashed",
        "ended after step 40 of 40 by an error: the loss; a new start goes on from "
        "step 40",
    )
    for number, kind in ((1, "failed"), (2, "stopped")):
        other = end | {"attempt": number, "end": kind}
        path.write_text(begins + json.dumps(other) + "\n")
        assert state(folder)[0] == "stopped"


def test_a_run_that_goes_on_after_its_summary_is_not_finished(folder):
    finish(folder, step=30)
    assert state(folder)[0] == "stopped"
    finish(folder)
    assert state(folder)[0] == "finished"
    config = (folder / "config.gin").read_text()
    (folder / "config.gin").write_text(config.replace("= 40", "= 80"))
    assert state(folder)[0] == "stopped"


def test_a_run_without_a_step_is_empty(folder):
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval_loss": 1.0}))
    assert state(folder)[0] == "empty"
    (folder / "metrics.jsonl").unlink()
    assert state(folder)[0] == "empty"
