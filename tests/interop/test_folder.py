"""Test that folders are read as the library `safetensors` reads them, and that damaged
ones are refused in one line."""

import json
import pathlib
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.interop.folder import TensorFolder
from moejax.interop.header import DTYPES
from tests.support.tensor_folders import (
    INDEX,
    SINGLE,
    edit_json,
    make_arrays,
    write_arrays,
    write_raw,
    write_shards,
)

FIRST = "model-00001-of-00003.safetensors"


@pytest.fixture
def arrays():
    return make_arrays()


@pytest.fixture
def shards(arrays, tmp_path) -> pathlib.Path:
    return write_shards(tmp_path / "model", arrays)


def refuse(folder: pathlib.Path, message: str) -> None:
    """Require that a folder is refused in one short line that says what to do."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        TensorFolder(folder)
    line = str(caught.value)
    assert line.startswith(str(folder))
    assert line.isprintable()
    assert len(line) < 800
    assert ": " in line.removeprefix(str(folder)), "a line ends with a remedy"


def test_tensors_and_slices_are_those_of_the_library(shards, arrays):
    folder = TensorFolder(shards)
    assert folder.bytes_read == 0, "opening a folder reads headers alone"
    assert folder.arrays.keys() == arrays.keys()
    assert folder.num_files == 3
    for name, array in arrays.items():
        got = folder.view(name).read()
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()
    before = folder.bytes_read
    assert before == sum(array.nbytes for array in arrays.values())
    index = (slice(-3, None), slice(2, -1))
    assert folder.view("a").read(index).tolist() == arrays["a"][index].tolist()
    assert folder.bytes_read - before == arrays["a"][index].nbytes


def test_every_folder_of_transformers_is_read_as_by_the_library(published):
    folders = sorted(path.parent for path in published.glob(f"*/{SINGLE}"))
    assert len(folders) >= 14
    for path in folders:
        want, got = load_file(path / SINGLE), TensorFolder(path).arrays
        assert got.keys() == want.keys()
        for name, array in want.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
            assert got[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read_bit_for_bit(name, tmp_path):
    codes = np.arange(256, dtype=np.uint8) >> (7 if name == "BOOL" else 0)
    array = codes.view(DTYPES[name]).reshape(2, -1)
    write_arrays(tmp_path / SINGLE, {"a": array})
    got = TensorFolder(tmp_path).view("a").read()
    assert (got.dtype, got.tobytes()) == (array.dtype, array.tobytes())


def record(dtype="U8", shape=(2,), offsets=(0, 2), **more):
    """Return what a header says of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)} | more


def test_what_the_format_allows_is_read(tmp_path):
    header = {
        "__metadata__": {"format": "pt", "": "x"},
        "b": record("U8", [2, 0, 3], [3, 3]),
        "a": record("U8", [], [2, 3]),
        "c": record("I8", [1, 2], [0, 2]),
        "": record("U8", [0], [3, 3]),
    }
    write_raw(tmp_path / SINGLE, header, b"\xff\x01\x02")
    got = TensorFolder(tmp_path).arrays
    assert got["c"].tolist() == [[-1, 1]]
    assert (got["a"].shape, got["b"].shape, got[""].size) == ((), (2, 0, 3), 0)


