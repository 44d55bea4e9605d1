"""Test the notebooks: stored outputs are complete and clean, and a fresh kernel gives
the same ones."""

import os
import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support import xla_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 400_000
MACHINE_PATH = re.compile(r"(?<![\w.:/])(/[\w.-]+){2,}|~/|[A-Z]:\\")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell) -> list[tuple[str, str]]:
    """Return the texts that a cell printed and displayed; streams are joined, and
    pictures left out."""
    printed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    shown = [
        (kind, text)
        for output in cell.outputs
        for kind, text in sorted(output.get("data", {}).items())
        if kind.startswith("text/")
    ]
    return [("stream", printed), *shown]


def num_pictures(cells) -> int:
    outputs = (output for cell in cells for output in cell.get("outputs", ()))
    return sum("image/png" in output.get("data", {}) for output in outputs)


@each_notebook
def test_stored_outputs_are_whole_and_clean(path):
    """A notebook was run once from the top, without errors and warnings, says in words
    what its pictures show, and contains no paths of a machine."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        kinds = {(o.output_type, o.get("name", "stdout")) for o in cell.outputs}
        assert kinds.isdisjoint({("error", "stdout"), ("stream", "stderr")})
        assert ("alt" in cell.metadata) == (num_pictures([cell]) > 0)
    for cell in notebook.cells:
        shown = texts(cell) if cell.cell_type == "code" else []
        words = [cell.source, *(text for _, text in shown)]
        paths = [m[0] for m in map(MACHINE_PATH.search, words) if m]
        assert not paths, f"paths of a machine: {paths}"
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.long
@each_notebook
def test_a_fresh_kernel_gives_the_stored_outputs(path, tmp_path, monkeypatch):
    """A fresh kernel gives the stored texts, tables and numbers of pictures, and the
    notebook's own asserts hold."""
    # Compiled as for a reader, and with the pictures of a notebook.
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    flags = os.environ["XLA_FLAGS"].split()
    slow = [flag for flag in flags if flag not in xla_flags.QUICK]
    monkeypatch.setenv("XLA_FLAGS", " ".join(slow))
    stored = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, resources=where).execute()
    again = code_cells(notebook)
    for cell, expected in zip(again, code_cells(stored), strict=True):
        assert texts(cell) == texts(expected), cell.source
    assert num_pictures(again) == num_pictures(code_cells(stored))
