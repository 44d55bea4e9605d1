"""Damaged files and killed processes never make a restore return a wrong state."""

import json
import pathlib
import random
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.axes import sharding
from tests.support.checkpoint_state import (
    CFG,
    META,
    Disk,
    abstract,
    are_same_bits,
    build_mesh,
    make_state,
)
from train.checkpoint.checkpoints import Checkpointer

NUM_CORRUPTIONS = 6
"""Number of each kind."""
LAST_SAVED = 3

WORKER = """
import asyncio, sys
import jax, numpy as np
from orbax.checkpoint._src.serialization import serialization
from moejax import config
from train.checkpoint.checkpoints import Checkpointer

write = serialization.async_serialize_from_host

async def held(*args, **kwargs):
    if step > int(sys.argv[2]):
        print("writing", flush=True)
        await asyncio.sleep(600)
    return await write(*args, **kwargs)

serialization.async_serialize_from_host = held
cfg = config.Checkpoint(keep_last=2, keep_best=0)
checkpointer = Checkpointer(sys.argv[1], cfg)
for step in range(1, int(sys.argv[2]) + 2):
    w_n = np.random.default_rng(step).random(2**19, dtype=np.float32)
    state = {"w_n": jax.device_put(w_n, jax.devices()[0])}
    checkpointer.save(step, state, {"step": step})
    checkpointer.wait()
"""
"""Program that saves each step, and never ends the write of the first one above a
limit."""


