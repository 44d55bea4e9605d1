"""Saves that overlap training or fail, retention on the disk, and restores to other
meshes."""

import logging
import os
import shutil

import jax
import numpy as np
import pytest
from jax._src.dispatch import BACKEND_COMPILE_EVENT
from orbax.checkpoint._src.serialization import serialization

from moejax import config
from moejax.axes import sharding
from tests.support.checkpoint_state import (
    DISK_FULL,
    META,
    ArrayWriter,
    Disk,
    abstract,
    are_same_bits,
    build_mesh,
    make_state,
    wait_for_the_writer,
)
from train.checkpoint import checkpoints
from train.checkpoint.checkpoints import CheckpointError
from train.checkpoint.checksum import checksums

KEEP_ONE = config.Checkpoint(keep_last=1, keep_best=0)


@pytest.fixture
def state():
    """A state that compiles quickly: one array on one device."""
    return {"w_n": jax.device_put(np.arange(1000.0, dtype=np.float32))}


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "ck")
    yield disk
    disk.close()


@pytest.fixture
def writer(monkeypatch):
    writer = ArrayWriter()
    monkeypatch.setattr(serialization, "async_serialize_from_host", writer)
    yield writer
    writer.may_write.set()  # else the disk would wait for it


@pytest.mark.slow
def test_a_save_compiles_nothing_and_comes_back_on_any_mesh(disk, caplog, capfd):
    """A program, however small, would wait while a relayout compiles. orbax prints
    nothing meanwhile, and other libraries may."""
    mesh, compiled = build_mesh(8, 2), []
    state, opened = make_state(mesh, 7), disk.open()
    assert opened.restore(abstract(state)) is None
    checksums(state)

    def listen(event: str, *_, **__) -> None:
        if event == BACKEND_COMPILE_EVENT:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 3)(7.0)
        assert len(compiled) == 1  # it listens
        opened.save(10, state, META, eval_loss=2.5)
        assert opened.wait()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 1
    for other in (mesh, build_mesh(4, 1)):
        target = abstract(make_state(other, 0))
        restored = disk.open().restore(target)
        assert (restored.step, restored.meta) == (10, META)
        assert are_same_bits(restored.state, state)
        for x, y in zip(jax.tree.leaves(restored.state), jax.tree.leaves(target)):
            assert x.sharding == y.sharding
    assert disk.said == []
    assert capfd.readouterr() == ("", "")
    logging.getLogger("absl").warning("of another library")
    assert [r.message for r in caplog.records] == ["of another library"]


def test_a_step_is_saved_once(state, disk):
    first = disk.open()
    first.save(1, state, META)
    first.save(1, state, {"other": 1})
    assert first.wait()
    assert disk.open().restore(abstract(state)).meta == META
    with pytest.raises(ValueError, match="has a checkpoint of step 1 that this run"):
        disk.open().save(1, state, META)


def test_the_state_may_be_donated_while_it_is_written(disk, writer):
    """The writer waits until the steps after the save have overwritten their input."""
    split = sharding(build_mesh(8, 2), "data", "expert")
    make = jax.jit(
        lambda k: {"w": jax.random.normal(jax.random.key(k), (512, 512))},
        out_shardings=split,
    )
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    plain = make(0)
    step(plain)
    assert plain["w"].is_deleted(), "nothing is donated: this test shows nothing"
    first, state = disk.open(), make(1)
    want = jax.tree.map(np.array, state)
    writer.may_write.clear()
    first.save(1, state, META)
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    assert not (disk.directory / "1").exists(), "the writer did not wait"
    writer.may_write.set()
    assert first.wait()
    assert are_same_bits(first.restore(abstract(make(1))).state, want)


