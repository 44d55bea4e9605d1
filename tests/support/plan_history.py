"""Read plans.jsonl back: the table of slots that is in use at each step."""

import json
import pathlib

import numpy as np


def plan_records(run_dir: pathlib.Path) -> list[dict]:
    """Return the lines of plans.jsonl."""
    lines = (run_dir / "plans.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def adopted_records(run_dir: pathlib.Path) -> list[dict]:
    """Return the lines of swaps and relayouts, which a resumed run and an undisturbed
    one have in common."""
    return [line for line in plan_records(run_dir) if line["kind"] != "start"]


def tables(records: list[dict]) -> list[np.ndarray]:
    """Return the table slot_to_expert_lp after each line."""
    found: list[np.ndarray] = []
    for line in records:
        if "changed" in line:
            table_lp = found[-1].copy()
            for layer, slot, expert in line["changed"]:
                table_lp[layer, slot] = expert
        else:
            table_lp = np.array(line["slot_to_expert_lp"], np.int32)
        found.append(table_lp)
    return found