@pytest.fixture
def mesh():
    return build_mesh(8, 2)


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "ck")
    yield disk
    disk.close()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Return a directory with good checkpoints of steps 10 and 20."""
    directory = tmp_path_factory.mktemp("two") / "ck"
    checkpointer = Checkpointer(directory, CFG)
    for step in (10, 20):
        checkpointer.save(step, make_state(build_mesh(8, 2), step), {"step": step})
    assert checkpointer.wait()
    checkpointer.close()
    return directory


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"embed_vd": ((64, 32), "float32")},
            "params/embed_vd is float32[64,16] there and float32[64,32] here",
        ),
        (
            {"embed_vd": ((64, 16), "bfloat16")},
            "params/embed_vd is float32[64,16] there and bfloat16[64,16] here",
        ),
        ({"norm_d": None}, "params/norm_d is float16[16] there and missing here"),
        (
            {"new": ((), "int32"), "norm_d": ((), "int32")},
            "params/new is missing there and int32[] here, and 1 more differ",
        ),
    ],
)
def test_another_model_is_refused_and_left_alone(
    changes, line, two_steps, tmp_path, mesh
):
    disk = Disk(shutil.copytree(two_steps, tmp_path / "ck"))
    target = abstract(make_state(mesh, 1))
    for name, array in changes.items():
        target["params"].pop(name, None)
        if array is not None:
            target["params"][name] = jax.ShapeDtypeStruct(
                *array, sharding=sharding(mesh)
            )
    with pytest.raises(ValueError) as error:
        disk.open().restore(target)
    assert str(error.value) == f"checkpoint of another model: {line}"
    assert disk.names() == ["10", "20"]
    assert disk.said == []


def test_check_refuses_before_the_arrays_are_read(two_steps, disk, mesh):
    shutil.copytree(two_steps, disk.directory)
    shutil.rmtree(disk.directory / "20" / "state")

    def check(meta):
        raise ValueError(f"trained on other data than {meta}")

    with pytest.raises(ValueError, match="trained on other data than"):
        disk.open().restore(abstract(make_state(mesh, 1)), check=check)
    assert disk.names() == ["10", "20"]


def corrupt(directory: pathlib.Path, kind: str, rng: random.Random) -> str:
    """Damage one file of step 20; return what was done."""
    files = sorted(p for p in (directory / "20").rglob("*") if p.is_file())
    path = rng.choices(files, [p.stat().st_size + 100 for p in files])[0]
    data = bytearray(path.read_bytes())
    if kind == "delete":
        path.unlink()
    elif kind == "truncate" or not data:
        path.write_bytes(data[: rng.randrange(len(data) or 1)])
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    return f"{kind} {path.relative_to(directory)}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flip", "truncate", "delete"])
def test_no_wrong_state_is_accepted(kind, two_steps, tmp_path, mesh):
    """A damaged checkpoint is set aside, with one line, or what was damaged of it is
    not needed and the state is right."""
    want = {step: make_state(mesh, step) for step in (10, 20)}
    rng, num_detected = random.Random(kind), 0
    for case in range(NUM_CORRUPTIONS):
        disk = Disk(tmp_path / str(case))
        shutil.copytree(two_steps, disk.directory)
        what = corrupt(disk.directory, kind, rng)
        restored = disk.open().restore(abstract(want[10]))
        disk.close()
        assert restored.meta == {"step": restored.step}, what
        assert are_same_bits(restored.state, want[restored.step]), what
        is_detected = restored.step == 10
        assert disk.names() == ["10", "20.corrupt" if is_detected else "20"], what
        assert len(disk.said) == is_detected, what
        assert all(line.startswith("CORRUPT CHECKPOINT 20") for line in disk.said)
        num_detected += is_detected
    # If no damage had been detected, the assertions above would show nothing.
    assert num_detected > NUM_CORRUPTIONS / 3


def test_a_flipped_bit_that_orbax_restores_is_seen(two_steps, disk, mesh):
    shutil.copytree(two_steps, disk.directory)
    files = (disk.directory / "20" / "state").rglob("d/*")
    path = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    assert disk.open().restore(abstract(make_state(mesh, 0))).step == 10
    assert (
        "1 of 17 arrays differ from their checksums, params/blocks/w_lef"
        in disk.said[0]
    )


def edit_record(directory, step, edit) -> None:
    path = directory / str(step) / "record" / "metadata"
    path.write_text(edit(path.read_text()))


@pytest.mark.parametrize(
    "damage",
    {
        "empty directory": lambda d: (d / "30").mkdir(),
        "file": lambda d: (d / "30").touch(),
        "no record": lambda d: shutil.rmtree(d / "20" / "record"),
        "no arrays": lambda d: shutil.rmtree(d / "20" / "state"),
        "other meta": lambda d: edit_record(
            d, 20, lambda t: t.replace('"meta": {"step": 20}', '"meta": {"step": 21}')
        ),
        "no JSON": lambda d: edit_record(d, 20, lambda t: t[1:]),
        "a list": lambda d: edit_record(d, 20, lambda t: "[]"),
        "copied from 10": lambda d: shutil.copytree(d / "10", d / "30"),
    }.items(),
    ids=lambda item: item[0],
)
def test_damage_is_set_aside_and_training_continues_over_it(
    damage, two_steps, disk, mesh
):
    shutil.copytree(two_steps, disk.directory)
    damage[1](disk.directory)
    bad = "30" if (disk.directory / "30").exists() else "20"
    (disk.directory / f"{bad}.corrupt").mkdir()
    first = disk.open()
    restored = first.restore(abstract(make_state(mesh, 0)))
    assert restored.step == (20 if bad == "30" else 10)
    assert len(disk.said) == 1
    assert f"CORRUPT CHECKPOINT {bad} renamed to " in disk.said[0]
    assert f"{bad}.corrupt-2" in disk.names()
    first.save(int(bad), make_state(mesh, 5), META)
    assert first.wait()
    assert are_same_bits(
        disk.open().restore(abstract(make_state(mesh, 0))).state, make_state(mesh, 5)
    )


def test_none_is_good(two_steps, disk, mesh):
    shutil.copytree(two_steps, disk.directory)
    for step in (10, 20):
        edit_record(disk.directory, step, lambda text: json.dumps({"sha256": text}))
    assert disk.open().restore(abstract(make_state(mesh, 0))) is None
    assert len(disk.said) == 3
    assert disk.said[2].startswith("NO GOOD CHECKPOINT: all 2 in ")
    assert disk.names() == ["10.corrupt", "20.corrupt"]


@pytest.mark.slow
def test_killed_in_the_middle_of_a_save(repo, disk, mesh):
    """The torn checkpoint goes, the one before it is whole, and saves go on."""
    split = sharding(mesh, ("data", "expert"))
    target = {"w_n": jax.ShapeDtypeStruct((2**19,), jnp.float32, sharding=split)}
    command = [sys.executable, "-c", WORKER, disk.directory, str(LAST_SAVED)]
    process = subprocess.Popen(command, cwd=repo, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    process.kill()
    process.communicate()
    assert any("tmp" in name for name in disk.names())
    opened = disk.open()
    restored = opened.restore(target)
    assert (restored.step, restored.meta) == (LAST_SAVED, {"step": LAST_SAVED})
    want = np.random.default_rng(LAST_SAVED).random(2**19, dtype=np.float32)
    np.testing.assert_array_equal(restored.state["w_n"], want)
    opened.save(LAST_SAVED + 1, restored.state, META)
    assert opened.wait()
    assert disk.names() == [str(LAST_SAVED), str(LAST_SAVED + 1)]
    assert disk.said == []