ONE = record()
NESTED = b'{"a":' + b"[" * 100_000
DAMAGED_FILES = {
    "no length": (None, b"abc", None, "has 3 bytes, and no header"),
    "10 GB": ({}, b"", 10 * 2**30, "claims a header of 10,737,418,240 bytes"),
    "cut off": ({}, b"", 100, "claims a header of 100 bytes and has 10 in all"),
    "empty header": (b"", b"", None, "does not begin with"),
    "a space first": (b" {}", b"", None, "does not begin with"),
    "a list": (b"[]", b"", None, "does not begin with"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", None, "must map text to text"),
    "null metadata": ({"__metadata__": None}, b"", None, "must map text to text"),
    "no UTF-8": (b'{"\xff":1}', b"", None, "the header is no JSON"),
    "nested": (NESTED, b"", None, "the header is no JSON"),
    "twice": (b'{"a":{}, "a":{}}', b"", None, "has the key 'a' twice"),
    "surrogate": (b'{"\\ud800":1}', b"", None, "the header is no JSON"),
    "NaN": (b'{"a":NaN}', b"", None, "has the number NaN"),
    "no record": ({"a": 5}, b"", None, "must have dtype, shape and data_offsets"),
    "a key less": ({"a": {"dtype": "U8"}}, b"", None, "must have dtype, shape"),
    "a key more": ({"a": record(x=1)}, b"ab", None, "must have dtype, shape"),
    "dtype": ({"a": record("F4")}, b"ab", None, "'a' has dtype 'F4', and moejax reads"),
    "no dtype": ({"a": record(["U8"])}, b"ab", None, "has dtype ['U8']"),
    "float shape": ({"a": record(shape=[2.0])}, b"ab", None, "has shape [2.0]"),
    "bool shape": ({"a": record(shape=[True])}, b"a", None, "has shape [True]"),
    "negative": ({"a": record(shape=[-2])}, b"ab", None, "has shape [-2]"),
    "33 dims": ({"a": record(shape=[1] * 33)}, b"ab", None, "has shape [1, 1"),
    "too large": ({"a": record(shape=[0, 2**63], offsets=[0, 0])}, b"", None, "[0, 92"),
    "one offset": ({"a": record(offsets=[0])}, b"ab", None, "data_offsets [0] for"),
    "reversed": ({"a": record(offsets=[2, 0])}, b"ab", None, "data_offsets [2, 0] for"),
    "bytes": ({"a": record("F32")}, b"ab", None, "for another number of bytes"),
    "overlap": ({"a": record(), "b": record(offsets=[1, 3])}, b"abc", None,
                "'b' overlaps with 'a'"),
    "the same": ({"a": record(), "b": record()}, b"ab", None, "'b' overlaps with 'a'"),
    "a gap": ({"a": record(), "b": record(offsets=[3, 5])}, b"abcde", None,
              "'b' begins at byte 3, and nothing covers the bytes from 2"),
    "truncated": ({"a": ONE}, b"a", None, "the tensors end at byte"),
    "more": ({"a": ONE}, b"abc", None, "the tensors end at byte"),
    "a hostile name": ({"\x1b[31m\nx\u202e": 5}, b"", None, r"'\x1b[31m\nx\u202e'"),
    "a long name": ({"k" * 10_000: 5}, b"", None, "'kkkk"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED_FILES)
def test_a_damaged_file_is_one_line(case, tmp_path):
    header, data, length, message = DAMAGED_FILES[case]
    if header is None:
        (tmp_path / SINGLE).write_bytes(data)
    else:
        write_raw(tmp_path / SINGLE, header, data, length)
    refuse(tmp_path, message)


def change_map(folder: pathlib.Path, **changes: object) -> None:
    """Change the file of some tensors in an index; `...` removes a tensor."""
    names = json.loads((folder / INDEX).read_text())["weight_map"] | changes
    edit_json(folder / INDEX, weight_map={k: v for k, v in names.items() if v != ...})


def rename(folder: pathlib.Path, other: str) -> None:
    """Put a link in place of the first file, which becomes another one."""
    (folder / FIRST).rename(folder / other)
    (folder / FIRST).symlink_to(other)


IN_FOLDER = "must be .safetensors in the folder itself"
DAMAGED_FOLDERS = {
    "nothing": (lambda f: [path.unlink() for path in f.iterdir()], "has neither"),
    "a missing file": (lambda f: (f / FIRST).unlink(), "1 of 3 files are missing"),
    "both kinds": (lambda f: write_arrays(f / SINGLE, {}), "which does not name it"),
    "a name more": (lambda f: change_map(f, z=FIRST), "disagree about 'z'"),
    "a name less": (lambda f: change_map(f, d=...), "disagree about 'd'"),
    "another file": (lambda f: change_map(f, a=FIRST, d=FIRST), "disagree about"),
    "no JSON": (lambda f: (f / INDEX).write_text("{"), "the index is no JSON"),
    "a list": (lambda f: (f / INDEX).write_text("[]"), "must be an object"),
    "no map": (lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
    "an empty map": (lambda f: edit_json(f / INDEX, weight_map={}), "no weight_map"),
    "above": (lambda f: change_map(f, a="../a.safetensors"), IN_FOLDER),
    "a path": (lambda f: change_map(f, a="/etc/a.safetensors"), IN_FOLDER),
    "no name": (lambda f: change_map(f, a=5), IN_FOLDER),
    "a pickle": (lambda f: change_map(f, a="a.bin"), IN_FOLDER),
    "a colour": (lambda f: change_map(f, a="\x1b[31m.safetensors"), IN_FOLDER),
    "a link out": (lambda f: rename(f, "../blob"), "is a link that leaves the folder"),
}


@pytest.mark.parametrize("case", DAMAGED_FOLDERS)
def test_a_damaged_folder_is_one_line(case, shards):
    damage, message = DAMAGED_FOLDERS[case]
    damage(shards)
    refuse(shards, message)


def test_a_folder_of_pickles_says_what_to_do(tmp_path):
    refuse(tmp_path / "nowhere", "is no folder: give the one with config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuse(tmp_path, "'pytorch_model.bin' may be a pickle")


def test_links_are_followed_within_the_folder_and_the_cache_of_the_hub(
    arrays, tmp_path
):
    """The folder of a revision has links to the blobs of the repository."""
    shards = write_shards(tmp_path / "shards", arrays)
    rename(shards, "blob")
    assert TensorFolder(shards).arrays["a"].tobytes() == arrays["a"].tobytes()
    repository = tmp_path / "models--a--b"
    revision = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    revision.mkdir(parents=True)
    for number, path in enumerate(sorted(shards.iterdir())):
        (repository / "blobs" / str(number)).write_bytes(path.read_bytes())
        if path.name != "blob":
            (revision / path.name).symlink_to(f"../../blobs/{number}")
    assert TensorFolder(revision).arrays["g"].tobytes() == arrays["g"].tobytes()
    first = sorted(revision.iterdir())[0]
    (repository / "blobs" / first.readlink().name).rename(tmp_path / "other")
    first.unlink()
    first.symlink_to("../../../other")
    refuse(revision, "is a link that leaves the folder")


def test_a_view_says_which_tensor_is_wrong(shards):
    folder = TensorFolder(shards)
    folder.view("a", (6, 10))
    with pytest.raises(ValueError, match=r"'a' has shape \[6, 10\], and config"):
        folder.view("a", (10, 6))
    with pytest.raises(ValueError, match="has no tensor 'z'"):
        folder.view("z")


@pytest.mark.parametrize("name", [FIRST, INDEX])
def test_a_pointer_of_git_lfs_is_named(shards, name):
    """A clone without LFS has such texts in place of large files."""
    (shards / name).write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        f"oid sha256:{64 * 'a'}\nsize 4976698672\n"
    )
    refuse(shards, "is a pointer of Git LFS in place of the file: run `git lfs pull`")
