"""Test folders of safetensors: the index, links, and the bytes that a slice reads."""

import json
import os
import pathlib

import numpy as np
import pytest

from moejax.interop import tensor_file
from moejax.interop.folder import TensorFolder
from tests.support.tensor_folders import (
    INDEX,
    SINGLE,
    edit_json,
    make_arrays,
    write_arrays,
    write_shards,
)


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Arrays of a checkpoint."""
    return make_arrays()


@pytest.fixture
def shards(arrays, tmp_path) -> pathlib.Path:
    """A folder with the arrays in three files."""
    folder = write_shards(tmp_path / "model", arrays)
    assert len(list(folder.glob("model-*-of-00003.safetensors"))) == 3
    return folder


def weight_map(folder: pathlib.Path) -> dict[str, str]:
    """Return the weight_map of an index."""
    return json.loads((folder / INDEX).read_text())["weight_map"]


def refuse(folder: pathlib.Path, message: str) -> None:
    """Require one line of an error that names the folder."""
    with pytest.raises(ValueError, match=message) as caught:
        TensorFolder(folder)
    assert str(folder) in str(caught.value)
    assert str(caught.value).isprintable()


def test_shards_are_read_bit_for_bit(shards, arrays):
    with TensorFolder(shards) as folder:
        assert folder.entries.keys() == arrays.keys()
        assert folder.bytes_read == 0, "opening a folder reads headers alone"
        for name, array in arrays.items():
            got = folder.read(name)
            assert got.dtype == array.dtype
            assert got.shape == array.shape
            assert got.tobytes() == array.tobytes()
        assert folder.bytes_read == sum(array.nbytes for array in arrays.values())
        assert folder.notes == ()
        assert "a" in folder
        assert "z" not in folder


def test_a_missing_shard_is_named(shards):
    (shards / "model-00002-of-00003.safetensors").unlink()
    refuse(shards, r"1 of 3 files are missing, 'model-00002-of-00003.safetensors'")


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/model.safetensors", "sub/a.safetensors", "a.bin",
     "..", "", "a\\b.safetensors", ".a.safetensors", "a\x00.safetensors", 5, None,
     ["a.safetensors"], "\x1b[31m.safetensors"],
)  # fmt: skip
def test_files_of_an_index_are_in_its_folder(shards, name):
    edit_json(shards / INDEX, weight_map=weight_map(shards) | {"a": name})
    refuse(shards, r"'a' is said to be in .*must be .safetensors in the folder itself")


def test_an_index_agrees_with_its_files(shards):
    whole = weight_map(shards)
    edit_json(shards / INDEX, weight_map=whole | {"z": whole["a"]})
    refuse(shards, "does not have 'z', which the index says is there")
    other = next(shard for shard in whole.values() if shard != whole["a"])
    edit_json(shards / INDEX, weight_map=whole | {"a": other})
    refuse(shards, "does not have 'a'")
    edit_json(shards / INDEX, weight_map={n: s for n, s in whole.items() if n != "d"})
    refuse(shards, "has 'd', which the index does not say")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[]", "is a list and must be an object"), ("{", "the index is no JSON"),
     ("{}", "has no weight_map"), ('{"weight_map": []}', "has no weight_map"),
     ('{"weight_map": {}}', "has no weight_map"),
     ('{"weight_map": {"a": "b", "a": "c"}}', "has the key 'a' twice"),
     ('{"weight_map": {"a": "\\ud800.safetensors"}}', "the index is no JSON"),
     ("[" * 100_000, "nested too deeply")],
)  # fmt: skip
def test_an_index_is_an_object_with_a_weight_map(shards, text, message):
    (shards / INDEX).write_text(text)
    refuse(shards, message)


def test_a_wrong_total_size_is_a_note_and_a_missing_one_is_nothing(shards, arrays):
    edit_json(shards / INDEX, metadata={"total_size": 12345})
    with TensorFolder(shards) as folder:
        assert "a total_size of 12,345 bytes, and the tensors have" in folder.notes[0]
        assert folder.read("a").tobytes() == arrays["a"].tobytes()
    for metadata in ({}, None, [], {"total_size": "many"}):
        edit_json(shards / INDEX, metadata=metadata)
        with TensorFolder(shards) as folder:
            assert folder.notes == ()


def test_two_sets_of_tensors_are_refused(shards, arrays):
    write_arrays(shards / SINGLE, arrays)
    refuse(shards, f"has {SINGLE} and {INDEX}, which does not name it")


def test_a_folder_without_tensors_says_what_to_give(tmp_path):
    refuse(tmp_path / "nowhere", "is no folder")
    refuse(tmp_path, f"has neither {SINGLE} nor {INDEX}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuse(tmp_path, "'pytorch_model.bin' may be a pickle")


def test_a_link_does_not_leave_the_folder(shards, arrays, tmp_path):
    first = shards / "model-00001-of-00003.safetensors"
    inside, outside = shards / "blob", tmp_path / "blob"
    first.rename(inside)
    first.symlink_to("blob")
    with TensorFolder(shards) as folder:
        assert folder.read("a").tobytes() == arrays["a"].tobytes()
    inside.rename(outside)
    first.unlink()
    first.symlink_to("../blob")
    refuse(shards, "is a link that leaves the folder")
    first.unlink()
    first.symlink_to(first.name)
    with pytest.raises((OSError, ValueError)):
        TensorFolder(shards)


def test_the_cache_of_the_hub_is_read(arrays, tmp_path):
    """The folder of a revision has links to the blobs of the repository."""
    folder = write_shards(tmp_path / "shards", arrays)
    repository = tmp_path / "models--a--b"
    revision = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    revision.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(repository / "blobs" / str(number))
        (revision / path.name).symlink_to(f"../../blobs/{number}")
    with TensorFolder(revision) as opened:
        assert opened.read("g").tobytes() == arrays["g"].tobytes()
    (tmp_path / "other").mkdir()
    (repository / "blobs" / "0").rename(tmp_path / "other" / "0")
    first = sorted(revision.iterdir())[0]
    first.unlink()
    first.symlink_to("../../../other/0")
    refuse(revision, "is a link that leaves the folder")


def test_a_view_says_which_tensor_is_wrong(shards):
    with TensorFolder(shards) as folder:
        folder.view("a", (6, 10))
        with pytest.raises(ValueError, match=r"'a' has shape \[6, 10\], and config"):
            folder.view("a", (10, 6))
        with pytest.raises(ValueError, match="has no tensor 'z'"):
            folder.view("z")
        for index in ((slice(0, 4, 2),), (0,), (slice(None),) * 3, (...,)):
            with pytest.raises(ValueError, match="slice"):
                folder.read("a", index)


def test_a_file_that_becomes_shorter_is_an_error(tmp_path):
    array = np.arange(1000, dtype=np.float32)
    path = write_arrays(tmp_path / SINGLE, {"a": array})
    with TensorFolder(tmp_path) as folder:
        os.truncate(path, 2000)
        with pytest.raises(ValueError, match="'a' ends too early"):
            folder.read("a")
        folder.read("a", (slice(0, 100),))


def test_files_are_closed_after_an_error(shards):
    (shards / "model-00003-of-00003.safetensors").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        refuse(shards, "has 0 bytes")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("max_gap", [0, 40, 10**6])
@pytest.mark.parametrize("scratch", [1, 300, 2**22])
def test_slices_are_those_of_numpy(max_gap, scratch, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "MAX_GAP_BYTES", max_gap)
    monkeypatch.setattr(tensor_file, "SCRATCH_BYTES", scratch)
    rng = np.random.default_rng(0)
    shapes = [(40,), (7, 11), (4, 5, 6), (3, 1, 4, 5), (1, 1), ()]
    arrays = {str(s): rng.standard_normal(s).astype("f") for s in shapes}
    write_arrays(tmp_path / SINGLE, arrays)
    with TensorFolder(tmp_path) as folder:
        for _ in range(20):
            for name, array in arrays.items():
                index = tuple(
                    slice(*np.sort(rng.integers(0, size + 1, 2)))
                    for size in array.shape
                )
                before = folder.bytes_read
                got = folder.read(name, index)
                assert got.shape == array[index].shape
                assert got.tobytes() == array[index].tobytes()
                num_bytes = folder.bytes_read - before
                assert num_bytes >= got.nbytes
                assert num_bytes == got.nbytes or max_gap


def test_only_the_bytes_of_a_slice_are_read(tmp_path):
    array = np.zeros((8, 4096), np.float32)
    write_arrays(tmp_path / SINGLE, {"a": array})
    with TensorFolder(tmp_path) as folder:
        folder.read("a", (slice(2, 5),))
        assert folder.bytes_read == 3 * 4096 * 4
        folder.read("a", (slice(None), slice(0, 1024)))
        assert folder.bytes_read == (3 * 4096 + 8 * 1024) * 4
        folder.read("a", (slice(3, 3),))
        assert folder.bytes_read == (3 * 4096 + 8 * 1024) * 4


def test_negative_indices_are_those_of_numpy(shards, arrays):
    index = (slice(-3, None), slice(2, -1))
    with TensorFolder(shards) as folder:
        assert folder.read("a", index).tolist() == arrays["a"][index].tolist()
