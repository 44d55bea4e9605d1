"""Check the data of the page of a run against its form in tools/run_page/read.py."""

import base64
import json
from collections.abc import Iterable

import numpy as np

RUN_FIELDS = {
    "name", "path", "made_at", "state", "state_text", "notes", "step", "num_steps",
    "every_steps", "config", "attempts", "curves", "layer_curves", "evals",
    "parts_msec", "goodput", "load", "rows", "plans", "decisions", "bytes", "summary",
}  # fmt: skip
STATES = {"finished", "running", "stopped", "crashed", "empty"}
MAX_RAW_BYTES = 5_000_000


def require_contract(run: dict) -> None:
    """Raise AssertionError unless data has the form that the page draws."""
    assert json.loads(json.dumps(run, allow_nan=False)) == run
    assert sum(len(table) for table in _require_run(run)) <= MAX_RAW_BYTES


def decode(text: str, dtype: str, *dims: int) -> np.ndarray:
    """Return the array that base64 text holds."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).reshape(dims)


def _require_run(run: dict) -> Iterable[bytes]:
    """Check the object of a run, and return the bytes of its arrays."""
    assert set(run) == RUN_FIELDS
    assert run["state"] in STATES
    assert all(note and "\n" not in note for note in [run["state_text"], *run["notes"]])
    assert all(isinstance(text, str) for pair in run["config"] for text in pair)
    for curve in run["curves"].values():
        _require_curve(curve, run["every_steps"])
    for points in (run["evals"], run["parts_msec"]):
        _require_points(points, points.keys() - {"step"})
    assert set(run["parts_msec"]) == {
        "step", "experts", "wait", "wires", "copies", "blocks"
    }  # fmt: skip
    if run["goodput"] is not None:
        _require_goodput(run["goodput"])
    for decision in run["decisions"]:
        assert {"kind", "adopt_step", "adopted", "collected_step"} <= set(decision)
        assert isinstance(decision["adopted"], bool)
        assert {"gain_msec_measured", "gain_msec_spread"} <= set(decision)
        assert {"waited_sec", "replaced_by"} <= set(decision)
    assert all(set(line) == {"step", "by"} for line in run["bytes"])
    return _tables(run)


def _require_curve(curve: dict, every_steps: int) -> None:
    assert {"unit", "label", "step", "mean"} <= set(curve)
    assert ("min" in curve) == ("max" in curve) == (every_steps > 1)
    _require_points(curve, curve.keys() & {"min", "mean", "max"})
    for low, mean, high in zip(*(curve.get(n, []) for n in ("min", "mean", "max"))):
        assert (low is None) == (mean is None) == (high is None)
        assert mean is None or low <= mean <= high


def _require_points(points: dict, names: Iterable[str]) -> None:
    """Check that steps rise, and that there is a number or a null for each."""
    steps = points["step"]
    assert all(isinstance(step, int) for step in steps)
    assert steps == sorted(set(steps))
    for name in names:
        assert len(points[name]) == len(steps), name
        assert all(x is None or isinstance(x, int | float) for x in points[name])


def _require_goodput(goodput: dict) -> None:
    assert abs(sum(goodput["share"].values()) - 1) < 1e-3
    assert set(goodput["sec"]) == set(goodput["share"])
    for sec in goodput["sec"].values():
        assert len(sec) == len(goodput["step"]) > 0
    assert goodput["num_attempts"] >= 1


def _tables(run: dict) -> list[bytes]:
    """Check the arrays of a run, and return their bytes."""
    arrays = []
    for curve in run["layer_curves"].values():
        sizes = len(curve["step"]), curve["layers"]
        arrays.append(decode(curve["mean_b64"], "<f2", *sizes))
    for name, columns in (("load", "num_experts"), ("rows", "num_devices")):
        if (table := run[name]) is not None:
            sizes = len(table["step"]), table["num_layers"], table[columns]
            arrays.append(decode(table["log2_b64"], "u1", *sizes))
            assert table["step"] == sorted(set(table["step"]))
    for plan in run["plans"]:
        num_slots = plan["num_devices"] * plan["slots_per_device"]
        arrays.append(decode(plan["slots_b64"], "<i2", -1, num_slots))
        assert arrays[-1].min() >= -1
    return [array.tobytes() for array in arrays]
