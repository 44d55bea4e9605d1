"""Compare a disturbed run with the undisturbed one, and find what it leaves behind.

Whatever happened on its way, a run ends with the parameters, all other arrays of the
last checkpoint, the metrics and the sample ids of an undisturbed run with the same
number of processes, and it leaves nothing behind.
"""

import dataclasses
import fcntl
import hashlib
import json
import pathlib
import random

from moejax.perf.calibration import Calibration
from tools.faults.run import NUM_STEPS, Broken, Place, Run, marked_pids, mounts_below
from train.balance.record import BalanceRecord
from train.checkpoint.record import DamagedCheckpointError, read_record
from train.data.prepared import prepare
from train.data.tokenizer import load_tokenizer
from train.logs.record_lines import kind_of, without_times

NUM_DOCUMENTS, NUM_WORDS = 60, 200
LETTERS = "etaoinshrdlu"
MESH = {"dc": 1, "data": 2, "expert": 4, "tensor": 1}


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


@dataclasses.dataclass(frozen=True)
class Workshop:
    """The folder of all runs of one call of chaos, and what they share."""

    root: pathlib.Path

    def furnish(self) -> None:
        """Write two corpora and a calibration. Raises FileExistsError if the folder has
        been used before."""
        for seed, name in enumerate(("shards", "other")):
            text = self.root / f"{name}.jsonl"
            with text.open("x") as file:
                file.writelines(_documents(random.Random(seed)))
            prepare([text], self.root / name, load_tokenizer("bytes"))
        speeds = self.root / "speeds.json"
        speeds.write_text(imaginary_speeds(MESH).to_json())
        (self.root / "programs").mkdir()

    def new_run(self, name: str, num_processes: int, pace_sec: float = 0.0) -> Run:
        """Return a run in new folders."""
        place = Place(self.root / name)
        place.make()
        return Run(place, num_processes, pace_sec)

    def undisturbed(self, num_processes: int) -> Result:
        """Run without faults, and return the result. Raises Broken if that fails."""
        run = self.new_run(f"undisturbed-{num_processes}", num_processes)
        try:
            run.start()
            run.expect_end(0)
        finally:
            run.close()
        expect_nothing_left(run.place)
        return read_result(run.place.run_dir)


def read_result(run_dir: pathlib.Path) -> Result:
    """Return the result of a finished run. Raises Broken if a step or a row is there
    twice, or not at all, and if a file cannot be read."""
    try:
        checkpoint = read_record(run_dir / "checkpoints", NUM_STEPS)
        summary = json.loads((run_dir / "summary.json").read_text())
        digest, shares = summary["digest"], summary["goodput"]["share"]
        records = _read(run_dir / "metrics.jsonl")
        fed = [
            r for path in sorted(run_dir.glob("samples-*.jsonl")) for r in _read(path)
        ]
    except (
        DamagedCheckpointError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
    ) as error:
        raise Broken(f"what the run has written cannot be read: {error!r}") from error
    if not (shares["useful"] > 0 and abs(sum(shares.values()) - 1) < 1e-6):
        raise Broken(f"summary.json has shares of the time {shares}")
    metrics: dict[tuple[int, str], dict] = {}
    for record in records:
        key = record["step"], kind_of(record)
        if key in metrics:
            raise Broken(f"metrics.jsonl has two lines of {key}")
        if metrics and key[0] < next(reversed(metrics))[0]:
            raise Broken(f"metrics.jsonl has a line of {key} after a later step")
        metrics[key] = without_times(record)
    samples: dict[tuple[int, int], str] = {}
    for record in fed:
        for row, name in zip(record["rows"], record["ids"], strict=True):
            if (record["step"], row) in samples:
                raise Broken(f"row {row} of step {record['step']} was fed twice")
            samples[record["step"], row] = name
    for what, steps in (
        ("metrics", {step for step, kind in metrics if kind == "loss"}),
        ("samples", {step for step, _ in samples}),
    ):
        if wrong := sorted(set(range(1, NUM_STEPS + 1)) ^ steps):
            raise Broken(f"{what}: lines of the steps {wrong} are missing, or extra")
    meta = checkpoint["meta"]
    balance = meta["balance"]  # None without a balancer
    if balance is not None:
        balance = BalanceRecord.from_json(balance).settled().to_json()
    balancer = {"plan": meta["plan"], "balance": balance}
    return Result(digest, checkpoint["arrays"], balancer, metrics, samples)


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


def expect_nothing_left(place: Place) -> None:
    """Raise Broken if the run has left a process, a lock, a partial file, a file in
    TMPDIR, one beside the run directory, or a mount beside its small disk."""
    left = [str(x) for x in place.run_dir.rglob("*") if _is_partial(x)]
    left += [str(x) for x in place.disk.iterdir() if x != place.run_dir]
    left += [str(x) for x in (place.root / "tmp").glob("*")]
    left += [f"process {pid}" for pid in marked_pids(place.root)]
    left += [x for x in mounts_below(place.root) if x != str(place.disk)]
    if left:
        raise Broken(f"left behind: {', '.join(left[:5])}")
    with (place.run_dir / ".lock").open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Broken("the lock of the run directory is still held") from None


def listing(place: Place) -> dict[str, str]:
    """Return the sha256 of every file in the folders that a run has nothing to write
    in; '' for a folder."""
    paths = [*place.root.iterdir(), place.shared / "speeds.json"]
    paths += [path for folder in place.untouched() for path in folder.rglob("*")]
    return {str(path): sha256(path) if path.is_file() else "" for path in paths}


def expect_untouched(before: dict[str, str], after: dict[str, str]) -> None:
    """Raise Broken if two listings differ."""
    if changed := sorted(before.items() ^ after.items()):
        raise Broken(f"touched outside of the run directory: {changed[0][0]}")


def imaginary_speeds(mesh: dict[str, int]) -> Calibration:
    """Return the speeds of an imaginary machine, at which a relayout pays. `mesh` is
    the number of devices along each axis."""
    line = {"latency_sec": 0.01, "bytes_per_sec": 1e12, "r2": 1.0}
    return Calibration(
        device_kind="cpu",
        mesh=mesh,
        compute_dtype="float32",
        collectives={"all_to_all": {"expert": line}, "all_gather": {"data": line}},
        flops_per_sec=1e6,
        matmul_r2=1.0,
        compile_sec=0.0,
        when="never",
    )


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _documents(rng: random.Random):
    """Yield lines of JSON with texts of random words."""
    words = ["".join(rng.choices(LETTERS, k=1 + i % 8)) for i in range(300)]
    for _ in range(NUM_DOCUMENTS):
        yield json.dumps({"text": " ".join(rng.choices(words, k=NUM_WORDS))}) + "\n"


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
