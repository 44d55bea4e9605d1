"""Test the notebooks: stored outputs are complete and clean, and a fresh kernel gives
the same ones."""

import concurrent.futures
import pathlib
import re
import subprocess
import sys
import tempfile

import nbformat
import pytest

from tools import store_notebook

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES, MAX_CELL_LINES = 400_000, 25
NUM_KERNELS = 2
"""Number of kernels at a time, one for each core of a small machine."""
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


def test_there_are_notebooks_and_the_list_names_them():
    listed = (ROOT / "notebooks" / "README.md").read_text()
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        assert f"]({path.name})" in listed


@each_notebook
def test_stored_outputs_are_whole_and_clean(path):
    """A notebook was run once from the top, has pictures and no errors, and contains no
    paths of a machine."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        kinds = {(o.output_type, o.get("name", "stdout")) for o in cell.outputs}
        assert kinds.isdisjoint({("error", "stdout"), ("stream", "stderr")})
        assert not cell.outputs or any(text for _, text in texts(cell))
        assert len(cell.source.splitlines()) <= MAX_CELL_LINES, cell.source
    assert num_pictures(cells) >= 3
    assert path.stat().st_size < MAX_BYTES
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert set(cell.metadata) == ({"alt"} if num_pictures([cell]) else set()), (
            "no timings, no state of an editor; alt says what a picture shows"
        )
        shown = texts(cell) if cell.cell_type == "code" else []
        words = [cell.source, *(text for _, text in shown)]
        paths = [m[0] for m in map(MACHINE_PATH.search, words) if m]
        assert not paths, f"paths of a machine: {paths}"


@each_notebook
def test_sources_are_formatted(path):
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [*ruff, *words, "--no-cache", path],
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """Runs of the notebooks that are tested in fresh kernels, NUM_KERNELS at a time, as
    futures by path. The last notebooks take longest and begin first.

    A kernel is this Python's, without any settings for Jupyter.
    """
    folder = tmp_path_factory.mktemp("kernels")
    with (
        pytest.MonkeyPatch.context() as patch,
        concurrent.futures.ThreadPoolExecutor(NUM_KERNELS) as pool,
    ):
        for name, value in store_notebook.settings(folder).items():
            patch.setenv(name, value)
        for name in (*store_notebook.UNSET, "JAX_DISABLE_MOST_OPTIMIZATIONS"):
            patch.delenv(name, raising=False)  # compiled as for a reader
        tests = [
            test
            for test in request.session.items
            if test.path == request.path and "runs" in test.fixturenames
        ]
        paths = sorted({test.callspec.params["path"] for test in tests}, reverse=True)
        yield {path: pool.submit(run_again, path) for path in paths}


def run_again(path: pathlib.Path):
    """Return the notebook with the outputs of a fresh kernel, and with a last cell that
    prints the kernel's Python."""
    notebook = nbformat.read(path, as_version=4)
    prefix_cell = nbformat.v4.new_code_cell("import sys; print(sys.prefix)")
    notebook.cells.append(prefix_cell)
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        store_notebook.execute(notebook, folder)
    return notebook


@pytest.mark.slow
@each_notebook
def test_a_fresh_kernel_gives_the_stored_outputs(path, runs):
    """A fresh kernel gives the stored texts, tables and numbers of pictures, and the
    notebook's own asserts hold."""
    stored, notebook = nbformat.read(path, as_version=4), runs[path].result()
    *again, last = code_cells(notebook)
    assert last.outputs[0].text.strip() == sys.prefix
    for cell, expected in zip(again, code_cells(stored), strict=True):
        assert texts(cell) == texts(expected), cell.source
    assert num_pictures(again) == num_pictures(code_cells(stored))


def make_notebook(*sources: str):
    """Return a notebook as an editor leaves it, with the editor's state and with cells
    that were run out of order."""
    cells = [nbformat.v4.new_code_cell(source, execution_count=7) for source in sources]
    cells[0].metadata = {"editable": True, "alt": "a curve"}
    cells[0].outputs = [nbformat.v4.new_output("stream", text="of before")]
    return nbformat.v4.new_notebook(cells=cells, metadata={"widgets": {}})


def store(path):
    tool = [sys.executable, ROOT / "tools" / "store_notebook.py", path]
    return subprocess.run(tool, capture_output=True, text=True, check=False)


def test_a_stored_notebook_is_run_and_clean(tmp_path):
    path = tmp_path / "small.ipynb"
    prints = "print(1, flush=True)\nprint(2, flush=True)"
    nbformat.write(make_notebook("value = 6", prints, "7 * value"), path)
    done = store(path)
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, 3]
    assert [cell.metadata for cell in notebook.cells] == [{"alt": "a curve"}, {}, {}]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    first, second, third = notebook.cells
    assert first.outputs == []
    assert [output.text for output in second.outputs] == ["1\n2\n"]
    assert third.outputs[0].data["text/plain"] == "42"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("1 / 0", "a cell failed: ZeroDivisionError: division by zero"),
        ("import warnings; warnings.warn('odd')", "cell-01 warns: .*odd"),
    ],
)
def test_a_notebook_that_fails_stays_as_it_was(source, why, tmp_path):
    path = tmp_path / "small.ipynb"
    nbformat.write(make_notebook("print('fine')", source), path)
    before = path.read_bytes()
    done = store(path)
    assert done.returncode == 2
    assert re.search(f"^error: .*{why}", done.stderr, re.MULTILINE), done.stderr
    assert path.read_bytes() == before


def test_a_file_that_is_no_notebook_is_refused_in_one_line(tmp_path):
    path = tmp_path / "no.ipynb"
    path.write_text("no notebook")
    with pytest.raises(ValueError, match="is not a notebook"):
        store_notebook.read(path)
