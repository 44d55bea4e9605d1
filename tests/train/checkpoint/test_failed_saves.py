"""Test that failed saves are told at once, that old checkpoints are removed last, and
that the time of a save is said."""

import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
from orbax.checkpoint._src.serialization import serialization

from moejax import config
from tests.support.checkpoint_state import (
    DISK_FULL,
    META,
    ArrayWriter,
    Disk,
    wait_for_the_writer,
)
from train.checkpoint import checkpoints, disk, save_time
from train.checkpoint.checkpoints import CheckpointError
from train.checkpoint.record import read_record
from train.checkpoint.writer import Writer

KEEP_ONE = config.Checkpoint(keep_last=1, keep_best=0)


@pytest.fixture
def state():
    """A state that compiles quickly: one array on one device."""
    return {"w_n": jax.device_put(np.arange(1000.0, dtype=np.float32))}


@pytest.fixture
def folder(tmp_path):
    folder = Disk(tmp_path / "ck")
    yield folder
    folder.close()


@pytest.fixture
def ended(monkeypatch) -> list[tuple]:
    """Let this process be one of several, and return the list of its endings."""
    endings = []
    monkeypatch.setattr(checkpoints, "are_several", lambda: True)
    monkeypatch.setattr(
        checkpoints.failures, "end_all", lambda code, line: endings.append((code, line))
    )
    return endings


def is_told(ended: list[tuple], folder: Disk) -> bool:
    """Return whether all processes were ended once, with code 3 and a whole line."""
    ((code, line),) = ended
    return (
        code == 3
        and line.startswith(f"SAVE FAILED: checkpoint 2 in {folder.directory}: OSError")
        and "No space left on device; it needs " in line
        and f" are free in {folder.directory}; the last good one is 1: " in line
    )


def test_one_of_several_ends_all_while_its_main_thread_does_something_else(
    state, folder, ended, monkeypatch
):
    writer = ArrayWriter()
    monkeypatch.setattr(serialization, "async_serialize_from_host", writer)
    first = folder.open()
    first.save(1, state, META)
    assert first.wait()
    writer.fault = DISK_FULL
    first.save(2, state, META)
    wait_for_the_writer()
    assert is_told(ended, folder)


def test_one_of_several_whose_save_cannot_begin_ends_all(
    state, folder, ended, monkeypatch
):
    first = folder.open()
    first.save(1, state, META)
    assert first.wait()

    def refuse(*_, **__):
        raise DISK_FULL

    monkeypatch.setattr(Writer, "start", refuse)
    first.save(2, state, META)
    assert is_told(ended, folder)


def test_without_room_nothing_begins_and_training_goes_on(
    state, folder, ended, monkeypatch
):
    """With several processes too: all of them know, and none waits in orbax."""
    first = folder.open()
    first.save(1, state, META)
    assert first.wait()
    monkeypatch.setattr(disk, "num_free_bytes", lambda path: 100)
    size = disk.num_bytes(state)
    for step in (2, 3):
        first.save(step, state, META)
        assert not first.wait()
    with pytest.raises(CheckpointError, match="3 of 3 in a row: checkpoint 4 in "):
        first.save(4, state, META)
    assert folder.said == [
        f"SAVE FAILED, {count} of 3 in a row: checkpoint {step}: no room: it needs "
        f"{size:,} bytes, and 100 are free in {folder.directory}; the last good one is "
        "1; training continues"
        for count, step in ((1, 2), (2, 3))
    ]
    assert ended == []
    assert folder.names() == ["1"]
    monkeypatch.undo()
    first.save(5, state, META)
    assert first.wait()


def test_a_disk_that_does_not_answer_fails_saves_and_not_the_run(
    state, folder, monkeypatch
):
    first = folder.open()

    def refuse(path):
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(disk, "num_free_bytes", refuse)
    for step in (1, 2):
        first.save(step, state, META)
    assert [line.split(" in a row")[0] for line in folder.said] == [
        "SAVE FAILED, 1 of 3",
        "SAVE FAILED, 2 of 3",
    ]
    with pytest.raises(CheckpointError, match="Stale file handle"):
        first.save(3, state, META)


def test_a_disk_without_a_limit_has_room(tmp_path, monkeypatch):
    there = os.statvfs(tmp_path)
    fields = list(there)
    fields[2] = fields[3] = fields[4] = 0  # blocks: in all, free, free for users
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    assert disk.num_free_bytes(tmp_path) is None
    assert disk.lack_of_room(tmp_path, 2**60) == ""


