"""The record of a bring-up, OUT/stages.jsonl: one JSON object a line.

    {"stage": "numerics", "state": "begun", "key": {..}, "when": ..}
    {"stage": "numerics", "state": "passed", "sec": 93.1, "why": "..", "figures": {..},
     "key": {..}, "when": ..}

A line is on the disk before the next stage begins. A stage whose last line is "begun"
was cut off. Lines of another key (commit, device, versions) do not count.
"""

import dataclasses
import datetime
import json
import os
import pathlib
from typing import Any

STATES = ("passed", "failed", "quarantined", "not_here")
ENDED = ("passed", "quarantined", "not_here")
"""States of a stage that the next call does not run again."""
BEGUN = "begun"


@dataclasses.dataclass
class Past:
    """Past of one stage, by the record."""

    ended: dict | None = None
    """The last line with a state of STATES, or None."""
    num_cut_off: int = 0
    """Number of times in a row that the stage has begun since, and not ended."""

    @property
    def is_over(self) -> bool:
        """Whether the next call need not run the stage again."""
        return self.ended is not None and self.ended["state"] in ENDED


def append(path: pathlib.Path, line: dict[str, Any]) -> None:
    """Append an object with the present time, and return when it is on the disk.

    If a crash has cut the last line, the object begins on a line of its own. Raises
    OSError.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    text = json.dumps(line | {"when": now}) + "\n"
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: pathlib.Path, key: dict[str, Any]) -> dict[str, Past]:
    """Return what the record says of each stage under a key. Lines that are damaged
    count as absent."""
    past: dict[str, Past] = {}
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for text in lines:
        try:
            line = json.loads(text)
            name, state = line["stage"], line["state"]
            is_ours = line["key"] == key and state in (BEGUN, *STATES)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if not is_ours:
            continue
        own = past.setdefault(name, Past())
        if state == BEGUN:
            own.num_cut_off += 1
        else:
            own.ended, own.num_cut_off = line, 0
    return past