def test_older_checkpoints_go_but_the_best_and_links(state, disk, tmp_path):
    """A loss of NaN is no loss, and a checkpoint that was moved away takes no place."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    disk.directory.mkdir()
    (disk.directory / "0").symlink_to(precious)
    (disk.directory / "3.orbax-checkpoint-tmp").symlink_to(precious)
    cfg = config.Checkpoint(keep_last=2, keep_best=1)
    first = disk.open(cfg)
    assert disk.names() == ["0"]
    for step, loss in ((1, 3.0), (2, 1.0), (3, float("nan")), (4, 2.0), (5, None)):
        first.save(step, state, META, loss)
        assert first.wait()
    assert disk.names() == ["0", "2", "4", "5"]
    shutil.rmtree(disk.directory / "5")
    first.save(6, state, META)
    assert first.wait()
    assert disk.names() == ["0", "2", "4", "6"]
    assert (precious / "file").exists()


def test_the_checkpoint_from_before_a_streak_outlives_a_restart(state, disk):
    first = disk.open(KEEP_ONE)
    first.save(1, state, META)
    first.save(2, state, META, num_skipped=1)
    assert first.wait()
    again = disk.open(KEEP_ONE)
    again.save(3, state, META, num_skipped=2)
    again.settle()
    assert disk.names() == ["1", "3"]
    assert again.step_before(updated_step=1) == 1


def test_the_new_checkpoint_is_synced_before_an_old_one_is_removed(
    state, disk, writer, monkeypatch
):
    """A power cut must not find the old one removed and the new one in memory."""
    first = disk.open(KEEP_ONE)
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
    writer.may_write.clear()
    first.save(2, state, META)
    assert "1" in disk.names()
    writer.may_write.set()
    assert first.wait()
    new = disk.directory / "2"
    before = events[: events.index(f"removed {disk.directory / '1'}")]
    assert {str(path) for path in [new, *new.rglob("*")]} <= set(before)
    assert before[-1] == str(disk.directory), "the name of the new one"


# Saves that fail


def fail_in_the_writer(monkeypatch) -> None:
    writer = ArrayWriter()
    writer.fault = DISK_FULL
    monkeypatch.setattr(serialization, "async_serialize_from_host", writer)


def fail_at_once(monkeypatch) -> None:
    def refuse(*_, **__):
        raise DISK_FULL

    monkeypatch.setattr(checkpoints.ocp.AsyncCheckpointer, "save", refuse)


def fail_to_sync(monkeypatch) -> None:
    def refuse(_):
        raise DISK_FULL

    monkeypatch.setattr(checkpoints, "sync_tree", refuse)


def have_no_room(monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "num_free_bytes", lambda path: 100)


def be_stale(monkeypatch) -> None:
    def refuse(path):
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(checkpoints, "num_free_bytes", refuse)


@pytest.fixture
def ended(monkeypatch) -> list[tuple]:
    """Let this process be one of several, and return the list of its endings."""
    endings = []
    monkeypatch.setattr(checkpoints, "are_several", lambda: True)
    monkeypatch.setattr(
        checkpoints.failures, "end_all", lambda code, line: endings.append((code, line))
    )
    return endings


FAULTS = {
    fail_in_the_writer: "No space left on device; it needs 4,000 bytes, and ",
    fail_at_once: "No space left on device; it needs 4,000 bytes, and ",
    fail_to_sync: "No space left on device; it needs 4,000 bytes, and ",
    have_no_room: "no room: it needs 4,000 bytes, and 100 are free in ",
    be_stale: "Stale file handle",
}
"""How a save fails, and what the line says of it."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_training_goes_on_until_three_saves_in_a_row_have_failed(
    fault, state, disk, monkeypatch, capfd
):
    first = disk.open()
    first.save(1, state, META)
    assert first.wait()
    with monkeypatch.context() as patch:
        fault(patch)
        for step in (2, 3):
            first.save(step, state, META)
            assert not first.wait()
    first.save(4, state, META)  # a success starts the count again
    assert first.wait()
    fault(monkeypatch)
    for step in (5, 6):
        first.save(step, state, META)
        assert not first.wait()

    def save_and_wait():
        first.save(7, state, META)
        first.wait()

    with pytest.raises(CheckpointError, match="3 of 3 in a row: checkpoint 7") as error:
        save_and_wait()
    assert str(disk.directory) in str(error.value)
    for line in (*disk.said, str(error.value)):
        assert FAULTS[fault] in line
        assert "\n" not in line
    assert [line.partition(" in a row")[0] for line in disk.said] == [
        f"SAVE FAILED, {count} of 3" for count in (1, 2, 1, 2)
    ]
    assert "the last good one is 1; training continues" in disk.said[0]
    assert first.restore(abstract(state)).step >= 4
    assert not any("tmp" in name for name in disk.names())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("fault", [fail_in_the_writer, fail_at_once, fail_to_sync])
def test_one_of_several_ends_all_while_its_main_thread_does_something_else(
    fault, state, disk, ended, monkeypatch
):
    first = disk.open()
    first.save(1, state, META)
    assert first.wait()
    with monkeypatch.context() as patch:
        # All know before the save begins that there is no room: none waits in orbax.
        have_no_room(patch)
        first.save(2, state, META)
    assert not first.wait()
    assert ended == []
    fault(monkeypatch)
    first.save(2, state, META)
    wait_for_the_writer()
    ((code, line),) = ended
    assert code == 3
    assert line.startswith(f"SAVE FAILED: checkpoint 2 in {disk.directory}: OSError")
    assert FAULTS[fault] in line
    assert f" are free in {disk.directory}; the last good one is 1: " in line


def test_a_failed_save_is_said_where_the_run_ends_for_another_reason(
    state, disk, monkeypatch
):
    fail_in_the_writer(monkeypatch)
    monkeypatch.setattr(checkpoints, "MAX_FAILED_SAVES", 1)
    first = disk.open()
    first.save(1, state, META)
    first.settle()
    assert disk.said[0].startswith("SAVE FAILED, 1 of 1 in a row: checkpoint 1")


def test_a_disk_without_a_limit_has_room(tmp_path, monkeypatch):
    fields = list(os.statvfs(tmp_path))
    fields[2] = fields[3] = fields[4] = 0  # blocks: in all, free, free for users
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    assert checkpoints.num_free_bytes(tmp_path) is None


def test_a_slow_save_is_said_once(state, disk, monkeypatch):
    monkeypatch.setattr(checkpoints, "SLOW_SAVE_SEC", -1)
    first = disk.open()
    first.save(1, state, META)
    assert first.wait()
    (line,) = disk.said
    assert "(SLURM: --signal=TERM@6" in line
