"""Measure goodput: the share of a run's wall time that went into useful steps.

    RUN_DIR/goodput.jsonl      process 0: seconds of each bucket up to a step, over all
                               attempts; one line from time to time, and at each save

An *attempt* is one start of the program on a run directory. A resumed attempt goes on
from the last line of its checkpoint's step or of an earlier step. What earlier attempts
did after that line is lost, and counts as restarts. No line is ever removed, so steps
fall where an attempt goes on from a checkpoint. docs/metrics.md has a table of the
buckets. This module does not import jax.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator

from train.launch.processes import is_first
from train.logs.record_lines import MetricsLog, read_records

FILE = "goodput.jsonl"

BUCKETS = (
    "useful",
    "compile",
    "evaluation",
    "saves",
    "restarts",
    "swaps",
    "data",
    "profile",
    "other",
)  # fmt: skip
"""Names of the parts of a run's wall time, in the order in which they are printed."""

MAX_NUMBER = 1e15
"""Numbers of a line are smaller than this: it is 30 million years in seconds."""
MIN_LINE_SEC, MAX_LINE_SEC = 1.0, 60.0
"""Bounds on the seconds between two lines. The time from the last line of a killed
attempt to its end is not known, and counts as time without a process."""


@dataclasses.dataclass(frozen=True)
class Account:
    """Where the time of a run went up to a moment, over all attempts."""

    sec: dict[str, float]
    """Seconds of each bucket. Their sum is the time in which a process existed."""
    down_sec: float
    """Seconds between attempts, in which no process existed."""
    num_attempts: int


class Stopwatch:
    """A stopwatch that books each moment of an attempt to one bucket; use as a context.

    The bucket is that of the innermost block of `at`. Outside of all blocks it is
    "other"; before `end_start` it is "restarts" in all attempts but the first.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        step: int,
        begun_sec: float,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Go on after `step`, the last step that is done, from the lines of earlier
        attempts. This attempt began at `begun_sec`, a value of `monotonic`. Process 0
        reads and writes the file in `folder`; other processes have no file."""
        self._monotonic, self._now = monotonic, now
        self.begun_at = now() - (monotonic() - begun_sec)
        """Time in seconds since 1970 at which the attempt began."""
        self._mark_sec = self._line_sec = self._begun_sec = begun_sec
        self._log = MetricsLog(folder / FILE) if is_first() else None
        lines = read_lines(folder / FILE) if is_first() else []
        self._stack = ["restarts" if lines else "other"]
        self._spent = dict.fromkeys(BUCKETS, 0.0)
        self._is_open = True
        self._base = next_attempt(lines, step, self.begun_at)
        self.write(step)

    @property
    def attempt(self) -> int:
        """Number of the attempt, from 1."""
        return self._base.num_attempts

    def __enter__(self) -> "Stopwatch":
        return self

    def __exit__(self, *_) -> None:
        """Write the last line of the attempt. Time after it is booked nowhere, so that
        the summary has the same shares as the file."""
        self.write(self._step)
        self._is_open = False
        if self._log is not None:
            self._log.close()
            self._log = None

    def end_start(self) -> None:
        """Book what is outside of all blocks to "other" from now on, and write a
        line."""
        self.write(self._step)
        self._stack[0] = "other"

    @contextlib.contextmanager
    def at(
        self, bucket: str, unless: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Book the time of the block, without inner blocks, to `bucket`.

        If `unless` is given and returns true at the end of the block, the time stays
        with the bucket around the block.
        """
        self._book()
        self._stack.append(bucket)
        try:
            yield
        finally:
            if unless is not None and unless():
                self._stack[-1] = self._stack[-2]
            self._book()
            self._stack.pop()

    def tick(self, step: int) -> None:
        """Write a line after `step`, if the last one is older than a hundredth of the
        attempt, within MIN_LINE_SEC and MAX_LINE_SEC."""
        now_sec = self._monotonic()
        limit_sec = 0.01 * (now_sec - self._begun_sec)
        limit_sec = min(max(limit_sec, MIN_LINE_SEC), MAX_LINE_SEC)
        self._step = step
        if now_sec - self._line_sec >= limit_sec:
            self.write(step)

    def write(self, step: int) -> None:
        """Write a line: where the time went up to now, when `step` is done."""
        self._step, self._line_sec = step, self._monotonic()
        if self._log is None:
            return
        account = self.account()
        sec = {name: round(sec, 3) for name, sec in account.sec.items()}
        record = {"step": step, "attempt": account.num_attempts, "at": self._now()}
        self._log.append(record | {"down_sec": account.down_sec, "sec": sec})

    def account(self) -> Account:
        """Return where the time of the run went up to now."""
        self._book()
        base = self._base.sec
        sec = {name: base[name] + self._spent[name] for name in BUCKETS}
        return dataclasses.replace(self._base, sec=sec)

    def _book(self) -> None:
        """Add the time since the last call to the bucket of the innermost block."""
        if not self._is_open:
            return
        now_sec = self._monotonic()
        self._spent[self._stack[-1]] += now_sec - self._mark_sec
        self._mark_sec = now_sec


def next_attempt(lines: list[dict], step: int, begun_at: float) -> Account:
    """Return the account with which an attempt begins that resumes at `step`.

    `lines` are those of earlier attempts, oldest first, and `begun_at` is the time in
    seconds since 1970 at which the attempt began.
    """
    if not lines:
        return Account(dict.fromkeys(BUCKETS, 0.0), 0.0, 1)
    last = lines[-1]
    kept = next((x for x in reversed(lines) if x["step"] <= step), {"sec": {}})
    sec = {name: kept["sec"].get(name, 0.0) for name in BUCKETS}
    sec["restarts"] += sum(last["sec"].values()) - sum(sec.values())
    down_sec = last["down_sec"] + max(0.0, begun_at - last["at"])
    return Account(sec, down_sec, last["attempt"] + 1)


def read_lines(path: pathlib.Path) -> list[dict]:
    """Return the lines of a goodput file, without those that are damaged."""
    return [record for record in read_records(path) if is_account(record)]


def is_account(record: dict) -> bool:
    """Return whether a line has all fields, with numbers in them."""
    if not isinstance(record.get("sec"), dict):
        return False
    numbers = [record.get(name) for name in ("step", "attempt", "at", "down_sec")]
    numbers += record["sec"].values()
    return all(type(x) in (int, float) and abs(x) < MAX_NUMBER for x in numbers)


def report(account: Account) -> dict:
    """Return the account as the summary of a run has it: shares of the wall time that
    add up to 1, and seconds."""
    wall_sec = sum(account.sec.values())
    return {
        "share": {name: sec / wall_sec for name, sec in account.sec.items()},
        "wall_sec": wall_sec,
        "down_sec": account.down_sec,
        "num_attempts": account.num_attempts,
    }


def goodput_lines(record: dict) -> list[str]:
    """Return the lines of the printed summary about a record of `report`."""
    share, number = record["share"], record["num_attempts"]
    wall_sec, down_sec = record["wall_sec"], record["down_sec"]
    head = f"goodput         {share['useful']:.1%} of {wall_sec:.0f} s in useful steps"
    if number > 1:
        head += f"; {number} attempts, {down_sec:.0f} s between them not counted"
    rest = [
        f"{name} {share[name]:.1%}"
        for name in sorted(BUCKETS[1:], key=share.get, reverse=True)
        if share[name] >= 0.0005
    ]
    return [head, f"not useful      {', '.join(rest)}"]
