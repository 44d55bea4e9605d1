"""Test that trackers get the records of a run, and that nothing about them can hold or
end it."""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.event_files import shown_steps
from tests.support.run_main import ROOT, environment, run
from train.logs.track import marks, process, setup
from train.logs.track.main import Guarded
from train.logs.track.marks import Marks
from train.logs.track.process import TrackersProcess
from train.logs.track.setup import Setup, parse_names, require_installed

LIMIT_SEC = 60
FAST_SEC = 60.0
"""More than what must not wait can take on a busy machine, and less than any limit."""
KEY = "5ec2e7" * 7


def make_setup(run_dir: pathlib.Path, *names: str, step: int = 0) -> Setup:
    """Return the setup of a run whose configuration has two fields."""
    fields = {"moe.top_k": 2, "data.corpus": "<script>"}
    return Setup(names or ("tensorboard",), str(run_dir), step, "a = 1\n", fields)


def record(step: int, num_bytes: int = 0) -> dict:
    """Return the record of a step, with ballast for full pipes."""
    return {"step": step, "loss": 1.0 / step, "plan": "x" * num_bytes}


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Return once is_so() is true. Raises AssertionError after LIMIT_SEC."""
    end_sec = time.monotonic() + LIMIT_SEC
    while not is_so():
        assert time.monotonic() < end_sec, f"never saw {what}"
        time.sleep(0.002)


def is_there(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@contextlib.contextmanager
def timed(limit_sec: float = FAST_SEC):
    """Assert that a block takes no longer than a limit."""
    start_sec = time.monotonic()
    yield
    assert time.monotonic() - start_sec < limit_sec


def test_all_records_arrive(tmp_path):
    messages: list[str] = []
    trackers = TrackersProcess(make_setup(tmp_path), say=messages.append)
    for step in range(1, 101):
        trackers.append(record(step))
    trackers.append({"step": 100, "eval_loss": 2.0})
    trackers.close()
    steps = shown_steps(tmp_path / "tensorboard")
    assert steps["loss/train"] == list(range(1, 101))
    assert steps["loss/held_out"] == [100]
    assert messages == []
    assert not is_there(trackers.pid)


def test_a_killed_process_is_said_once_and_costs_records_alone(tmp_path):
    messages: list[str] = []
    trackers = TrackersProcess(make_setup(tmp_path), say=messages.append)
    trackers.append(record(1))
    wait_until(lambda: any(tmp_path.glob("tensorboard/*")), "a file of events")
    os.kill(trackers.pid, signal.SIGKILL)
    steps = itertools.count(2)

    def send_one() -> bool:
        """Give the trackers a record; return whether their end was said."""
        trackers.append(record(next(steps)))
        return bool(messages)

    wait_until(send_one, "the end of the trackers")
    with timed():
        for _ in range(2000):
            send_one()
        trackers.close()
    end, lost = messages
    assert end.startswith("TRACKERS ENDED: tensorboard have ended (signal 9); training")
    num_lost, num_given = (int(lost.split()[i]) for i in (3, 5))
    assert 2000 < num_lost < num_given == next(steps) - 1
    assert lost.endswith("records did not reach tensorboard")


def test_a_stopped_process_holds_nothing_and_goes_on_at_the_end(tmp_path):
    """What the pipe and the queue cannot take is lost, and the number of it is said."""
    messages: list[str] = []
    trackers = TrackersProcess(make_setup(tmp_path), num_waiting=8, say=messages.append)
    trackers.append(record(1))
    wait_until(lambda: any(tmp_path.glob("tensorboard/*")), "a file of events")
    os.kill(trackers.pid, signal.SIGSTOP)
    with timed():
        for step in range(2, 502):
            trackers.append(record(step, 4000))
    with timed(LIMIT_SEC):
        trackers.close(LIMIT_SEC)
    behind, lost = messages
    assert behind.startswith("TRACKERS BEHIND from step ")
    num_lost = int(lost.split()[3])
    assert len(shown_steps(tmp_path / "tensorboard")["loss/train"]) == 501 - num_lost
    assert 400 < num_lost < 500


def test_a_process_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "MODULE", "tests.support.hung_trackers")
    monkeypatch.setattr(process, "NOTICE_SEC", 0.1)
    messages: list[str] = []
    trackers = TrackersProcess(make_setup(tmp_path), num_waiting=4, say=messages.append)
    for step in range(1, 100):
        trackers.append(record(step, 4000))
    with timed():
        trackers.close(0.5)
    assert not is_there(trackers.pid)
    assert "TRACKERS BEHIND" in messages[0]
    assert messages[1] == "waiting for tensorboard, 0.5 s at most"
    assert "did not end within 0.5 s, and are killed" in messages[2]
    assert "of 99 records did not reach" in messages[3]


def test_a_process_that_cannot_be_started_costs_records_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(process.sys, "executable", str(tmp_path / "no python"))
    messages: list[str] = []
    trackers = TrackersProcess(make_setup(tmp_path), say=messages.append)
    trackers.append(record(1))
    trackers.close()
    assert trackers.pid is None
    assert "tensorboard could not be started: " in messages[0]
    assert "at least 1 of 1 records" in messages[1]


def test_the_process_ends_with_a_killed_run(tmp_path):
    """It takes what is in the pipe, and ends. It survives signals that stop the run."""
    code = (
        "import os, signal, sys, time\n"
        "from train.logs.track.process import TrackersProcess\n"
        "from train.logs.track.setup import Setup\n"
        "told = Setup(('tensorboard',), sys.argv[1], 0, 'a = 1', {})\n"
        "trackers = TrackersProcess(told)\n"
        "trackers.append({'step': 1, 'loss': 1.0})\n"
        "folder = os.path.join(sys.argv[1], 'tensorboard')\n"
        "while not os.path.isdir(folder) or not os.listdir(folder): time.sleep(0.01)\n"
        "for number in (signal.SIGINT, signal.SIGTERM): os.kill(trackers.pid, number)\n"
        "trackers.append({'step': 2, 'loss': 1.0})\n"
        "trackers._records.put(None)\n"
        "trackers._thread.join()\n"
        "print(trackers.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(
        words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    pid = int(ended.stdout)
    wait_until(lambda: not is_there(pid), "the end of the trackers")
    assert shown_steps(tmp_path / "tensorboard")["loss/train"] == [1, 2]


class Failing:
    """A tracker that fails at some steps."""

    def __init__(self, steps: set[int]) -> None:
        self.steps, self.taken = steps, []

    def append(self, record: dict) -> None:
        if record["step"] in self.steps:
            raise OSError("no space left\nhere")
        self.taken.append(record["step"])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_errors_of_a_tracker_are_said_once_and_counted():
    messages: list[str] = []
    tracker = Failing({3, 4, 7})
    guarded = Guarded("wandb", lambda: tracker, messages.append)
    for step in range(1, 9):
        guarded.append({"step": step})
        guarded.flush(step)
    guarded.close(8)
    assert tracker.taken == [1, 2, 5, 6, 8]
    first, last = messages
    assert first.startswith(
        "TRACKER wandb FAILS from step 3 on: no space left here; tr"
    )
    assert last == "tracker wandb: 3 writes failed in all"


def test_a_tracker_that_cannot_start_is_said_and_left_out():
    messages: list[str] = []

    def make():
        raise RuntimeError("no key")

    guarded = Guarded("wandb", make, messages.append)
    guarded.append({"step": 1})
    guarded.close(1)
    assert messages == ["TRACKER wandb NOT STARTED: no key; training goes on"]


@pytest.mark.parametrize(
    "text", ["", "[", "[]", '{"wandb": 3}', '{"wandb": {"id": 3, "step": 1}}', "\0"]
)
def test_marks_of_a_damaged_file_are_those_of_a_new_run(tmp_path, text):
    (tmp_path / marks.FILE).write_text(text)
    found = Marks(tmp_path)
    assert (found.id("wandb"), found.step("wandb")) == (None, 0)
    found.put("wandb", "abc", 7)
    found = Marks(tmp_path)
    assert (found.id("wandb"), found.step("wandb")) == ("abc", 7)
    assert found.id("mlflow") is None


def test_names_are_trackers():
    assert parse_names("") == ()
    assert parse_names("tensorboard, mlflow,tensorboard") == ("tensorboard", "mlflow")
    with pytest.raises(ValueError, match="'tensorbord' is no tracker: give some"):
        parse_names("tensorbord")


def test_a_package_that_is_missing_is_named(monkeypatch, capfd, tmp_path):
    from train.main import main

    require_installed(("tensorboard",))
    missing = {"wandb": ("no_such_package", "pip install it")}
    monkeypatch.setattr(setup, "PACKAGES", setup.PACKAGES | missing)
    with pytest.raises(ValueError, match="--track=wandb needs the package no_such_pac"):
        require_installed(("tensorboard", "wandb"))
    toy = ROOT / "tests" / "support" / "toy.gin"
    for track, text in (
        ("wandb", "is not installed: pip install it"),
        ("x", "tracker"),
    ):
        flags = [f"--gin_file={toy}", f"--track={track}", f"--run_dir={tmp_path / 'r'}"]
        assert main(flags) == 2
        out, err = capfd.readouterr()
        assert text in err
        assert err.count("\n") == 1
        assert "compiling" not in out
    assert not (tmp_path / "r").exists()


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


def send(run_dir: pathlib.Path, first: int, last: int, *names: str) -> None:
    """Send the records of steps to trackers, as a run that resumes before them."""
    messages: list[str] = []
    told = make_setup(run_dir, *names, step=first - 1)
    trackers = TrackersProcess(told, say=messages.append)
    for step in range(first, last + 1):
        trackers.append(record(step) | {"expert_max_over_mean": [1.0, 2.0]})
    trackers.append({"step": last, "eval_loss": np.float32(2.5).item()})
    trackers.close(LIMIT_SEC)
    assert messages == []


def read_back(run_dir: pathlib.Path, uri: str) -> dict:
    """Return what W&B and MLflow have stored."""
    words = [sys.executable, "-P", "-m", "tests.support.read_trackers"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.check_output([*words, str(run_dir), uri], env=env, cwd=run_dir)
    return json.loads(out)


def assert_went_on(run_dir: pathlib.Path, uri: str) -> None:
    """Assert that both have one run with each step once, also those that the first
    attempt had done after its checkpoint."""
    found = read_back(run_dir, uri)
    for name in ("wandb", "mlflow"):
        assert len(found[name]["ids"]) == 1
        assert found[name]["steps"]["loss/train"] == list(range(1, 13))
        assert found[name]["steps"]["load/expert_max_over_mean"] == list(range(1, 13))
        assert found[name]["steps"]["loss/held_out"] == [9, 12]
    assert found["mlflow"]["status"] == ["FINISHED"]
    assert found["mlflow"]["params"] == [{"moe.top_k": "2", "data.corpus": "<script>"}]


def assert_no_key(run_dir: pathlib.Path) -> None:
    """Assert that no file of a run has the key."""
    paths = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(paths) > 5
    assert not [path for path in paths if KEY.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.trackers
def test_a_resumed_run_goes_on_in_wandb_and_mlflow(tmp_path, offline):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    send(run_dir, 1, 9, "wandb", "mlflow")
    send(run_dir, 7, 12, "wandb", "mlflow")
    assert_went_on(run_dir, offline)
    assert_no_key(run_dir)


@pytest.mark.long
@pytest.mark.trackers
def test_a_run_is_in_all_three_trackers(tmp_path, offline, monkeypatch):
    """MLflow's own kind of store, a database in the run directory."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    run_dir = tmp_path / "run"
    flags = ["--track=tensorboard,wandb,mlflow"]
    ended = run(run_dir, "Train.num_steps = 12", flags=flags)
    assert (ended.code, ended.err) == (0, "")
    found = read_back(run_dir, f"sqlite:///{run_dir / 'mlflow.db'}")
    expected = shown_steps(run_dir / "tensorboard")
    assert expected["loss/train"] == list(range(1, 13))
    for name in ("wandb", "mlflow"):
        assert found[name]["steps"]["loss/train"] == list(range(1, 13))
        assert found[name]["steps"]["loss/held_out"] == [10, 12]
        tags = {tag for tag in found[name]["steps"] if not tag.startswith("_")}
        assert tags == expected.keys() - {"config/text_summary", "load/over_mean"}
    assert found["mlflow"]["params"][0]["moe.top_k"] == "2"
    assert_no_key(run_dir)