def test_the_new_checkpoint_is_synced_before_an_old_one_is_removed(
    state, folder, monkeypatch
):
    """A power cut must not find the old one removed and the new one in memory."""
    first = folder.open(KEEP_ONE)
    first.save(1, state, META)
    assert first.wait()
    events, sync, remove = [], os.fsync, shutil.rmtree

    def fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def rmtree(path, *args, **kwargs):
        events.append(f"removed {path}")
        remove(path, *args, **kwargs)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    first.save(2, state, META)
    assert first.wait()
    new = folder.directory / "2"
    before = events[: events.index(f"removed {folder.directory / '1'}")]
    assert {str(path) for path in [new, *new.rglob("*")]} <= set(before)
    assert before[-1] == str(folder.directory), "the name of the new one"


def test_a_checkpoint_that_was_moved_away_takes_no_place(state, folder):
    """Two are to be kept, so the last one of this run and the one before stay."""
    first = folder.open()
    for step in (1, 2):
        first.save(step, state, META)
        assert first.wait()
    shutil.rmtree(folder.directory / "2")
    first.save(3, state, META)
    assert first.wait()
    assert folder.names() == ["1", "3"]


def test_an_unfinished_save_that_is_a_link_is_unlinked(state, folder, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    folder.directory.mkdir()
    (folder.directory / "3.orbax-checkpoint-tmp").symlink_to(precious)
    folder.open()
    assert folder.names() == []
    assert (precious / "file").exists()


def test_the_checkpoint_from_before_a_streak_outlives_a_restart(state, folder):
    first = folder.open(KEEP_ONE)
    first.save(1, state, META)
    first.save(2, state, META, num_skipped=1)
    assert first.wait()
    again = folder.open(KEEP_ONE)
    again.save(3, state, META, num_skipped=2)
    assert again.wait()
    assert folder.names() == ["1", "3"]
    assert again.step_before(updated_step=1) == 1
    assert read_record(folder.directory, 3)["num_skipped"] == 2


def test_a_run_that_ends_goes_back_to_the_save_that_was_in_flight(state, folder):
    first = folder.open()
    first.save(1, state, META)
    first.settle()
    assert first.step_before(updated_step=5) == 1


def test_a_failed_save_is_said_where_the_run_ends_for_another_reason(
    state, folder, monkeypatch
):
    writer = ArrayWriter()
    monkeypatch.setattr(serialization, "async_serialize_from_host", writer)
    writer.fault = DISK_FULL
    first = folder.open()
    first.save(1, state, META)
    first.settle()
    assert folder.said[0].startswith("SAVE FAILED, 1 of 3 in a row: checkpoint 1")


def test_the_time_of_a_save_is_said_at_the_start(state, folder, monkeypatch):
    """From a trial without a save, and from the record of the newest checkpoint."""
    first = folder.open()
    first.say_save_time(state)
    assert folder.said == [], "small checkpoints take no time"
    monkeypatch.setattr(save_time, "LARGE_BYTES", 0)
    monkeypatch.setattr(save_time, "probe", lambda path: 1e6)
    first.say_save_time(state)
    assert "(one file written as a trial): give a stopped run" in folder.said[0]
    for step in (1, 2):
        first.save(step, state, META)
    assert first.wait()
    rates = [read_record(folder.directory, n)["bytes_per_sec"] for n in (1, 2)]
    assert rates[0] == 1e6
    assert rates[1] != rates[0]
    folder.open().say_save_time(state)
    assert "(the last save): give a stopped run" in folder.said[-1]


def test_a_slow_save_is_said(state, folder, monkeypatch):
    monkeypatch.setattr(save_time, "NOTABLE_SEC", 0)
    first = folder.open()
    first.save(1, state, META)
    assert first.wait()
    assert "GB and took " in folder.said[0]
    assert "(the save of step 1): give a stopped run" in folder.said[0]


def test_written_bytes_grow_and_links_are_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(1000))
    before = disk.num_written_bytes(tmp_path)
    (tmp_path / "a" / "c").write_bytes(bytes(10))
    assert disk.num_written_bytes(tmp_path) == before + 10
    (tmp_path / "loop").symlink_to(tmp_path)
    assert disk.num_written_bytes(tmp_path) < before + 1000
    assert disk.num_written_bytes(pathlib.Path("/nonexistent")) == 0
