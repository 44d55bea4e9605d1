"""Test that the folders of `transformers` are read as the library reads them, and
written as they are."""

import pathlib
import re

import numpy as np
from safetensors.numpy import load_file

from moejax.interop.folder import TensorFolder
from moejax.interop.write import plan_folder, write_folder
from tests.support.tensor_folders import SINGLE


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


def test_the_examples_of_the_page_run(published, repo, tmp_path, monkeypatch):
    page = (repo / "docs" / "interop.md").read_text()
    models, read, write = re.findall(
        r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    names: dict = {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "olmoe").symlink_to(published / "olmoe")
    exec(compile(models, "interop.md", "exec"), names)
    assert names["written"].num_bytes == 67072
    exec(compile(read, "interop.md", "exec"), names)
    assert names["arrays"]["gate_ledf"].shape == (2, 8, 32, 16)
    want = load_file(published / "olmoe" / SINGLE)
    one = want["model.layers.1.mlp.experts.7.gate_proj.weight"]
    assert np.array_equal(np.asarray(names["arrays"]["gate_ledf"])[1, 7], one.T)
    exec(compile(write, "interop.md", "exec"), names)
    assert load_file(tmp_path / "out" / SINGLE)["lm_head.weight"].sum() == 128 * 64


def test_every_folder_is_written_byte_by_byte_as_it_is(published, tmp_path):
    for path in folders(published):
        with TensorFolder(path) as folder:
            specs = {n: (e.dtype, e.shape) for n, e in folder.entries.items()}
            out = tmp_path / path.name
            write_folder(out, plan_folder(specs), folder.read, {})
        assert (out / SINGLE).read_bytes() == (path / SINGLE).read_bytes()
