"""Read the lines of plans.jsonl: which expert each slot holds, and bytes by collective.

docs/metrics.md says what a line holds.
"""

from collections.abc import Iterable

import numpy as np

from tools.run_page.plain import encoded, evenly, left_out, plain, thinning_note
from train.logs.record_lines import parse_line

MAX_BYTES_LINES = 200


def plans_data(lines: Iterable[bytes], max_bytes: int) -> tuple[dict, list[str]]:
    """Return the parts of the page's data that come from plans.jsonl, with tables of up
    to `max_bytes`, and a note about each thing that was left out."""
    plans: list[tuple[dict, np.ndarray]] = []
    bytes_sent = []
    num_bad = 0
    for line in lines:
        record = parse_line(line)
        try:
            if record is None:
                raise ValueError(line)
            table_lp = _table(record, plans[-1][1] if plans else None)
        except (LookupError, TypeError, ValueError, OverflowError):
            num_bad += 1
            continue
        plan = {name: plain(record.get(name)) for name in ("kind", "digest", "store")}
        for name in ("step", "num_devices", "slots_per_device"):
            plan[name] = record[name]
        plans.append((plan, table_lp))
        if isinstance(by_name := record.get("bytes"), dict):
            bytes_sent.append({"step": record["step"], "by": plain(by_name)})
    largest = max((table_lp.nbytes for _, table_lp in plans), default=1)
    shown = evenly(plans, max_bytes // largest)
    data = {
        "plans": [plan | {"slots_b64": encoded(lp, "<i2")} for plan, lp in shown],
        "bytes": evenly(bytes_sent, MAX_BYTES_LINES),
    }
    notes = [f"plans.jsonl: {left_out(num_bad, 'damaged line')}"] if num_bad else []
    return data, notes + thinning_note("plans", len(shown), len(plans))


def _table(record: dict, before_lp: np.ndarray | None) -> np.ndarray:
    """Return the expert of each slot, int16 [l, p]: the table of a line, or the table
    before it with some slots changed. Raises an error where the line is not as a run
    writes it."""
    sizes = record["num_devices"], record["slots_per_device"]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError("sizes are counts")
    if "slot_to_expert_lp" in record:
        table_lp = np.array(record["slot_to_expert_lp"])
    elif before_lp is None:
        raise ValueError("changes need a table before them")
    else:
        table_lp = before_lp.astype(np.int64)
        for layer, slot, expert in record["changed"]:
            if min(layer, slot) < 0:
                raise ValueError("a slot is counted from 0")
            table_lp[layer, slot] = expert
    if table_lp.ndim != 2 or table_lp.dtype.kind != "i" or not table_lp.size:
        raise ValueError("a plan is a table of experts")
    is_expert = table_lp.min() >= -1 and table_lp.max() < 2**15
    if table_lp.shape[1] != sizes[0] * sizes[1] or not is_expert:
        raise ValueError("a table has an expert or -1 for each slot")
    return table_lp.astype(np.int16)
