"""Whole runs of train/main.py in processes of their own, on the toy configuration."""

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

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAIN = ROOT / "train" / "main.py"
TOY = ROOT / "tests" / "support" / "toy.gin"
LIMIT_SEC = 300
OF_THE_CLOCK = ("tok_per_sec", "step_msec", "mfu", "adopt_msec", "adopt_wait_msec")


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict:
        """The JSON object on the last line."""
        return json.loads(self.out.splitlines()[-1], parse_constant=_no_json)


class Live:
    """A run that goes on; it is killed when the block that uses it ends."""

    def __init__(self, run_dir: pathlib.Path, *params: str, flags=(), gin_file=TOY):
        self.start(run_dir, command(run_dir, *params, flags=flags, gin_file=gin_file))

    def start(self, run_dir: pathlib.Path, words: list[str]) -> None:
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
        """Returns soon after is_so() has become true; fails when the run has ended."""
        end_sec = time.monotonic() + LIMIT_SEC
        while not is_so():
            code = self.process.poll()
            assert code is None, f"ended with {code} before {what}: {self.read()}"
            assert time.monotonic() < end_sec, f"never saw {what}: {self.read()}"
            time.sleep(0.002)

    def wait_for_text(self, text: str, count: int = 1) -> None:
        self.wait_until(lambda: self.read().out.count(text) >= count, repr(text))

    def wait_for_steps(self, count: int) -> None:
        """Until this process has logged `count` lines; what was there is cut before."""
        self.wait_for_text("compiled for")
        log = self.run_dir / "metrics.jsonl"
        goal = log.read_bytes().count(b"\n") + count
        self.wait_until(lambda: log.read_bytes().count(b"\n") >= goal, f"line {goal}")

    def wait_for_save(self) -> None:
        """Until a save is under way."""
        self.wait_for_text("compiled for")
        folder = self.run_dir / "checkpoints"
        self.wait_until(lambda: any(folder.glob("*.orbax-checkpoint-tmp")), "a save")

    def end(self, number: int | None = None) -> Ended:
        """Sends the signal, if one is given, and waits for the end."""
        if number is not None:
            self.process.send_signal(number)
        self.process.wait(LIMIT_SEC)
        return self.read()

    def read(self) -> Ended:
        """What it has printed so far."""
        out, err = self._out.read_text(), self._err.read_text()
        return Ended(self.process.returncode, out, err)


def run(run_dir: pathlib.Path, *params: str, flags=(), gin_file=TOY) -> Ended:
    with Live(run_dir, *params, flags=flags, gin_file=gin_file) as live:
        return live.end()


def command(run_dir, *params: str, flags=(), gin_file=TOY) -> list[str]:
    """`params` replace the toy configuration's values."""
    words = [sys.executable, str(MAIN), f"--gin_file={gin_file}", "--json", *flags]
    words.append(f"--run_dir={run_dir}")
    for param in (f"Data.corpus = '{corpus()}'", *params):
        words.append(f"--gin_param={param}")
    return words


def environment() -> dict[str, str]:
    """Ours, without the devices that conftest simulates in this process."""
    rest = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    return rest | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="corpus-")


@functools.cache
def corpus(seed: int = 0, num_words: int = 10_000) -> pathlib.Path:
    """A text of words of its own."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=1 + i % 8)) for i in range(300)]
    path = pathlib.Path(_folder().name) / f"words-{seed}-{num_words}.txt"
    path.write_text(" ".join(rng.choices(words, k=num_words)))
    return path


def metric_lines(run_dir: pathlib.Path) -> list[dict]:
    """metrics.jsonl, without what the clock said."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=_no_json) for line in lines]
    return [
        {name: value for name, value in record.items() if name not in OF_THE_CLOCK}
        for record in records
    ]


def checkpoint_record(run_dir: pathlib.Path, step: int) -> dict:
    """What checkpoint `step` says of itself: meta, and a checksum for each array."""
    path = run_dir / "checkpoints" / str(step) / "record" / "metadata"
    return json.loads(path.read_text())


def listing(folder: pathlib.Path) -> dict[str, str]:
    """sha256 of every file below `folder`; a lock file is there or not."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        text = path.read_bytes() if path.is_file() and path.name != ".lock" else b""
        found[name] = hashlib.sha256(text).hexdigest()
    return found


def _no_json(constant: str):
    raise ValueError(f"{constant} is no JSON")
