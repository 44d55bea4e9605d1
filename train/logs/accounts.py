"""Accounts of where a run's wall time went, and the lines of goodput.jsonl with them.

docs/metrics.md has a table of the buckets. This module does not import jax.
"""

import dataclasses
import pathlib

from train.logs.record_lines import read_records

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


@dataclasses.dataclass(frozen=True)
class Account:
    """Where the time of a run went up to a moment, over all attempts."""

    sec: dict[str, float]
    """Seconds of each bucket. Their sum is the time in which a process existed."""
    down_sec: float
    """Seconds between attempts, in which no process existed."""
    num_attempts: int


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
