"""Test folders that are written: bytes, files, and what an error leaves."""

import errno
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save

from moejax.interop import write
from moejax.interop.write import plan_folder, write_folder
from tests.support.tensor_folders import BF16, INDEX, SINGLE, make_arrays, write_shards


def specs(arrays) -> dict:
    """Return dtypes and shapes of arrays."""
    return {name: (array.dtype, array.shape) for name, array in arrays.items()}


def read_all(folder: pathlib.Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_one_file_is_that_of_the_library(tmp_path):
    arrays = make_arrays()
    write_shards(tmp_path / "a", arrays, 10**6)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [SINGLE]
    want = save(arrays, metadata={"format": "pt"})
    assert (tmp_path / "a" / SINGLE).read_bytes() == want


def test_the_library_reads_shards(tmp_path):
    arrays = make_arrays()
    folder = write_shards(tmp_path / "a", arrays)
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    assert list(index["weight_map"]) == sorted(arrays)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, array in arrays.items():
        path = folder / index["weight_map"][name]
        got = load_file(path)[name]
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert got.tobytes() == array.tobytes()
        with safetensors.safe_open(path, "np") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_files_are_filled_in_order():
    f32 = np.dtype(np.float32)
    plan = plan_folder({"z": (f32, (5,)), "b": (BF16, (5,)), "a": (BF16, (5,)),
                        "c": (f32, (100,)), "d": (f32, (1,))}, 40)  # fmt: skip
    assert list(plan.files.values()) == [("z", "a", "b"), ("c",), ("d",)]
    assert plan.names == ["z", "a", "b", "c", "d"]
    assert plan.num_bytes == 4 * 106 + 2 * 10
    assert list(plan_folder(plan.specs, 444).files) == [SINGLE]


def test_values_are_rounded_to_the_planned_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "BLOCK_ELEMENTS", 7)
    x = np.random.default_rng(0).standard_normal((5, 6)).astype("f")
    plan = plan_folder({"a": (BF16, (5, 6)), "b": (np.dtype("f4"), (6, 5))})
    values = {"a": x, "b": x.T}
    write_folder(tmp_path / "m", plan, values.__getitem__, {"config.json": b"{}"})
    got = load_file(tmp_path / "m" / SINGLE)
    assert got["a"].tobytes() == x.astype(BF16).tobytes()
    assert np.array_equal(got["b"], x.T)
    assert (tmp_path / "m" / "config.json").read_bytes() == b"{}"


def test_a_folder_with_files_is_not_overwritten(tmp_path):
    (tmp_path / "m").mkdir()
    arrays = make_arrays()
    write_shards(tmp_path / "m", arrays)
    before = read_all(tmp_path / "m")
    with pytest.raises(ValueError, match="exists and is not empty"):
        write_shards(tmp_path / "m", arrays)
    assert read_all(tmp_path / "m") == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="exists and is not empty"):
        write_shards(tmp_path / "file", arrays)
    write_shards(tmp_path / "not" / "there", arrays)
    assert read_all(tmp_path / "not" / "there") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "m", "not"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_leaves_nothing(tmp_path, error):
    arrays = make_arrays()

    def value(name):
        if name == "g":
            raise error
        return arrays[name]

    with pytest.raises(error):
        write_folder(tmp_path / "m", plan_folder(specs(arrays), 120), value, {})
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_names_its_file_and_leaves_nothing(tmp_path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self.file.close()

        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opens = pathlib.Path.open
    monkeypatch.setattr(pathlib.Path, "open", lambda *a, **k: Full(opens(*a, **k)))
    with pytest.raises(OSError, match=r"No space left.*model-00001-of-00003") as caught:
        write_shards(tmp_path / "m", make_arrays())
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_a_folder_that_is_too_large_for_the_disk_is_not_begun(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path]
    subprocess.run(mount, check=True)
    try:
        x = np.zeros((2**18,), np.float32)
        with pytest.raises(OSError, match=r"need 1,048,580 bytes, and [\d,]+ are free"):
            write_shards(tmp_path / "m", {"a": x, "b": np.float32(1)})
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)
