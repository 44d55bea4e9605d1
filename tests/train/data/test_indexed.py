"""Files of tokens (.bin/.idx and .npy): bytes, round trips, and inconsistent files."""

import hashlib
import itertools
import struct

import numpy as np
import pytest

from tests.support.data_files import write_npy
from train.data import indexed
from train.data.indexed import DTYPES, IndexedWriter, file_sha256, open_tokens, scan


def write(path, lengths, offsets, bounds, *, tokens=b"", version=1, code=8):
    """Write a .bin and .idx, packed by hand after the format of Megatron."""
    index = b"MMIDIDX\0\0" + struct.pack("<Q", version) + struct.pack("<B", code)
    index += struct.pack("<QQ", len(lengths), len(bounds))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(offsets)}q", *offsets)
    index += struct.pack(f"<{len(bounds)}q", *bounds)
    path.with_suffix(".idx").write_bytes(index)
    path.with_suffix(".bin").write_bytes(tokens)
    return path.with_suffix(".bin")


def three_documents(path, **changes):
    """Write documents of 1, 2 + 0 and 3 tokens, and an empty one."""
    case = {
        "lengths": [1, 2, 0, 3],
        "offsets": [0, 2, 6, 6],
        "bounds": [0, 1, 3, 3, 4],
        "tokens": struct.pack("<6H", 9, 8, 7, 6, 5, 60000),
    }
    return write(path, **(case | changes))


@pytest.mark.parametrize("name", ["a.bin", "a.idx", "a"])
def test_documents_start_where_the_index_says(tmp_path, name):
    path = three_documents(tmp_path / "a.bin")
    tokens_file = open_tokens(tmp_path / name)
    assert tokens_file.path == path
    assert tokens_file.token_b.tolist() == [9, 8, 7, 6, 5, 60000]
    assert tokens_file.start_d.tolist() == [0, 1, 3]
    assert not tokens_file.token_b.flags.owndata
    sha256 = hashlib.sha256(path.read_bytes() + (tmp_path / "a.idx").read_bytes())
    found = scan(path)
    assert (found.sha256, found.largest_id) == (sha256.hexdigest(), 60000)


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_of_integers_is_read(tmp_path, code):
    tokens = np.arange(5, dtype=DTYPES[code])
    size = tokens.itemsize
    path = write(
        tmp_path / "a.bin", [2, 3], [0, 2 * size], [0, 1, 2],
        tokens=tokens.tobytes(), code=code,
    )  # fmt: skip
    if "float" in DTYPES[code]:
        with pytest.raises(ValueError, match="ids are integers"):
            open_tokens(path)
    else:
        assert open_tokens(path).token_b.tolist() == [0, 1, 2, 3, 4]


