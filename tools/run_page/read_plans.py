"""Read the lines of plans.jsonl: which expert each slot holds, and bytes by collective.

docs/metrics.md says what a line holds.
"""

import dataclasses

import numpy as np

from tools.run_page.plain import encoded, left_out, plain
from tools.run_page.thin import Thinned
from train.logs.record_lines import parse_line

MAX_BYTES_LINES = 200
FIELDS = ("kind", "digest", "store")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan that was in use from a step on."""

    record: dict
    """Fields of its line that the page's data has, without the table."""
    slot_to_expert_lp: np.ndarray


class Plans:
    """What the lines of a run's plans.jsonl say, line by line."""

    def __init__(self, budget: int) -> None:
        """Keep plans whose tables take up to `budget` bytes."""
        self.num_bad = 0
        self._plan: Plan | None = None
        self._plans = Thinned(budget, lambda plan: plan.slot_to_expert_lp.nbytes)
        self._bytes = Thinned(MAX_BYTES_LINES)

    def take(self, line: bytes) -> None:
        """Take the next line of the file."""
        record = parse_line(line)
        try:
            if not isinstance(record, dict):
                raise ValueError(record)
            plan = _plan(record, self._plan)
        except (LookupError, TypeError, ValueError, OverflowError):
            self.num_bad += 1
            return
        self._plan = plan
        self._plans.take(lambda: plan)
        by_name = record.get("bytes")
        if isinstance(by_name, dict):
            line_bytes = {"step": record["step"], "by": plain(by_name)}
            self._bytes.take(lambda: line_bytes)

    def data(self) -> dict:
        """Return the parts of the page's data that come from plans.jsonl."""
        return {
            "plans": [
                plan.record | {"slots_b64": encoded(plan.slot_to_expert_lp, "<i2")}
                for plan in self._plans.items()
            ],
            "bytes": self._bytes.items(),
        }

    def notes(self) -> list[str]:
        """Return a line about each thing that was left out."""
        notes = []
        if self.num_bad:
            notes.append(f"plans.jsonl: {left_out(self.num_bad, 'damaged line')}")
        num_shown = len(self._plans.items())
        if num_shown < self._plans.num_taken:
            notes.append(
                f"{num_shown} of {self._plans.num_taken} plans are shown, at even "
                "distances"
            )
        return notes


def _plan(record: dict, before: Plan | None) -> Plan:
    """Return the plan of a line: its table, or the table before it with some slots
    changed. Raises an error where the line is not as a run writes it."""
    sizes = record["num_devices"], record["slots_per_device"]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError("sizes are counts")
    if "slot_to_expert_lp" in record:
        table_lp = np.array(record["slot_to_expert_lp"])
    else:
        table_lp = before.slot_to_expert_lp.copy() if before else np.zeros((0, 0), int)
        for layer, slot, expert in record["changed"]:
            if min(layer, slot) < 0:
                raise ValueError("a slot is counted from 0")
            table_lp[layer, slot] = expert
    if table_lp.ndim != 2 or table_lp.dtype.kind != "i" or not table_lp.size:
        raise ValueError("a plan is a table of experts")
    if table_lp.shape[1] != sizes[0] * sizes[1] or not _is_small(table_lp):
        raise ValueError("a table has an expert or -1 for each slot")
    names = {name: plain(record.get(name)) for name in FIELDS}
    counts = {"num_devices": sizes[0], "slots_per_device": sizes[1]}
    return Plan({"step": record["step"], **names, **counts}, table_lp.astype(np.int16))


def _is_small(table_lp: np.ndarray) -> bool:
    """Return whether the numbers of a table are -1 or experts that int16 can hold."""
    return bool(table_lp.min() >= -1 and table_lp.max() < 2**15)
