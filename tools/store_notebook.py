"""Run notebooks from the top in a fresh kernel, and store their outputs in the files.

    python tools/store_notebook.py notebooks/02_plans_and_swaps.ipynb

The sources, the texts that say what pictures show (`alt` in the metadata of a cell) and
the outputs are stored in their order, without timings, editor state or anything else
that belongs to this machine. A notebook in which a cell fails or warns is
left as it was. Tests compare the stored texts word for word
(tests/docs/test_notebooks.py). Exit codes: 0 done, 2 a cell failed or warned, or the
file is not a notebook.
"""

import argparse
import os
import pathlib
import sys
import tempfile

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from train.launch.program import DONE, guarded  # noqa: E402

CELL_LIMIT_SEC = 300
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "version": "3.12"}
ALT = "alt"
"""Field of a cell's metadata that says in words what its picture shows."""
UNSET = ("JUPYTER_PATH", "MPLBACKEND")
"""Environment variables that are removed, because they would choose another kernel or
other pictures."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "notebooks",
        nargs="+",
        type=pathlib.Path,
        help=".ipynb files to run and rewrite",
    )
    args = parser.parse_args(argv)
    return guarded(lambda: work(args.notebooks), as_json=False)


def work(paths: list[pathlib.Path]) -> int:
    for path in paths:
        notebook = read(path)
        with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
            os.environ.update(settings(pathlib.Path(folder)))
            for name in UNSET:
                os.environ.pop(name, None)
            execute(notebook, folder)
        clean(notebook)
        check(notebook, path)
        nbformat.write(notebook, path)
        print(f"{path}  {path.stat().st_size / 1e3:.0f} kB")
    return DONE


def read(path: pathlib.Path):
    """Return a notebook. Raises ValueError if the file is not a notebook."""
    try:
        return nbformat.read(path, as_version=4)
    except nbformat.reader.NotJSONError as error:
        raise ValueError(f"{path} is not a notebook: {error}") from error


def settings(folder: pathlib.Path) -> dict[str, str]:
    """Return environment variables under which Jupyter has no user settings and runs
    this Python's kernel."""
    own = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
    return {name: str(folder / name.lower()) for name in own} | {
        "JUPYTER_RUNTIME_DIR": str(folder),
        "JUPYTER_PREFER_ENV_PATH": "1",
    }


def execute(notebook, folder: pathlib.Path | str) -> None:
    """Run all cells in order, in place, with `folder` as the working directory. Raises
    ValueError if a cell fails."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=CELL_LIMIT_SEC, kernel_name="python3", resources=where
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise ValueError(f"a cell failed: {error.ename}: {error.evalue}") from error


def clean(notebook) -> None:
    """Remove what differs from run to run, and join the prints of each cell to one
    output."""
    notebook.metadata = {"kernelspec": KERNEL, "language_info": LANGUAGE}
    for index, cell in enumerate(notebook.cells):
        alt = {name: text for name, text in cell.metadata.items() if name == ALT}
        cell.id, cell.metadata = f"cell-{index:02d}", alt
        if cell.cell_type == "code":
            cell.outputs = _join_prints(cell.outputs)


def check(notebook, path: pathlib.Path) -> None:
    """Raise ValueError if a cell wrote to stderr: a lesson must not warn."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise ValueError(f"{path}: {cell.id} warns: {output.text}")


def _join_prints(outputs: list) -> list:
    joined = []
    for output in outputs:
        last = joined[-1] if joined else {}
        is_stream = output.output_type == "stream"
        if is_stream and last.get("name") == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    sys.exit(main())