INCONSISTENT = {
    "version": ({"version": 2}, "is of version 2"),
    "dtype": ({"code": 9}, "dtype code 9"),
    "negative length": (
        {"lengths": [1, 6, -4, 3], "offsets": [0, 2, 14, 6]}, "negative length",
    ),
    "offset beyond": ({"offsets": [0, 2, 6, 8]}, "do not follow one another"),
    "offset negative": ({"offsets": [-2, 2, 6, 6]}, "do not follow one another"),
    "order": ({"offsets": [2, 0, 6, 6]}, "do not follow one another"),
    "longer than .bin": ({"tokens": b"123456789"}, "has 9 bytes, but its .idx says 12"),
    "shorter than .bin": ({"tokens": b"x" * 14}, "has 14 bytes, but its .idx says 12"),
    "wider than .bin": ({"code": 4}, "do not follow one another"),
    "documents descend": ({"bounds": [0, 3, 1, 4]}, "are not in order"),
    "documents end early": ({"bounds": [0, 1, 3]}, "do not extend"),
    "documents start late": ({"bounds": [1, 4]}, "do not extend"),
    "documents beyond": ({"bounds": [0, 9]}, "do not extend"),
    "no bounds": ({"bounds": []}, "do not extend"),
    "empty": (
        {"lengths": [], "offsets": [], "bounds": [0], "tokens": b""}, "holds no tokens",
    ),
    "empty documents": (
        {"lengths": [0], "offsets": [0], "bounds": [0, 1], "tokens": b""},
        "holds no tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), INCONSISTENT.values(), ids=INCONSISTENT
)
def test_an_inconsistent_index_is_refused(tmp_path, changes, message):
    path = three_documents(tmp_path / "a.bin", **changes)
    with pytest.raises(ValueError, match=message) as error:
        open_tokens(path)
    assert "\n" not in str(error.value)


def test_files_that_are_missing_or_cut_are_refused(tmp_path):
    path = three_documents(tmp_path / "a.bin")
    index = tmp_path / "a.idx"
    whole = index.read_bytes()
    for size in range(len(whole)):
        index.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"header|cut short"):
            open_tokens(path)
    index.unlink()
    with pytest.raises(ValueError, match=r"the \.idx that belongs to the \.bin"):
        open_tokens(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"No such file"):
        open_tokens(path)
    with pytest.raises(ValueError, match=r"cannot be read"):
        open_tokens(tmp_path)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_what_is_written_in_parts_is_read_whole(tmp_path, monkeypatch, dtype):
    """Documents span several parts, and some are longer than a sequence may be."""
    monkeypatch.setattr(indexed, "_MAX_SEQUENCE", 7)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 40)
    token_b = rng.integers(0, 60000, lengths.sum()).astype(np.int32)
    start_d = np.cumsum(lengths) - lengths
    writer = IndexedWriter(tmp_path / "a b.bin", dtype)
    cuts = [0, *sorted(rng.choice(token_b.size, 25, replace=False)), token_b.size]
    for a, b in itertools.pairwise(cuts):
        starts = start_d[(start_d >= a) & (start_d < b)] - a
        writer.append(token_b[a:b], starts)
    shard = writer.finish()
    tokens_file = open_tokens(shard.path)
    assert np.array_equal(tokens_file.token_b, token_b)
    assert np.array_equal(tokens_file.start_d, start_d)
    assert tokens_file.token_b.dtype == dtype
    assert (shard.num_documents, shard.num_tokens) == (40, token_b.size)
    found = scan(shard.path)
    assert (found.sha256, found.largest_id) == (shard.sha256, token_b.max())


def test_an_array_has_a_document_at_each_separator(tmp_path):
    path = write_npy(tmp_path / "a.npy", [5, 0, 0, 7, 1, 0], "int64")
    assert open_tokens(path).start_d.tolist() == [0]
    assert open_tokens(path, 0).start_d.tolist() == [0, 1, 2, 5]
    assert open_tokens(path, 0).token_b.tolist() == [5, 0, 0, 7, 1, 0]
    found = scan(path)
    assert (found.sha256, found.largest_id) == (file_sha256(path), 7)
    assert open_tokens(write_npy(path, [0, 3, 0]), 0).start_d.tolist() == [0, 2]
    assert open_tokens(write_npy(path, [1, 259], ">u4")).token_b.tolist() == [1, 259]


def test_arrays_that_hold_no_ids_are_refused(tmp_path):
    path = tmp_path / "a.npy"
    arrays = {
        "shape": np.zeros((2, 3), np.int32),
        "float32": np.zeros(3, np.float32),
        "no tokens": np.zeros(0, np.uint16),
        "object": np.array([{}, 1], object),
        "bool": np.zeros(3, bool),
    }
    for message, value in arrays.items():
        np.save(path, value)
        with pytest.raises(ValueError, match=message):
            open_tokens(path)
    write_npy(path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"header|cut short"):
            open_tokens(path)
    path.write_bytes(whole + b"1")
    with pytest.raises(ValueError, match="damaged"):
        open_tokens(path)


def test_a_negative_id_is_refused(tmp_path):
    path = write_npy(tmp_path / "a.npy", [1, 2, -3, 4], "int32")
    with pytest.raises(ValueError, match=r"the id -3 at 2"):
        scan(path)
