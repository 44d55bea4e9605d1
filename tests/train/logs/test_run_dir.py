"""Test how a run claims its directory: locks, archives of old runs, and errors."""

import contextlib
import errno
import faulthandler
import os
import subprocess
import sys

import pytest

from train.launch.processes import STDERR
from train.logs import run_dir
from train.logs.run_dir import RunDirInUse, claim

HOLD = """
import sys
from train.logs.run_dir import claim
with claim(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(repo, tmp_path):
    """A process that holds tmp_path/run until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        cwd=repo,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_stacks_go_to_the_log_and_messages_to_the_terminal(tmp_path, capfd):
    """C++ code writes to descriptor 2, as stacks do."""
    with run_dir._native_stderr_in(tmp_path / "process-1.log"):
        print("for people", file=sys.stderr)
        os.write(2, b"for the log\n")
        faulthandler.dump_traceback(file=STDERR)
    os.write(2, b"again for people\n")
    log = (tmp_path / "process-1.log").read_text()
    assert log.startswith("for the log\n")
    assert "most recent call first" in log
    assert capfd.readouterr().err == "for people\nagain for people\n"


@pytest.mark.parametrize("fresh", [False, True])
def test_claim_creates_and_frees(tmp_path, fresh):
    """Also after an error in the block; within it the directory is taken."""
    for _ in range(2):
        with (
            contextlib.suppress(ZeroDivisionError),
            claim(tmp_path / "a" / "run", fresh=fresh) as run,
        ):
            assert run == run_dir.RunDir(tmp_path / "a" / "run", archived=None)
            with pytest.raises(RunDirInUse):
                claim(run.path).__enter__()
            raise ZeroDivisionError
    assert os.listdir(tmp_path / "a") == ["run"]


def test_a_directory_in_use_names_the_process_and_is_free_once_that_is_killed(
    holder, tmp_path
):
    (tmp_path / "run" / "metrics.jsonl").touch()
    for fresh in (False, True):
        words = f"in use by pid {holder.pid} on "
        with pytest.raises(RunDirInUse, match=words) as caught:
            claim(tmp_path / "run", fresh=fresh).__enter__()
        assert "\n" not in str(caught.value)
        assert os.listdir(tmp_path) == ["run"]
    holder.kill()
    holder.wait()
    with claim(tmp_path / "run") as run:
        assert str(os.getpid()) in (run.path / ".lock").read_text()


def test_fresh_archives_under_the_next_number(tmp_path):
    for name in ("run.2", "run.x", "running.7"):
        (tmp_path / name).mkdir()
    for number in (3, 4):
        with claim(tmp_path / "run") as run:
            (run.path / "text").write_text(str(number))
        with claim(tmp_path / "run", fresh=True) as run:
            assert run.archived == tmp_path / f"run.{number}"
            assert os.listdir(run.path) == [".lock"]
            assert os.listdir(run.archived) == ["text"]
            assert (run.archived / "text").read_text() == str(number)
            with pytest.raises(RunDirInUse):
                claim(tmp_path / "run").__enter__()


def test_failed_archive_changes_nothing_and_frees(tmp_path, monkeypatch):
    with claim(tmp_path / "run") as run:
        (run.path / "text").write_text("old")
    taken = tmp_path / "run.1"
    monkeypatch.setattr(run_dir, "_archive_name", lambda path: taken / "no" / "where")
    with pytest.raises(FileNotFoundError):
        claim(tmp_path / "run", fresh=True).__enter__()
    assert (tmp_path / "run" / "text").read_text() == "old"
    with claim(tmp_path / "run"):
        pass


def test_lock_of_an_archived_directory_is_not_taken_for_the_new_one(
    tmp_path, monkeypatch
):
    """The lock is taken again if another process archives the run between our open and
    our flock."""
    path = tmp_path / "run"
    flock = run_dir.fcntl.flock

    def late(descriptor, operation):
        monkeypatch.setattr(run_dir.fcntl, "flock", flock)
        path.rename(tmp_path / "run.1")
        path.mkdir()
        return flock(descriptor, operation)

    monkeypatch.setattr(run_dir.fcntl, "flock", late)
    with claim(path):
        assert (path / ".lock").read_text().startswith(f"pid {os.getpid()} ")
        with pytest.raises(RunDirInUse):
            claim(path).__enter__()


def test_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "run").touch()
    for path in (tmp_path / "run", tmp_path / "run" / "below"):
        with pytest.raises(ValueError, match="is a file"):
            claim(path).__enter__()


def test_an_error_of_the_lock_file_names_it(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_dir.os, "pwrite", fail)
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/run/.lock'"),
        claim(tmp_path / "run"),
    ):
        pytest.fail("the run has begun")
