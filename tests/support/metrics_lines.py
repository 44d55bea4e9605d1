"""Build files metrics.jsonl with invented values, in the form that runs write."""

import json

import numpy as np

from moejax.perf.traffic import over_mean


def log_lines(num_steps: int, num_layers: int = 3, num_experts: int = 8) -> list[str]:
    """Return the lines of a run without a balancer.

    Every 10th step has the loads of experts and devices, and every 20th an evaluation.
    """
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
    """Return the line of one decision of the balancer."""
    decision = {"kind": kind, "adopt_step": adopt_step, "changes": changes}
    return json.dumps({"step": step, "decision": decision})


def balanced_lines(num_steps: int, decisions: list[str]) -> list[str]:
    """Return the lines of a run with these decisions, each adopted at its step if the
    run gets that far."""
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
    """Make a run directory that holds these lines alone, and return it."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(lines) + end)
    return folder


DECISIONS = [
    decided("keep", 5, 9),
    decided("swap", 10, 14),
    decided("relayout", 20, 34, rows_per_peer=[128, 96], slots_per_device=[2, 3]),
    decided("swap", 39, 43),
]
"""Four decisions. 'keep' adopts nothing, and a run of 40 steps ends before the last
decision is due."""
