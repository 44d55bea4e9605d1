"""Saves that overlap training or fail, retention, and restores to other meshes."""

import logging

import jax
import numpy as np
import pytest
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
from train.checkpoint.checkpoints import CheckpointError
from train.checkpoint.writer import Writer


@pytest.fixture
def mesh():
    return build_mesh(8, 2)


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
def test_round_trip_to_other_meshes(mesh, disk):
    state = make_state(mesh, 7)
    first = disk.open()
    assert first.restore(abstract(state)) is None
    first.save(10, state, META, eval_loss=2.5)
    assert first.wait()
    for other in (mesh, build_mesh(4, 1)):
        target = abstract(make_state(other, 0))
        restored = disk.open().restore(target)
        assert (restored.step, restored.meta) == (10, META)
        assert are_same_bits(restored.state, state)
        for x, y in zip(jax.tree.leaves(restored.state), jax.tree.leaves(target)):
            assert x.sharding == y.sharding
    assert disk.said == []


def test_a_step_is_saved_once(mesh, disk):
    first = disk.open()
    first.save(1, make_state(mesh, 1), META)
    first.save(1, make_state(mesh, 1), {"other": 1})
    assert first.wait()
    restored = disk.open().restore(abstract(make_state(mesh, 1)))
    assert restored.meta == META
    with pytest.raises(
        ValueError, match="has a checkpoint of step 1 that this run did"
    ):
        disk.open().save(1, make_state(mesh, 1), META)


def test_orbax_is_quiet_and_others_are_not(mesh, disk, capfd, caplog):
    first = disk.open()
    first.save(1, make_state(mesh, 1), META)
    first.wait()
    disk.open().restore(abstract(make_state(mesh, 1)))
    logging.getLogger("absl").warning("of another library")
    out, err = capfd.readouterr()
    assert out + err.replace("of another library", "").strip() in ("", "WARNING:absl:")
    assert [r.message for r in caplog.records] == ["of another library"]


def test_donated_right_after_save(mesh, disk, writer):
    """The writer waits until the steps after the save have overwritten their input."""
    split = sharding(mesh, "data", "expert")
    make = jax.jit(
        lambda k: {"w": jax.random.normal(jax.random.key(k), (512, 512))},
        out_shardings=split,
    )
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    plain = make(0)
    step(plain)
    assert plain["w"].is_deleted(), (
        "nothing is donated here, so this test shows nothing"
    )

    first = disk.open()
    writer.may_write.clear()
    state = make(1)
    want = jax.tree.map(np.array, state)
    first.save(1, state, META)
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    assert not (disk.directory / "1").exists(), "the writer did not wait"
    writer.may_write.set()
    assert first.wait()
    restored = first.restore(abstract(make(1)))
    assert are_same_bits(restored.state, want)
    twice = step(step(restored.state))
    np.testing.assert_array_equal(twice["w"], want["w"] + 1 + 1)


def test_keeps_the_last_and_the_best(mesh, disk):
    cfg = config.Checkpoint(keep_last=2, keep_best=1)
    first = disk.open(cfg)
    loss = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: None, 6: 1.5}
    for step in (1, 2, 3):
        first.save(step, make_state(mesh, step), META, loss[step])
    first.close()
    again = disk.open(cfg)
    assert again.restore(abstract(make_state(mesh, 0))).step == 3
    for step in (4, 5, 6):
        again.save(step, make_state(mesh, step), META, loss[step])
    again.wait()
    assert disk.names() == ["2", "5", "6"]
    again.save(7, make_state(mesh, 7), META, 0.5)
    again.wait()
    assert disk.names() == ["6", "7"]


def test_the_last_good_one_stays_until_the_next_is_complete(mesh, disk, writer):
    first = disk.open(config.Checkpoint(keep_last=1, keep_best=0))
    first.save(1, make_state(mesh, 1), META)
    first.wait()
    writer.may_write.clear()
    first.save(2, make_state(mesh, 2), META)
    assert "1" in disk.names()
    writer.may_write.set()
    first.wait()
    assert disk.names() == ["2"]
    writer.fault = DISK_FULL
    first.save(3, make_state(mesh, 3), META)
    assert not first.wait()
    assert disk.names() == ["2"]
    assert are_same_bits(
        first.restore(abstract(make_state(mesh, 0))).state, make_state(mesh, 2)
    )


# Failed saves


def test_a_failed_save_is_told_and_the_next_is_attempted(mesh, disk, writer, capfd):
    first = disk.open()
    first.save(1, make_state(mesh, 1), META)
    assert first.wait()
    for step in (2, 4, 6, 8):  # each success between them starts the count again
        writer.fault = DISK_FULL
        first.save(step, make_state(mesh, step), META)
        wait_for_the_writer()
        writer.fault = None
        first.save(step + 1, make_state(mesh, step + 1), META)
        assert first.wait()
        assert disk.names() == [str(max(1, step - 1)), str(step + 1)]
    assert len(disk.said) == 4
    assert disk.said[0].startswith(
        "SAVE FAILED, 1 of 3 in a row: checkpoint 2: OSError"
    )
    assert "No space left on device" in disk.said[0]
    assert "the last good one is 1" in disk.said[0]
    assert capfd.readouterr() == ("", "")


def test_too_many_failed_saves_stop(mesh, disk, writer):
    first = disk.open()
    first.save(1, make_state(mesh, 1), META)
    assert first.wait()
    writer.fault = DISK_FULL
    first.save(2, make_state(mesh, 2), META)
    assert not first.wait()
    first.save(3, make_state(mesh, 3), META)
    first.save(4, make_state(mesh, 4), META)
    assert len(disk.said) == 2
    with pytest.raises(CheckpointError, match="3 of 3 in a row: checkpoint 4") as error:
        first.wait()
    assert "No space left on device" in str(error.value)
    assert "the last good one is 1" in str(error.value)
    assert disk.names() == ["1"]


def test_a_save_that_fails_at_once_counts_too(mesh, disk, monkeypatch):
    first = disk.open()
    monkeypatch.setattr(
        Writer, "start", lambda *a, **k: (_ for _ in ()).throw(OSError("no"))
    )
    for step in (1, 2):
        first.save(step, make_state(mesh, 1), META)
        assert not first.wait()
    with pytest.raises(CheckpointError, match="the last good one is none"):
        first.save(3, make_state(mesh, 1), META)
    assert len(disk.said) == 2
