"""Test that the folders of `transformers` are read as the library reads them, and
written as they are."""

import pathlib

import pytest
from safetensors.numpy import load_file

from moejax.interop.folder import TensorFolder
from moejax.interop.write import plan_folder, write_folder
from tests.support.tensor_folders import SINGLE

pytestmark = pytest.mark.published


def folders(published: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of models."""
    return sorted(path.parent for path in published.glob(f"*/{SINGLE}"))


def test_every_folder_is_read_as_by_the_library(published):
    assert len(folders(published)) >= 14
    for path in folders(published):
        want = load_file(path / SINGLE)
        with TensorFolder(path) as folder:
            assert folder.entries.keys() == want.keys()
            for name, array in want.items():
                got = folder.read(name)
                assert (got.dtype, got.shape) == (array.dtype, array.shape)
                assert got.tobytes() == array.tobytes()
            assert folder.bytes_read == sum(array.nbytes for array in want.values())


def test_every_folder_is_written_byte_by_byte_as_it_is(published, tmp_path):
    for path in folders(published):
        with TensorFolder(path) as folder:
            specs = {n: (e.dtype, e.shape) for n, e in folder.entries.items()}
            out = tmp_path / path.name
            write_folder(out, plan_folder(specs), folder.read, {})
        assert (out / SINGLE).read_bytes() == (path / SINGLE).read_bytes()
