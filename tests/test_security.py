"""Test that files which a program reads are data: nothing in the code can run them."""

import ast
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from moejax.config import Recorded
from moejax.moe.recorded import loads

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
"""Modules that run code which a file holds."""
CALLS = {"eval", "exec", "allow_pickle=True", "shell=True", "yaml.load", "os.system"}


class Marks:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def risks(tree: ast.AST) -> Iterator[str]:
    """Yield what in a module could run the content of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from MODULES & {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            yield from MODULES & {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call):
            yield from CALLS & {ast.unparse(node.func)}
            yield from CALLS & {ast.unparse(keyword) for keyword in node.keywords}


def test_no_program_can_run_what_it_reads(repo):
    found = {
        str(path.relative_to(repo)): kinds
        for room in ("moejax", "train", "tools")
        for path in (repo / room).rglob("*.py")
        if (kinds := sorted(risks(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert not found, f"read these files in a format that is data: {found}"


def test_pickles_in_arrays_run_nothing(tmp_path):
    mark = tmp_path / "mark"
    objects = np.array([Marks(mark)] * 24, object).reshape(2, 3, 4)
    np.savez(tmp_path / "loads.npz", counts=objects)
    record = Recorded(source=str(tmp_path / "loads.npz"), array="counts")
    with pytest.raises(ValueError, match=r"(?i)object"):
        loads(record, num_layers=3, num_experts=4, top_k=2)
    assert not mark.exists()
    dict(np.load(tmp_path / "loads.npz", allow_pickle=True))
    assert mark.exists(), "the file would run code where it is let to"
