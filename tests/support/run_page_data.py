"""Build data of the run page with invented values, in the form of its reader.

Letters in names: q recorded steps, l layers, e experts, w devices, p slots.
"""

import base64

import numpy as np

STATE_TEXTS = {
    "finished": "all steps are done",
    "running": "a process holds the run directory",
    "stopped": "saved and stopped by a signal; start it again to go on",
    "crashed": "the last attempt ended without a save; start it again to go on",
}
BUCKETS = ("useful", "compile", "evaluation", "saves", "swaps", "data", "other")


def page_data(run: dict) -> dict:
    """Return the data of the page that shows a run."""
    return {"format": 1, "made_at": 1.78e9, "runs": [run]}


def run_data(
    name: str = "tiny",
    state: str = "finished",
    *,
    num_steps: int = 120,
    num_points: int = 120,
    sizes: tuple[int, int, int] = (3, 16, 8),
    num_frames: int = 12,
    seed: int = 0,
) -> dict:
    """Return a run of `num_steps` steps whose curves have `num_points` points.

    `sizes` are the numbers of layers, experts and devices. Three swaps and one relayout
    are adopted, at equal distances. More points than steps are not possible.
    """
    rng = np.random.default_rng(seed)
    every = max(1, num_steps // num_points)
    step = [every * (i + 1) for i in range(num_points)]
    adopted = [num_steps * part // 5 for part in (1, 2, 3, 4)]
    frame_step = np.linspace(10, num_steps, num_frames).astype(int).tolist()
    return {
        "name": name,
        "path": f"runs/{name}",
        "state": state,
        "state_text": STATE_TEXTS[state],
        "notes": [],
        "step": num_steps,
        "num_steps": num_steps if state == "finished" else 2 * num_steps,
        "every_steps": every,
        "config": [["Balance.policy", "'eplb'"], ["Moe.num_experts", str(sizes[1])]],
        "attempts": [
            {"step": 0, "attempt": 1, "at": 1.78e9, "num_devices": sizes[2]},
            {"step": adopted[1], "attempt": 2, "at": 1.78e9 + 60, "jax": "0.11"},
        ],
        "curves": _curves(rng, step, every),
        "layer_curves": _layer_curves(rng, step, sizes[0]),
        "evals": {"step": adopted, "loss": [2.5, 2.1, 1.9, 1.8]},
        "parts_msec": {
            "step": step,
            **{
                name: _rounded(rng.uniform(1, 5, num_points))
                for name in ("experts", "wait", "wires", "copies", "blocks")
            },
        },
        "goodput": _goodput(rng, frame_step),
        "load": _load(rng, frame_step, sizes),
        "rows": _rows(rng, frame_step, sizes),
        "plans": _plans(rng, adopted, sizes),
        "decisions": _decisions(adopted),
        "bytes": [
            {
                "step": 1,
                "by": {"all_to_all over expert": 4.2e6, "psum over data": 1.1e6},
            },
            {"step": adopted[3], "by": {"all_to_all over expert": 3.1e6}},
        ],
        "summary": None,
    }


def empty_run(name: str = "empty") -> dict:
    """Return a run that has not done a step."""
    return {
        "name": name, "path": f"runs/{name}", "state": "empty",
        "state_text": "no step was recorded yet", "notes": ["metrics.jsonl is missing"],
        "step": 0, "num_steps": 400, "every_steps": 1,
        "config": [["Moe.num_experts", "16"]], "attempts": [], "curves": {},
        "layer_curves": {}, "evals": {"step": [], "loss": []},
        "parts_msec": {"step": []}, "goodput": None, "load": None, "rows": None,
        "plans": [], "decisions": [], "bytes": [], "summary": None,
    }  # fmt: skip


def huge_run() -> dict:
    """Return a run of 100,000 steps, 64 layers and 256 experts, with as many recorded
    loads as a page may hold."""
    return run_data(
        "huge", num_steps=100_000, num_points=2000, sizes=(64, 256, 32), num_frames=240
    )


def loads(run: dict) -> np.ndarray:
    """Return the bytes of the recorded loads, [q, l, e]."""
    load = run["load"]
    flat = np.frombuffer(base64.b64decode(load["log2_b64"]), np.uint8)
    return flat.reshape(-1, load["num_layers"], load["num_experts"])


def _rounded(values: np.ndarray) -> list:
    return [float(f"{value:.5g}") for value in values]


def _curve(mean: np.ndarray, step: list, every: int, label: str) -> dict:
    curve = {"unit": "", "label": label, "step": step, "mean": _rounded(mean)}
    if every > 1:
        spread = 0.1 * np.abs(mean)
        curve |= {"min": _rounded(mean - spread), "max": _rounded(mean + spread)}
    return curve


def _curves(rng, step: list, every: int) -> dict:
    n, x = len(step), np.linspace(0, 1, len(step))
    noise = rng.normal(0, 1, n)
    shapes = {
        "loss": 1.7 + 3.5 * np.exp(-5 * x) + 0.05 * noise,
        "grad_norm": 0.5 + np.exp(-5 * x) + 0.05 * np.abs(noise),
        "lr": 4e-3 * (1 - x),
        "tok_per_sec": 6200 + 100 * noise,
        "step_msec": 330 + 10 * noise,
        "modelled_step_msec": 300 + 4 * noise,
        "dropped_share": 0 * x,
        "rounds": 1 + (x < 0.2),
        "fullest_pair": 200 + 20 * noise,
        "device_max_over_mean": 1.1 + 0.2 * np.exp(-3 * x) + 0.01 * np.abs(noise),
        "home_device_max_over_mean": 1.5 + 0.05 * np.abs(noise),
        "expert_max_over_mean": 3 + 0.2 * noise,
        "router_entropy": 2.2 - 0.5 * x,
        "dead_experts": np.round(2 * (1 - x)),
        "host_memory_gib": 1.2 + 0 * x,
        "modelled_saving_msec": 20 + noise,
        "adopt_msec": 5 + np.abs(noise),
    }
    return {name: _curve(mean, step, every, name) for name, mean in shapes.items()}


def _layer_curves(rng, step: list, num_layers: int) -> dict:
    return {
        name: {
            "step": step[::4],
            "layers": num_layers,
            "mean_b64": _base64(
                rng.uniform(*ends, (len(step[::4]), num_layers)), "<f2"
            ),
        }
        for name, ends in {
            "device_max_over_mean": (1.0, 1.6),
            "expert_max_over_mean": (2.0, 5.0),
            "router_entropy": (1.5, 2.5),
        }.items()
    }


def _goodput(rng, step: list) -> dict:
    sec_by_bucket = {
        name: np.cumsum(rng.uniform(0, 40 if name == "useful" else 3, len(step)))
        for name in BUCKETS
    }
    total = sum(sec[-1] for sec in sec_by_bucket.values())
    return {
        "share": {name: float(sec[-1] / total) for name, sec in sec_by_bucket.items()},
        "wall_sec": float(total),
        "down_sec": 12.0,
        "num_attempts": 2,
        "step": step,
        "sec": {name: _rounded(sec) for name, sec in sec_by_bucket.items()},
    }


def _load(rng, step: list, sizes: tuple) -> dict:
    """Return loads in which expert 0 of layer 0 gets ever more, and the last expert of
    the last layer none."""
    num_layers, num_experts, _ = sizes
    log2_qle = rng.normal(0, 0.8, (len(step), num_layers, num_experts))
    log2_qle[:, 0, 0] = np.linspace(0, 2.5, len(step))
    byte_qle = np.clip(np.round(128 + 32 * log2_qle), 1, 255)
    byte_qle[:, -1, -1] = 0
    return {
        "step": step,
        "num_layers": num_layers,
        "num_experts": num_experts,
        "log2_b64": _base64(byte_qle, np.uint8),
    }


def _rows(rng, step: list, sizes: tuple) -> dict:
    num_layers, _, num_devices = sizes
    log2_qlw = rng.normal(0, 0.2, (len(step), num_layers, num_devices))
    byte_qlw = np.clip(np.round(128 + 32 * log2_qlw), 1, 255)
    return {
        "step": step,
        "num_layers": num_layers,
        "num_devices": num_devices,
        "log2_b64": _base64(byte_qlw, np.uint8),
    }


def _plans(rng, adopted: list, sizes: tuple) -> list[dict]:
    """Return the first plan, three swaps, of which the second is told by its changes,
    and a relayout to one slot more on each device."""
    num_layers, num_experts, num_devices = sizes
    per_device = num_experts // num_devices + 1
    table_lp = np.full((num_layers, num_devices, per_device), -1)
    table_lp[:, :, :-1] = np.arange(num_experts).reshape(num_devices, -1)
    common = {
        "num_devices": num_devices,
        "slots_per_device": per_device,
        "store": "owned",
    }
    plans = [{"step": 1, "kind": "start", **common, "slots_b64": _slots(table_lp)}]
    for number, step in enumerate(adopted[:3]):
        changed = [
            [layer, number * per_device + per_device - 1, int(expert)]
            for layer, expert in enumerate(rng.integers(0, num_experts, num_layers))
        ]
        for layer, slot, expert in changed:
            table_lp[layer].reshape(-1)[slot] = expert
        told = {"changed": changed} if number == 1 else {"slots_b64": _slots(table_lp)}
        plans.append({"step": step, "kind": "swap", **common, **told})
    wide_lp = np.concatenate([table_lp, table_lp[:, ::-1, :1]], axis=2)
    relayout = {"kind": "relayout", "slots_b64": _slots(wide_lp)}
    common["slots_per_device"] += 1
    plans.append({"step": adopted[3], **common, **relayout})
    return [plan | {"digest": f"{number:04x}"} for number, plan in enumerate(plans)]


def _decisions(adopted: list) -> list[dict]:
    decisions = []
    for number, step in enumerate([adopted[0] // 2, *adopted]):
        kind = ("keep", "swap", "swap", "swap", "relayout")[number]
        decisions.append(
            {
                "kind": kind,
                "step": step - 4,
                "adopt_step": step,
                "collected_step": step - 2,
                "policy": "eplb",
                "device_max_over_mean_before": 1.42,
                "device_max_over_mean_after": 1.07,
                "num_moves": 3,
                "modelled_gain_sec": 0.0123,
                "modelled_cost_sec": 1.5,
                "why": "saves 12.3 ms a step" if number else "nothing pays",
                "digest_before": "0000",
                "digest": "0001",
                "changes": {"slots_per_device": [3, 4]} if kind == "relayout" else {},
                "adopted": kind != "keep",
                "gain_msec_measured": None if kind == "keep" else 10.0 + number,
                "waited_sec": None if kind == "keep" else 0.1 * number,
                "replaced_by": None,
            }
        )
    last = decisions[-1]
    replaced_by = {"kind": last["kind"], "step": last["step"]}
    planned = {"step": last["step"] - 10, "adopted": False, "gain_msec_measured": None}
    planned |= {"waited_sec": None, "replaced_by": replaced_by}
    return [*decisions[:-1], last | planned, last]


def _slots(table: np.ndarray) -> str:
    return _base64(table, "<i2")


def _base64(values: np.ndarray, dtype) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()
