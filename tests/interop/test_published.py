"""Test that the examples of docs/interop.md run."""

import re

import numpy as np
from safetensors.numpy import load_file

from tests.support.tensor_folders import SINGLE


def test_the_examples_of_the_page_run(published, repo, tmp_path, monkeypatch):
    page = (repo / "docs" / "interop.md").read_text()
    models, read, write = re.findall(
        r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    names: dict = {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "olmoe").symlink_to(published / "olmoe")
    exec(compile(models, "interop.md", "exec"), names)
    assert names["written"].plan.num_bytes == 67072
    exec(compile(read, "interop.md", "exec"), names)
    assert names["arrays"]["gate_ledf"].shape == (2, 8, 32, 16)
    want = load_file(published / "olmoe" / SINGLE)
    one = want["model.layers.1.mlp.experts.7.gate_proj.weight"]
    assert np.array_equal(np.asarray(names["arrays"]["gate_ledf"])[1, 7], one.T)
    exec(compile(write, "interop.md", "exec"), names)
    assert load_file(tmp_path / "out" / SINGLE)["lm_head.weight"].sum() == 128 * 64
