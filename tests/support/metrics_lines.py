"""metrics.jsonl as runs write it, made up."""

import json

import numpy as np

from moejax.perf.traffic import over_mean


def log_lines(num_steps: int, num_layers: int = 3, num_experts: int = 8) -> list[str]:
    """What a run without a balancer writes, with an evaluation and the loads of experts
    and devices now and then."""
    rng = np.random.default_rng(0)
    lines = []
    for step in range(1, num_steps + 1):
        tokens_le = rng.integers(1, 100, (num_layers, num_experts))
        rows_lw = tokens_le.reshape(num_layers, 4, -1).sum(axis=2)
        record = {
            "step": step,
            "loss": 5.0 / step + 1,
            "expert_max_over_mean": over_mean(tokens_le).max(axis=1).tolist(),
            "device_max_over_mean": over_mean(rows_lw).max(axis=1).tolist(),
            "tok_per_sec": 1e4 + step,
            "step_msec": 50.0,
        }
        if step % 10 == 0:
            record |= {"tokens_le": tokens_le.tolist(), "rows_lw": rows_lw.tolist()}
        lines.append(json.dumps(record))
        if step % 20 == 0:
            lines.append(json.dumps({"step": step, "eval_loss": 1.1}))
    return lines


def decided(kind: str, step: int, adopt_step: int, **changes) -> str:
    decision = {"kind": kind, "adopt_step": adopt_step, "changes": changes}
    return json.dumps({"step": step, "decision": decision})


def balanced_lines(num_steps: int, decisions: list[str]) -> list[str]:
    """Those of log_lines, and decisions, each adopted at its step or never."""
    steps = [json.loads(line)["decision"]["adopt_step"] for line in decisions]
    lines = []
    for line in log_lines(num_steps):
        record = json.loads(line)
        is_adoption = record["step"] in steps and "loss" in record
        lines.append(
            json.dumps(record | {"adopt_msec": 1.0} if is_adoption else record)
        )
    return sorted(lines + decisions, key=lambda line: json.loads(line)["step"])


def write_run(folder, lines: list[str], end: str = "\n"):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(lines) + end)
    return folder


DECISIONS = [
    decided("keep", 5, 9),
    decided("swap", 10, 14),
    decided("relayout", 20, 34, rows_per_peer=[128, 96], slots_per_device=[2, 3]),
    decided("swap", 39, 43),
]
"""To keep is nothing to adopt, and a run of 40 steps ends before the last is due."""
