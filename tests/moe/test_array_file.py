"""Test that damaged .npz files are refused in one line, before memory is allocated."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from moejax.config import Recorded
from moejax.moe import recorded
from moejax.moe.array_file import read_npz

E = 8


def header(shape: str, dtype: str = "'<i8'") -> bytes:
    """Return the header of an array with this text as its shape and type."""
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n"
    size = len(text).to_bytes(2, "little")
    return b"\x93NUMPY\x01\x00" + size + text.encode()


def write_member(path, content: bytes, method=zipfile.ZIP_DEFLATED):
    """Write an .npz file whose array `tokens` has these bytes, and return its path."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("tokens.npy", content)
    return path


def array_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def refusal(read, path) -> str:
    """Return the line in which a file is refused, and assert that little memory was
    allocated."""
    tracemalloc.start()
    with pytest.raises(ValueError) as error:
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8e6
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def read_loads(path):
    """Read a file as the router does."""
    return recorded.loads(Recorded(source=str(path)), 2, E, 2)


@pytest.mark.parametrize(
    "content",
    [
        header("(1099511627776,)"),
        header("(1099511627776, 1, 8)") + b"\0" * 64,
        header("(2, 2, 8)") + b"\0" * 100,
        header("(2, 2, 8)") + b"\0" * 500,
        header("(-1, 2, 8)"),
        header("(2.0, 2, 8)"),
        header("(True, 2, 8)"),
        header("(" * 900),
        header("(" + "9" * 3000 + ",)"),
        header("(2, 2, 8)", "'O'"),
        header("(" + "1, " * 600 + ")"),
        header("(2, 2, 8)", "'<c16'") + b"\0" * 512,
        header("(2, 2, 8)", "[('x', '<i8')]") + b"\0" * 256,
        header("(2, 2, 8)", "'<U999999999'"),
        b"",
        b"\x93NUMPY\x09\x00",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
        array_bytes(np.full((2, 2, E), np.nan)),
        array_bytes(np.full((2, 2, E), np.inf)),
        array_bytes(np.full((2, 2, E), -1)),
        array_bytes(np.full((2, 2, E), 2**63, np.uint64)),
        array_bytes(np.zeros((2, 0, E))),
        array_bytes(np.zeros((0, 2, E))),
        array_bytes(np.zeros((2, 2, 0))),
        array_bytes(np.float64(1)),
    ],
    ids=range(25),
)
def test_an_array_that_is_none_is_one_line(tmp_path, content):
    path = write_member(tmp_path / "a.npz", content)
    assert "tokens" in refusal(read_loads, path)


def test_a_file_that_expands_too_far_is_refused_before_it_is_read(tmp_path):
    """The content has 16 MB."""
    content = header("(1000, 2000, 8)", "'|u1'") + b"\0" * (1000 * 2000 * 8)
    path = write_member(tmp_path / "a.npz", content)
    words = "a file of this size may expand to"
    assert words in refusal(lambda path: read_npz(path, ["tokens"]), path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_that_numpy_does_not_write(tmp_path, method):
    path = write_member(tmp_path / "a.npz", array_bytes(np.ones((2, 2, E))), method)
    assert "numpy does not write" in refusal(read_loads, path)


@pytest.mark.parametrize(
    ("dtype", "order"), [("<u2", "C"), (">i4", "F"), ("<f8", "C"), ("|u1", "F")]
)
def test_reads_what_numpy_wrote(tmp_path, dtype, order):
    rng = np.random.default_rng(0)
    array = np.asarray(rng.integers(0, 99, (3, 2, 4, E)), dtype, order=order)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", tokens=array, layer=np.arange(2))
        arrays = read_npz(tmp_path / "a.npz", ["tokens", "layer", "none"])
        assert sorted(arrays) == ["layer", "tokens"]
        np.testing.assert_array_equal(arrays["tokens"], array)
        assert arrays["tokens"].dtype == array.dtype


@pytest.mark.parametrize(
    ("source", "field"), [("wandering", {"period_steps": 2**31 - 1}), ("rotating", {})]
)
def test_a_synthetic_table_that_is_too_large(source, field):
    cfg = Recorded(source=source, **field)
    with pytest.raises(ValueError, match="numbers at most"):
        recorded.loads(cfg, 100, 10**4, 2)
