"""Step times of a run of train/main.py, from its metrics.jsonl."""

import itertools
import json
import pathlib
import statistics
from collections.abc import Sequence


def step_records(run_dir: pathlib.Path) -> list[dict]:
    """Whole lines of steps so far; none before there is one."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if "step_msec" in record]


def median_sec(records: Sequence[dict]) -> float:
    return statistics.median(record["step_msec"] for record in records) / 1e3


def run_dir_of(program: Sequence[str]) -> pathlib.Path | None:
    """Where a train/main.py with these arguments writes: its --run_dir, else runs/<name
    of the first gin file>; None for what names neither."""
    named = _values(program, "--run_dir")
    if named:
        return pathlib.Path(named[-1])
    gin_files = _values(program, "--gin_file")
    return pathlib.Path("runs", pathlib.Path(gin_files[0]).stem) if gin_files else None


def _values(words: Sequence[str], flag: str) -> list[str]:
    """Of --flag=value and --flag value."""
    found = [x.partition("=")[2] for x in words if x.startswith(flag + "=")]
    return found + [b for a, b in itertools.pairwise(words) if a == flag]
