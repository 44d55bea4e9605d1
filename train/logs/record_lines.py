"""Files with one JSON object a line, each with an int `step`: read, cut and append.

A kill or a lost power supply can tear the last line. The next writer of the file cuts
it off. Readers leave out lines that are damaged. Both say so.
"""

import contextlib
import io
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np

from train.files import path_named
from train.launch.program import say_loudly

LOADS = "loads.jsonl"
"""File of the loads of experts by source device, with Train.log_sources."""
MAX_STEP = 2**53
"""Steps are smaller: JSON's readers in browsers have no larger whole numbers."""
BLOCK_BYTES = 2**16
"""Bytes that are read at once where the end of a file is looked at."""

TIMED = (
    "tok_per_sec", "step_msec", "mfu", "adopt_msec", "adopt_wait_msec",
    "plan_wait_msec", "host_memory_gib", "device_memory_gib", "peak_device_memory_gib",
)  # fmt: skip
"""Fields of a line of metrics that depend on the time that steps take, or on the memory
that the process has."""


def read_records(
    path: pathlib.Path, *, say: Callable[[str], None] = say_loudly
) -> Iterator[dict]:
    """Yield the objects of a file in order; none if there is no such file. Damaged
    lines are left out, and `say` is told of them at the end."""
    if not path.is_file():
        return
    damaged = []
    with path_named(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if (record := parse_line(line)) is not None:
                yield record
            else:
                damaged.append(number)
    if damaged:
        say(
            f"LINES LEFT OUT: {len(damaged)} of {path} are torn or damaged; the first "
            f"is line {damaged[0]}"
        )


def parse_line(line: bytes) -> dict | None:
    """Return the object of a line; None if the line is damaged: it is no JSON object,
    as one that is torn, or has no step."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < MAX_STEP else None


def without_times(record: dict) -> dict:
    """Return a record without the fields that differ between two equal runs."""
    return {name: value for name, value in record.items() if name not in TIMED}


def kind_of(record: dict) -> str:
    """Return the kind of a line of metrics, by the field that tells it: a step has a
    'loss', an evaluation an 'eval_loss', the balancer's line a 'decision'; or ''."""
    kinds = ("loss", "eval_loss", "decision")
    return next((kind for kind in kinds if kind in record), "")


class MetricsLog:
    """A file to which objects are appended; use as a context.

    When `append` returns, the whole line has been handed to the operating system. A
    full disk costs lines, with a message on standard error, but does not end the run.
    """

    def __init__(
        self, path: str | os.PathLike, *, say: Callable[[str], None] = say_loudly
    ) -> None:
        """Open the file, and cut off a last line that is torn."""
        self._path, self._say = pathlib.Path(path), say
        self._num_lost = 0
        self._last: dict = {}
        self._file = io.FileIO(self._path, "ab+")
        with path_named(self._path):
            self._cut_torn_line()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def cut_back(self, step: int) -> None:
        """Cut off the lines after `step`, the last step that is done. Damaged lines
        before stay."""
        end = 0
        with path_named(self._path), self._path.open("rb") as file:
            for line in file:
                record = parse_line(line)
                if record is not None and record["step"] > step:
                    break
                self._last = record or self._last
                end += len(line)
            if end != os.fstat(file.fileno()).st_size:
                self._file.truncate(end)
                os.fsync(self._file.fileno())

    def ends_with(self, step: int, name: str) -> bool:
        """Return whether the file's last line is a record of this step with a field
        `name`."""
        return self._last.get("step") == step and name in self._last

    def append(self, record: dict) -> None:
        """Write one line. NaN and infinities become null, and NumPy values plain
        numbers and lists."""
        assert isinstance(record["step"], int), record
        line = json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError("no space left for a whole line")
        except OSError as fault:
            if os.fstat(self._file.fileno()).st_size != end:
                with path_named(self._path):
                    self._file.truncate(end)
            self._num_lost += 1
            if self._num_lost == 1:
                self._say(
                    f"METRICS NOT WRITTEN from step {record['step']} on: {fault}: "
                    f"{self._path}; training goes on, and the lines are lost"
                )
        else:
            self._last = record
            if self._num_lost:
                self._say(f"metrics are written again, without {self._num_lost} lines")
            self._num_lost = 0

    def close(self) -> None:
        """Return when the lines are on the disk, or a message says that they may be
        lost."""
        if self._file.closed:
            return
        with contextlib.closing(self._file):
            try:
                os.fsync(self._file.fileno())
            except OSError as fault:
                self._say(f"METRICS MAY BE LOST: {fault}: {self._path}")

    def _cut_torn_line(self) -> None:
        """Cut the file off after its last newline."""
        descriptor = self._file.fileno()
        size = end = os.fstat(descriptor).st_size
        while end:
            begin = max(end - BLOCK_BYTES, 0)
            newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end != size:
            self._file.truncate(end)
            self._say(f"the last line of {self._path} was torn, and is cut off")


def _plain(value):
    """Return a value that JSON can express: NaN and infinities become None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
