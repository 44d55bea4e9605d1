"""Run train/main.py in processes of their own, on the toy configuration, and with the
transfers that a GPU refuses (main_as_on_gpu.py)."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

from tests.support import xla_flags
from train.logs.record_lines import without_times

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAIN = ROOT / "train" / "main.py"
MAIN_AS_ON_GPU = ROOT / "tests" / "support" / "main_as_on_gpu.py"
TOY = ROOT / "tests" / "support" / "toy.gin"
LIMIT_SEC = 300


@dataclasses.dataclass(frozen=True)
class Ended:
    """Exit code and printed text of a process; the code is None while it runs."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict:
        """The JSON object on the last line."""
        return json.loads(self.out.splitlines()[-1], parse_constant=_refuse_constant)


class Live:
    """A process of train/main.py that is running.

    It is a context manager, and kills the process at the end of the block.
    """

    def __init__(self, run_dir: pathlib.Path, *params: str, flags=(), gin_file=TOY):
        self.start(run_dir, command(run_dir, *params, flags=flags, gin_file=gin_file))

    def start(self, run_dir: pathlib.Path, words: list[str]) -> None:
        """Start a command whose output goes to temporary files."""
        self.run_dir = run_dir
        self._files = tempfile.TemporaryDirectory(prefix="run-")
        self._out, self._err = (pathlib.Path(self._files.name, x) for x in "oe")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                words, env=environment(), stdout=out, stderr=err
            )

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        self._files.cleanup()

    def wait_until(self, is_so, what: str) -> None:
        """Wait until is_so() is true. Raises AssertionError if the run ends first or
        after LIMIT_SEC."""
        end_sec = time.monotonic() + LIMIT_SEC
        while not is_so():
            code = self.process.poll()
            assert code is None, f"ended with {code} before {what}: {self.read()}"
            assert time.monotonic() < end_sec, f"never saw {what}: {self.read()}"
            time.sleep(0.002)

    def wait_for_text(self, text: str, count: int = 1) -> None:
        """Wait until the process has printed `text` `count` times."""
        self.wait_until(lambda: self.read().out.count(text) >= count, repr(text))

    def wait_for_steps(self, count: int) -> None:
        """Wait until this process has logged `count` lines of metrics.

        A resumed run cuts old lines before it prints "compiled for", so that the lines
        there at that time are not of this process.
        """
        self.wait_for_text("compiled for")
        log = self.run_dir / "metrics.jsonl"
        goal = log.read_bytes().count(b"\n") + count
        self.wait_until(lambda: log.read_bytes().count(b"\n") >= goal, f"line {goal}")

    def wait_for_save(self) -> None:
        """Wait until the process is writing a checkpoint."""
        self.wait_for_text("compiled for")
        folder = self.run_dir / "checkpoints"
        self.wait_until(lambda: any(folder.glob("*.orbax-checkpoint-tmp")), "a save")

    def end(self, number: int | None = None) -> Ended:
        """Send the signal if one is given, and wait for the end of the process."""
        if number is not None:
            self.process.send_signal(number)
        self.process.wait(LIMIT_SEC)
        return self.read()

    def read(self) -> Ended:
        """Return the text that the process has printed so far."""
        out, err = self._out.read_text(), self._err.read_text()
        return Ended(self.process.returncode, out, err)


def run(run_dir: pathlib.Path, *params: str, flags=(), gin_file=TOY) -> Ended:
    """Run train/main.py to its end."""
    with Live(run_dir, *params, flags=flags, gin_file=gin_file) as live:
        return live.end()


def command(run_dir, *params: str, flags=(), gin_file=TOY) -> list[str]:
    """Return the command line of train/main.py; `params` override the gin file."""
    words = [sys.executable, str(MAIN_AS_ON_GPU), f"--gin_file={gin_file}", "--json"]
    words += [*flags, f"--run_dir={run_dir}"]
    for param in (f"Data.corpus = '{corpus()}'", *params):
        words.append(f"--gin_param={param}")
    return words


def environment() -> dict[str, str]:
    """Return this process's environment without the devices that conftest simulates."""
    flags = " ".join(xla_flags.QUICK)
    own = {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "XLA_FLAGS": flags}
    return dict(os.environ) | own


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="corpus-")


@functools.cache
def corpus(seed: int = 0, num_words: int = 10_000) -> pathlib.Path:
    """Return the path of a text of random words, written once for each seed and
    size."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=1 + i % 8)) for i in range(300)]
    path = pathlib.Path(_folder().name) / f"words-{seed}-{num_words}.txt"
    path.write_text(" ".join(rng.choices(words, k=num_words)))
    return path


def metric_lines(run_dir: pathlib.Path) -> list[dict]:
    """Return the records of metrics.jsonl without the metrics that depend on time."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=_refuse_constant) for line in lines]
    return [without_times(record) for record in records]


def checkpoint_record(run_dir: pathlib.Path, step: int) -> dict:
    """Return the record of the checkpoint of a step: its meta data, and a checksum for
    each array."""
    path = run_dir / "checkpoints" / str(step) / "record" / "metadata"
    return json.loads(path.read_text())


def listing(folder: pathlib.Path) -> dict[str, str]:
    """Return the sha256 of every file below `folder`, by name.

    The content of directories and of lock files is not read.
    """
    hashes = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        text = path.read_bytes() if path.is_file() and path.name != ".lock" else b""
        hashes[name] = hashlib.sha256(text).hexdigest()
    return hashes


def _refuse_constant(constant: str):
    """Raise ValueError: NaN and infinities are not JSON."""
    raise ValueError(f"{constant} is not JSON")
