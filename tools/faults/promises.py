"""What holds at the end of every run, whatever happened on its way.

The parameters, the metrics and the sample ids are those of an undisturbed run with the
same number of processes, and nothing is left behind.
"""

import dataclasses
import fcntl
import hashlib
import json
import pathlib

from tools.faults.disks import mounts_below
from tools.faults.run import NUM_STEPS, Broken, Place, marked_pids

TIMED = ("tok_per_sec", "step_msec", "mfu", "adopt_msec", "adopt_wait_msec")
"""Fields of a line of metrics that depend on the time that steps take."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished run has computed."""

    digest: str
    metrics: dict[tuple[int, str], dict]
    """Lines of metrics.jsonl without times, by step and kind."""
    samples: dict[tuple[int, int], str]
    """Id of the sample of each row of each step's batch."""


def read_result(run_dir: pathlib.Path) -> Result:
    """Return the result of a finished run. Raises Broken if a step or a row is there
    twice, or not at all."""
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics: dict[tuple[int, str], dict] = {}
    for record in _read(run_dir / "metrics.jsonl"):
        key = record["step"], _kind(record)
        if key in metrics:
            raise Broken(f"metrics.jsonl has two lines of {key}")
        metrics[key] = {x: record[x] for x in record if x not in TIMED}
    samples: dict[tuple[int, int], str] = {}
    for path in sorted(run_dir.glob("samples-*.jsonl")):
        for record in _read(path):
            for row, name in zip(record["rows"], record["ids"], strict=True):
                if (record["step"], row) in samples:
                    raise Broken(f"row {row} of step {record['step']} was fed twice")
                samples[record["step"], row] = name
    for what, steps in (
        ("metrics", {step for step, kind in metrics if kind == "loss"}),
        ("samples", {step for step, _ in samples}),
    ):
        if steps != set(range(1, NUM_STEPS + 1)):
            missing = sorted(set(range(1, NUM_STEPS + 1)) ^ steps)
            raise Broken(f"{what}: lines of the steps {missing} are missing, or extra")
    return Result(summary["digest"], metrics, samples)


def expect_same(found: Result, expected: Result) -> None:
    """Raise Broken unless a run has the result of the undisturbed one."""
    for name in ("samples", "metrics"):
        a, b = getattr(found, name), getattr(expected, name)
        wrong = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
        if wrong:
            raise Broken(
                f"{name} differ from the undisturbed run's, first at {wrong[0]}"
            )
    if found.digest != expected.digest:
        raise Broken(f"digest {found.digest} instead of {expected.digest}")


def expect_nothing_left(place: Place, num_mounts: int = 0) -> None:
    """Raise Broken if the run has left a process, a lock, a partial file, or a
    mount beside the `num_mounts` that were there before."""
    left = [str(x) for x in place.run_dir.rglob("*") if _is_partial(x)]
    left += [f"process {pid}" for pid in marked_pids(place.root)]
    left += mounts_below(place.root)[num_mounts:]
    if left:
        raise Broken(f"left behind: {', '.join(left[:5])}")
    with (place.run_dir / ".lock").open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Broken("the lock of the run directory is still held") from None


def listing(folders: list[pathlib.Path]) -> dict[str, str]:
    """Return the sha256 of every file below the folders; '' for a folder."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else ""
        for folder in folders
        for path in sorted(folder.rglob("*"))
    }


def expect_untouched(before: dict[str, str], after: dict[str, str]) -> None:
    """Raise Broken if two listings differ."""
    if changed := sorted(before.items() ^ after.items()):
        raise Broken(f"touched outside of the run directory: {changed[0][0]}")


def _kind(record: dict) -> str:
    """Return the name of the field that tells which kind of line this is."""
    return next(
        x for x in ("loss", "eval_loss", "decision", "") if x in record or not x
    )


def _read(path: pathlib.Path) -> list[dict]:
    """Return the objects of a file of JSON lines, or raise Broken for a bad line."""
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            records.append(json.loads(line))
            records[-1]["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Broken(
                f"line {number} of {path.name} is bad: {line[:60]!r}"
            ) from None
    return records


def _is_partial(path: pathlib.Path) -> bool:
    return path.name.endswith(".tmp") or "orbax-checkpoint-tmp" in path.name
