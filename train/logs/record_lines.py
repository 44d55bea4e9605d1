"""Files with one JSON object a line: read them, and set damaged lines aside.

Each object has an int `step`, and steps do not fall from line to line. A line that
breaks this rule is damaged: a bad sector or an editor changed it, or a crash of the
machine left zeros. The lines after it are as good as before.
"""

import array
import bisect
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from train.files import path_named, replace

MAX_LINE_BYTES = 2**23
"""Longest line that is parsed; it bounds the memory of a reader. The loads of 128
layers with 4096 experts take 4 MB."""
MAX_NAMED = 5
"""Number of damaged lines that a message names, at most."""
MAX_STEP = 2**53
DAMAGED_SUFFIX = ".damaged"
"""Suffix of the file to which the damaged lines of another file are moved."""

TIMED = (
    "tok_per_sec", "step_msec", "mfu", "adopt_msec", "adopt_wait_msec",
    "plan_wait_msec", "host_memory_gib", "device_memory_gib", "peak_device_memory_gib",
)  # fmt: skip
"""Fields of a line of metrics that depend on the time that steps take, or on the memory
that the process has."""

_DAMAGED, _LATER, _KEPT = 0, 1, 2
_LINE_SIZE = 2**32
"""Size of a line in a sequence; a step that is not in the sequence yet adds 1."""


def read_records(path: pathlib.Path) -> Iterator[dict]:
    """Yield the objects of a file in order, without damaged lines; none if there is no
    such file. The steps may be out of order."""
    if not path.is_file():
        return
    with path_named(path), path.open("rb") as file:
        for line in lines(file):
            record = parse_line(line)
            if isinstance(record, dict):
                yield record


def without_times(record: dict) -> dict:
    """Return a record without the fields that differ between two equal runs."""
    return {name: value for name, value in record.items() if name not in TIMED}


def kind_of(record: dict) -> str:
    """Return the kind of a line of metrics, by the field that tells it: a step has a
    'loss', an evaluation an 'eval_loss', the balancer's line a 'decision'; or ''."""
    kinds = ("loss", "eval_loss", "decision")
    return next((kind for kind in kinds if kind in record), "")


def lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, one that is too long in pieces of MAX_LINE_BYTES."""
    return iter(lambda: file.readline(MAX_LINE_BYTES), b"")


def parse_line(line: bytes) -> dict | str:
    """Return the object of a line, or what is wrong with the line."""
    if len(line) >= MAX_LINE_BYTES:
        return "too long"
    if b"\0" in line:
        return "it holds NUL bytes"
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(record, dict):
        return "not an object"
    step = record.get("step")
    return record if type(step) is int and 0 <= step < MAX_STEP else "no step"


def cut_back(path: pathlib.Path, step: int, say: Callable[[str], None]) -> dict:
    """Remove the lines after `step`, the last step that is done, and a torn last line;
    return the last object that stays, or {}.

    Damaged lines are appended to <path>.damaged and removed. The file is replaced in
    one atomic operation. Where there is no room for that, damaged lines stay where they
    are. `say` gets one line about each of the three.
    """
    with path_named(path):
        return _cut_back(path, step, say)


def _cut_back(path: pathlib.Path, step: int, say: Callable[[str], None]) -> dict:
    """Do the work of `cut_back`. Errors of reads and writes do not name the file."""
    survey = _survey(path)
    survey.mark_later(step)
    if survey.torn_bytes:
        say(
            f"METRICS CUT: the last line of {path} was torn after {survey.torn_bytes} "
            "bytes, and is removed"
        )
    if survey.num_damaged:
        named = [f"line {n}: {why}" for n, why in sorted(survey.faults.items())]
        more = survey.num_damaged - len(named)
        text = "; ".join(named) + (f"; and {more} more" if more else "")
        aside = path.with_name(path.name + DAMAGED_SUFFIX)
        try:
            _set_aside(path, aside, survey.marks)
            say(
                f"METRICS DAMAGED: {survey.num_damaged} lines of {path} are moved to "
                f"{aside.name}, and all others stay ({text})"
            )
            return _last_record(path)
        except OSError as fault:
            say(
                f"METRICS DAMAGED: {survey.num_damaged} lines of {path} stay in it, "
                f"since they cannot be moved to {aside.name}: {fault} ({text})"
            )
    _truncate(path, survey.marks)
    return _last_record(path)


@dataclasses.dataclass
class _Survey:
    """The lines of a file: a mark for each, and the steps of the good ones.

    A line takes 1 byte, and a good one 8 bytes more; 41 bytes while the longest
    sequence of a file with steps out of order is found.
    """

    marks: bytearray
    steps: array.array
    faults: dict[int, str]
    """What is wrong with the first damaged lines, by line number from 1."""
    num_damaged: int = 0
    torn_bytes: int = 0
    """Length of a last line without an end."""

    def damage(self, line: int, fault: str) -> None:
        """Note that a line, counted from 0, is damaged."""
        self.marks[line] = _DAMAGED
        self.num_damaged += 1
        if len(self.faults) < MAX_NAMED:
            self.faults[line + 1] = fault

    def mark_later(self, last_step: int) -> None:
        """Mark the good lines after `last_step`."""
        index = 0
        for line, mark in enumerate(self.marks):
            if mark == _KEPT:
                if self.steps[index] > last_step:
                    self.marks[line] = _LATER
                index += 1


def _survey(path: pathlib.Path) -> _Survey:
    """Return the good and the damaged lines of a file.

    Lines whose steps are out of order count as damaged: those that are not in the
    longest sequence in order.
    """
    survey = _Survey(bytearray(), array.array("q"), {})
    with path.open("rb") as file:
        for line in lines(file):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                survey.torn_bytes = len(line)
                break
            survey.marks.append(_KEPT)
            record = parse_line(line)
            if isinstance(record, dict):
                survey.steps.append(record["step"])
            else:
                survey.damage(len(survey.marks) - 1, record)
    in_order = _longest_in_order(survey.steps)
    if not all(in_order):
        kept, index = array.array("q"), 0
        for line, mark in enumerate(survey.marks):
            if mark != _KEPT:
                continue
            step = survey.steps[index]
            if in_order[index]:
                kept.append(step)
            else:
                survey.damage(line, f"step {step} is out of order")
            index += 1
        survey.steps = kept
    return survey


def _longest_in_order(steps: array.array) -> bytearray:
    """Return a 1 for each line of a longest sequence in order, and 0 for others.

    Steps in order do not fall. Of two sequences with as many lines, the one with more
    different steps is longer, since a wrong step often repeats one of the other lines.

    `ends` holds steps with which a sequence can end, in rising order. The sequence to a
    later one of them is longer (`sizes`); `last` is the index of its last line.

    >>> list(_longest_in_order(array.array("q", [1, 2, 92, 4, 4])))
    [1, 1, 0, 1, 1]
    """
    if all(a <= b for a, b in itertools.pairwise(steps)):
        return bytearray(b"\1") * len(steps)
    ends, sizes, last = array.array("q"), array.array("q"), array.array("q")
    previous = array.array("q")
    for line, step in enumerate(steps):
        first = bisect.bisect_left(ends, step)
        stop = bisect.bisect_right(ends, step, first)
        previous.append(last[stop - 1] if stop else -1)
        size = _LINE_SIZE + (first == stop) + (sizes[stop - 1] if stop else 0)
        while stop < len(ends) and sizes[stop] <= size:
            stop += 1
        ends[first:stop] = array.array("q", [step])
        sizes[first:stop] = array.array("q", [size])
        last[first:stop] = array.array("q", [line])
    is_kept = bytearray(len(steps))
    line = last[-1]
    while line >= 0:
        is_kept[line] = 1
        line = previous[line]
    return is_kept


def _set_aside(path: pathlib.Path, aside: pathlib.Path, marks: bytearray) -> None:
    """Append the damaged lines of a file to `aside`, and replace the file by the lines
    that are kept. The damaged ones are on the disk first."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with (
            path.open("rb") as file,
            path_named(aside),
            aside.open("ab") as damaged,
            partial.open("wb") as kept,
        ):
            for line, mark in zip(lines(file), marks):  # without a torn last line
                if mark == _KEPT:
                    kept.write(line)
                elif mark == _DAMAGED:
                    damaged.write(line)
            for written in (damaged, kept):
                written.flush()
                os.fsync(written.fileno())
        replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _truncate(path: pathlib.Path, marks: bytearray) -> None:
    """Cut off a file at the first line that is marked as a later one, or before a torn
    last line."""
    end = 0
    with path.open("rb+") as file:
        for line, mark in zip(lines(file), marks):
            if mark == _LATER:
                break
            end += len(line)
        if end != file.seek(0, os.SEEK_END):
            file.truncate(end)
            os.fsync(file.fileno())


def _last_record(path: pathlib.Path) -> dict:
    """Return the object of the last line, or {} where that has none."""
    last = b""
    with path.open("rb") as file:
        for line in lines(file):
            last = line
    record = parse_line(last)
    return record if isinstance(record, dict) else {}
