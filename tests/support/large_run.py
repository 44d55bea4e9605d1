"""Write the folder of a run that is too long to train here, line by line.

The numbers are drawn once for some lines and used in turn, so that gigabytes are
written in a minute; the texts have the sizes of those of a real run.
"""

import json
import pathlib

import numpy as np

from tests.support.run_folders import account

NUM_KINDS = 16
"""Number of different lines, of which each comes again after as many steps."""


def write_large_run(
    folder: pathlib.Path,
    num_steps: int,
    num_layers: int = 64,
    num_experts: int = 256,
    num_devices: int = 32,
    table_every_steps: int = 10,
) -> pathlib.Path:
    """Write a run with a balancer, which swaps every 500 steps, that has finished."""
    folder.mkdir(parents=True)
    sizes = num_layers, num_experts, num_devices
    rng = np.random.default_rng(0)
    tails = [_tail(rng, *sizes) for _ in range(NUM_KINDS)]
    tables = [_tables(rng, *sizes) for _ in range(NUM_KINDS)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            loss = 2 + 8 / (1 + step / 1000) + 0.05 * (step % 7)
            adopt = ', "adopt_msec": 12.5' if step % 500 == 4 and step > 500 else ""
            table = tables[step // table_every_steps % NUM_KINDS]
            table = table if step % table_every_steps == 0 else ""
            file.write(
                f'{{"step": {step}, "loss": {loss}, {tails[step % NUM_KINDS]}'
                f"{adopt}{table}}}\n"
            )
            if step % 1000 == 0:
                file.write(f'{{"step": {step}, "eval_loss": {loss + 0.1}}}\n')
            if step % 500 == 0:
                file.write(json.dumps(_decision(step)) + "\n")
    _write_plans(folder, num_steps, sizes, rng)
    with (folder / "goodput.jsonl").open("w") as file:
        for step in range(0, num_steps + 1, 100):
            line = account(step, 1, 1e9 + step, compile=60.0, useful=0.9 * step)
            file.write(json.dumps(line) + "\n")
    (folder / "config.gin").write_text(
        f"Moe.num_experts = {num_experts}\nTrain.num_steps = {num_steps}\n"
    )
    (folder / "summary.json").write_text(json.dumps({"step": num_steps}))
    return folder


def _tail(rng, num_layers: int, num_experts: int, num_devices: int) -> str:
    """Return the fields of a step's line from the third on, without a table."""
    ratio_l = (1 + rng.random(num_layers)).round(4)
    record = {
        "total_loss": rng.random(),
        **{
            name: rng.random(num_layers).tolist()
            for name in (
                "balance_loss", "sequence_balance_loss", "router_z_loss",
                "mutual_information_loss", "router_entropy",
            )
        },
        "grad_norm": rng.random(), "lr": 3e-4, "tok_per_sec": 1e6 * rng.random(),
        "expert_max_over_mean": (3 * ratio_l).tolist(),
        "device_max_over_mean": ratio_l.tolist(),
        "device_max_over_bound": ratio_l.tolist(),
        "rounds": [1] * num_layers,
        "fullest_pair": rng.integers(1000, 9999, num_layers).tolist(),
        "dead_experts": rng.integers(0, 5, num_layers).tolist(),
        "dropped": 0, "dropped_share": 0.0, "skipped": False, "skipped_in_a_row": 0,
        "step_msec": 900 + 100 * rng.random(), "mfu": 0.4 + 0.01 * rng.random(),
        "plan": "8c48", "modelled_step_msec": 850 + 100 * rng.random(),
        "modelled_parts_msec": {
            name: 100 * rng.random()
            for name in ("experts", "wait", "wires", "copies", "blocks")
        },
        "home_device_max_over_mean": (2 * ratio_l).tolist(),
        "home_std_over_std": (2 * ratio_l).tolist(),
        "plan_wait_msec": rng.random(),
        "host_memory_gib": 4 + rng.random(), "device_memory_gib": 60 + rng.random(),
    }  # fmt: skip
    return json.dumps(record)[1:-1]


def _tables(rng, num_layers: int, num_experts: int, num_devices: int) -> str:
    """Return the tables of a line, with a hill of hot experts."""
    place_e = np.arange(num_experts) - rng.integers(num_experts)
    share_e = 0.2 + np.exp(-((place_e / num_experts * 8) ** 2))
    tokens_le = rng.poisson(2000 * share_e, (num_layers, num_experts))
    rows_lw = tokens_le.reshape(num_layers, num_devices, -1).sum(axis=2)
    tables = {"rows_lw": rows_lw.tolist(), "tokens_le": tokens_le.tolist()}
    return ", " + json.dumps(tables)[1:-1]


def _decision(step: int) -> dict:
    decision = {
        "kind": "swap", "step": step - 4, "adopt_step": step + 4, "policy": "eplb",
        "device_max_over_mean_before": 1.8, "device_max_over_mean_after": 1.1,
        "num_moves": 40, "modelled_gain_sec": 0.02, "modelled_cost_sec": 1.5,
        "why": "saves 20 ms a step", "digest_before": "8c48", "digest": "8c49",
        "changes": {},
    }  # fmt: skip
    return {"step": step, "decision": decision}


def _write_plans(folder: pathlib.Path, num_steps: int, sizes, rng) -> None:
    """Write a plan with two spare slots a device, and one more every 500 steps."""
    num_layers, num_experts, num_devices = sizes
    own_lws = np.arange(num_experts).reshape(1, num_devices, -1)
    own_lws = np.repeat(own_lws, num_layers, axis=0)
    with (folder / "plans.jsonl").open("w") as file:
        for step in [1, *range(504, num_steps + 1, 500)]:
            extra = rng.integers(0, num_experts, (num_layers, num_devices, 2))
            slots = np.concatenate([own_lws, extra], axis=2).reshape(num_layers, -1)
            plan = {
                "step": step, "kind": "swap" if step > 1 else "start", "digest": "8c48",
                "num_devices": num_devices, "store": "resident",
                "slots_per_device": num_experts // num_devices + 2,
                "slot_to_expert_lp": slots.tolist(),
            }  # fmt: skip
            file.write(json.dumps(plan) + "\n")
