"""Promises that hold at the end of every run, whatever happened on its way.

The parameters, all other arrays of the last checkpoint, the metrics and the sample ids
are those of an undisturbed run with the same number of processes, and nothing is left
behind.
"""

import dataclasses
import fcntl
import hashlib
import json
import pathlib

from tools.faults.disks import mounts_below
from tools.faults.run import NUM_STEPS, Broken, Place, marked_pids
from train.balance.record import BalanceRecord
from train.checkpoint.record import DamagedCheckpointError, read_record
from train.logs.record_lines import kind_of, without_times


@dataclasses.dataclass(frozen=True)
class Result:
    """Results of a finished run."""

    digest: str
    arrays: dict[str, dict]
    """Dtype, shape and checksum of each array in the checkpoint of the last step."""
    balancer: dict[str, object]
    """Plan and state of the balancer in that checkpoint."""
    metrics: dict[tuple[int, str], dict]
    """Lines of metrics.jsonl without times, by step and kind."""
    samples: dict[tuple[int, int], str]
    """Id of the sample of each row of each step's batch."""


MAX_SHARE_ERROR = 1e-6


def read_result(run_dir: pathlib.Path) -> Result:
    """Return the result of a finished run. Raises Broken if a step or a row is there
    twice, or not at all."""
    summary = _read_summary(run_dir / "summary.json")
    checkpoint = _read_checkpoint(run_dir / "checkpoints")
    metrics: dict[tuple[int, str], dict] = {}
    for record in _read(run_dir / "metrics.jsonl"):
        key = record["step"], kind_of(record)
        if key in metrics:
            raise Broken(f"metrics.jsonl has two lines of {key}")
        if metrics and key[0] < next(reversed(metrics))[0]:
            raise Broken(f"metrics.jsonl has a line of {key} after a later step")
        metrics[key] = without_times(record)
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
    meta = checkpoint["meta"]
    balance = BalanceRecord.from_json(meta["balance"]).settled().to_json()
    balancer = {"plan": meta["plan"], "balance": balance}
    return Result(summary["digest"], checkpoint["arrays"], balancer, metrics, samples)


def expect_same(found: Result, expected: Result) -> None:
    """Raise Broken unless a run has the result of the undisturbed one."""
    for name in ("samples", "metrics", "arrays", "balancer"):
        a, b = getattr(found, name), getattr(expected, name)
        wrong = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
        if wrong:
            raise Broken(
                f"{name} differ from the undisturbed run's, first at {wrong[0]}"
            )
    if found.digest != expected.digest:
        raise Broken(f"digest {found.digest} instead of {expected.digest}")


def expect_nothing_left(
    place: Place, num_mounts: int = 0, *, may_leave_tmp: bool = False
) -> None:
    """Raise Broken if the run has left a process, a lock, a partial file, a file in
    TMPDIR, one beside the run directory, or a mount beside the `num_mounts` that were
    there before. A launcher that was killed cannot clear TMPDIR (`may_leave_tmp`)."""
    left = [str(x) for x in place.run_dir.rglob("*") if _is_partial(x)]
    left += [str(x) for x in place.disk.iterdir() if x != place.run_dir]
    if not may_leave_tmp:
        left += [str(x) for x in (place.root / "tmp").glob("*")]
    left += [f"process {pid}" for pid in marked_pids(place.root)]
    left += mounts_below(place.root)[num_mounts:]
    if left:
        raise Broken(f"left behind: {', '.join(left[:5])}")
    if not (place.run_dir / ".lock").is_file():
        raise Broken("the run directory has no lock")
    with (place.run_dir / ".lock").open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Broken("the lock of the run directory is still held") from None


def listing(place: Place) -> dict[str, str]:
    """Return the sha256 of every file in the folders that a run has nothing to write
    in; '' for a folder."""
    paths = [*place.root.iterdir(), place.speeds]
    paths += [path for folder in place.untouched() for path in folder.rglob("*")]
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else ""
        for path in paths
    }


def expect_untouched(before: dict[str, str], after: dict[str, str]) -> None:
    """Raise Broken if two listings differ."""
    if changed := sorted(before.items() ^ after.items()):
        raise Broken(f"touched outside of the run directory: {changed[0][0]}")


def _read_summary(path: pathlib.Path) -> dict:
    """Return a summary, or raise Broken if it has no digest, or no shares of the time
    that add up to 1."""
    try:
        summary = json.loads(path.read_text())
        share = summary["goodput"]["share"]
        is_good = isinstance(summary["digest"], str) and share["useful"] > 0
        is_whole = abs(sum(share.values()) - 1) < MAX_SHARE_ERROR
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Broken(f"{path.name} cannot be read: {error!r}") from error
    if not (is_good and is_whole):
        raise Broken(f"{path.name} has no digest, or shares of the time {share}")
    return summary


def _read_checkpoint(folder: pathlib.Path) -> dict:
    """Return the record of the last step's checkpoint, or raise Broken."""
    try:
        return read_record(folder, NUM_STEPS)
    except DamagedCheckpointError as error:
        raise Broken(f"the last checkpoint cannot be read: {error}") from error


def _read(path: pathlib.Path) -> list[dict]:
    """Return the objects of a file of JSON lines, or raise Broken for a bad line."""
    if not path.is_file():
        raise Broken(f"there is no {path.name}")
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
