"""Test each check of a file's header, by one file that breaks it."""

import os
import re

import numpy as np
import pytest

from moejax.interop.folder import TensorFolder
from moejax.interop.header import DTYPES, MAX_HEADER_BYTES, encode_header
from tests.support.tensor_folders import SINGLE, write_arrays, write_raw


def record(dtype="U8", shape=(2,), offsets=(0, 2), **more):
    """Return what a header says of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)} | more


ONE = record()
WRONG = {
    "no length": (None, b"abc", None, "has 3 bytes"),
    "10 GB": ({}, b"", 10 * 2**30, r"header of 10,737,418,240 bytes, and the limit"),
    "over the limit": ({}, b"", MAX_HEADER_BYTES + 1, "and the limit is 100,000,000"),
    "cut off": ({}, b"", 100, "claims a header of 100 bytes and has 10 in all"),
    "empty header": (b"", b"", None, "does not begin with"),
    "a space first": (b" {}", b"", None, "does not begin with"),
    "a list": (b"[]", b"", None, "does not begin with"),
    "no JSON": (b"{'a'}", b"", None, "the header is no JSON"),
    "no UTF-8": (b'{"\xff":1}', b"", None, "the header is no JSON"),
    "nested": (b'{"a":' + b"[" * 100_000, b"", None, "nested too deeply"),
    "twice": (b'{"a":{}, "a":{}}', b"", None, "has the key 'a' twice"),
    "twice inside": (b'{"a":{"x":1,"x":2}}', b"", None, "has the key 'x' twice"),
    "surrogate": (b'{"\\ud800":1}', b"", None, "the header is no JSON"),
    "NaN": (b'{"a":NaN}', b"", None, "has the number NaN"),
    "digits": (b'{"a":' + b"9" * 5000 + b"}", b"", None, "the header is no JSON"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", None, "must map text to text"),
    "null metadata": ({"__metadata__": None}, b"", None, "must map text to text"),
    "no record": ({"a": 5}, b"", None, "must have dtype, shape and data_offsets"),
    "a key less": ({"a": {"dtype": "U8"}}, b"", None, "must have dtype, shape"),
    "a key more": ({"a": record(x=1)}, b"ab", None, "must have dtype, shape"),
    "dtype": ({"a": record("F4")}, b"ab", None, "'a' has dtype 'F4', and moejax reads"),
    "no dtype": ({"a": record(["U8"])}, b"ab", None, "has dtype ['U8']"),
    "float shape": ({"a": record(shape=[2.0])}, b"ab", None, r"has shape [2.0]"),
    "bool shape": ({"a": record(shape=[True])}, b"a", None, r"has shape [True]"),
    "negative shape": ({"a": record(shape=[-2])}, b"ab", None, r"has shape [-2]"),
    "33 dims": ({"a": record(shape=[1] * 33)}, b"ab", None, "has shape [1, 1"),
    "too large": ({"a": record(shape=[0, 2**63], offsets=[0, 0])}, b"", None,
                  "too large"),
    "one offset": ({"a": record(offsets=[0])}, b"ab", None, "has data_offsets [0]"),
    "reversed": ({"a": record(offsets=[2, 0])}, b"ab", None, "has data_offsets [2, 0]"),
    "text": ({"a": record(offsets=["0", "2"])}, b"ab", None, "has data_offsets ['0'"),
    "bytes": ({"a": record("F32")}, b"ab", None,
              "has shape [2] of F32, 8 bytes, and data_offsets for 2"),
    "overlap": ({"a": record(), "b": record(offsets=[1, 3])}, b"abc", None,
                "'b' begins at byte 1, and 'a' ends at 2: they overlap"),
    "the same": ({"a": record(), "b": record()}, b"ab", None, "they overlap"),
    "a gap": ({"a": record(), "b": record(offsets=[3, 5])}, b"abcde", None,
              "'b' begins at byte 3, and nothing covers the bytes from 2"),
    "a gap first": ({"a": record(offsets=[1, 3])}, b"abc", None, "nothing covers"),
    "truncated": ({"a": ONE}, b"a", None, "ends at byte 2 of 1, so the file is cut"),
    "more": ({"a": ONE}, b"abc", None, "has 1 bytes after its last tensor"),
    "a hostile name": ({"\x1b[31m\nx\u202e": 5}, b"", None, r"'\x1b[31m\nx\u202e'"),
    "a long name": ({"k" * 10_000: 5}, b"", None, "'kkkk"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_header_is_one_line(case, tmp_path):
    header, data, length, message = WRONG[case]
    path = tmp_path / SINGLE
    if header is None:
        path.write_bytes(data)
    else:
        write_raw(path, header, data, length)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        TensorFolder(tmp_path)
    line = str(caught.value)
    assert line.startswith(str(path))
    assert line.isprintable()
    assert len(line) < 500 + len(str(path))
    assert ": " in line.removeprefix(str(path)), "a line ends with a remedy"


def test_what_the_format_allows_is_read(tmp_path):
    header = {
        "__metadata__": {"format": "pt", "": "x"},
        "b": record("U8", [2, 0, 3], [3, 3]),
        "a": record("U8", [], [2, 3]),
        "c": record("I8", [1, 2], [0, 2]),
        "": record("U8", [0], [3, 3]),
    }
    write_raw(tmp_path / SINGLE, header, b"\xff\x01\x02")
    with TensorFolder(tmp_path) as folder:
        assert folder.read("c").tolist() == [[-1, 1]]
        assert folder.read("a").shape == ()
        assert folder.read("a") == 2
        assert folder.read("b").shape == (2, 0, 3)
        assert folder.read("").size == 0


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read_bit_for_bit(name, tmp_path):
    codes = np.arange(256, dtype=np.uint8) >> (7 if name == "BOOL" else 0)
    array = codes.view(DTYPES[name]).reshape(2, -1)
    write_arrays(tmp_path / SINGLE, {"a": array})
    with TensorFolder(tmp_path) as folder:
        got = folder.read("a")
    assert got.dtype == array.dtype
    assert got.tobytes() == array.tobytes()


def test_a_header_that_is_written_is_aligned():
    specs = {f"t{i}": (np.dtype(np.float32), (i,)) for i in range(9)}
    for count in range(9):
        some = dict(list(specs.items())[:count])
        assert len(encode_header(some)) % 8 == 0


def test_a_folder_in_place_of_a_file_and_a_fifo_are_refused(tmp_path):
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(ValueError, match="no regular file"):
        TensorFolder(tmp_path)
    (tmp_path / SINGLE).rmdir()
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(ValueError, match="no regular file"):
        TensorFolder(tmp_path)
