"""Marks of how far trackers have got, in RUN_DIR/trackers.json, for a resumed run.

    {"wandb": {"id": "3fa8c21e", "step": 120}, "mlflow": {"id": "..", "step": 120}}

A tracker that cannot take a step back goes on after the last step that it has taken.
The mark is written before the figures are sent, so that none is there twice.
"""

import json
import os
import pathlib

FILE = "trackers.json"


class Marks:
    """The id of the run at each tracker, and the last step that it has taken."""

    def __init__(self, run_dir: pathlib.Path) -> None:
        self._path = run_dir / FILE
        self._marks: dict[str, dict] = {}
        try:
            found = json.loads(self._path.read_text())
            self._marks = {name: mark for name, mark in found.items() if _is_mark(mark)}
        except (OSError, ValueError, AttributeError):
            pass  # a new run, or a damaged file: it begins a run of its own

    def id(self, name: str) -> str | None:
        """Return the id of the run at a tracker; None for a new run."""
        return self._marks[name]["id"] if name in self._marks else None

    def step(self, name: str) -> int:
        """Return the last step that a tracker has taken."""
        return self._marks[name]["step"] if name in self._marks else 0

    def put(self, name: str, run_id: str, step: int) -> None:
        """Write a mark. Raises OSError where it cannot be written."""
        self._marks[name] = {"id": run_id, "step": step}
        partial = self._path.with_name(FILE + ".tmp")
        partial.write_text(json.dumps(self._marks))
        os.replace(partial, self._path)


def _is_mark(mark) -> bool:
    """Return whether a value is a mark, which a damaged file may not hold."""
    return (
        isinstance(mark, dict)
        and isinstance(mark.get("id"), str)
        and type(mark.get("step")) is int
    )
