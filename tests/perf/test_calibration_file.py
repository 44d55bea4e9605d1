"""Test that a calibration comes back from its file, and that a damaged one is one
line."""

import copy
import json

import pytest

from moejax.config import Balance, Config, Dispatch, Moe, Train
from moejax.perf.calibration import LEAVING_SHARE, Calibration, read_calibration
from moejax.plan.layout import Topology
from train.dry_run import dry_run

LINE = {"latency_sec": 1e-5, "bytes_per_sec": 1e9, "r2": 0.9}
GOOD = {
    "device_kind": "cpu",
    "mesh": {"dc": 1, "data": 1, "expert": 8, "tensor": 1},
    "compute_dtype": "float32",
    "collectives": {
        name: {"expert": LINE, "expert_tensor": LINE} for name in LEAVING_SHARE
    },
    "flops_per_sec": 1e10,
    "matmul_r2": 1.0,
    "compile_sec": 10,
    "when": "2026-11-21",
}
ODD = (
    None, True, -1, 0, 2**63, 10**400, 1e308, float("nan"), float("inf"), "1", "", [],
    [1], {}, {"expert": 1}, {"x": {}}, {"all_to_all": None},
    {"all_to_all": {"wheel": LINE}}, {"all_to_all": {"expert_expert": LINE}},
    {"all_to_all": {"expert": LINE | {"r2": None}}},
)  # fmt: skip


def paths(value, path=()):
    """Yield the path of each value in nested dicts."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*path, key))


def replaced(path, value) -> dict:
    """Return GOOD with another value at a path."""
    record = copy.deepcopy(GOOD)
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return record


def test_a_calibration_comes_back(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(GOOD))
    calibration = read_calibration(path)
    assert calibration == Calibration(**GOOD)
    assert json.loads(calibration.to_json()) == GOOD


def test_odd_values_are_one_line_or_in_range():
    refusals, num_values = [], 0
    for path in paths(GOOD):
        for value in ODD:
            num_values += 1
            try:
                Calibration.from_json(json.dumps(replaced(path, value))).to_json()
            except ValueError as error:
                refusals.append(str(error))
    assert all(len(line) < 400 and "\n" not in line for line in refusals)
    assert len(refusals) > 0.9 * num_values


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "damaged"), (b"null", "missing"), (b"[]", "missing"), (b"\xff\xfe", ""),
        (b"[" * 10**5, "damaged"), (b"1" * 5000, ""), (b" " * 2**21, "more than"),
        (json.dumps(GOOD | {"extra": 1}).encode(), r"unknown \['extra'\]"),
        (None, "no such file"),
    ],
    ids=range(9),
)  # fmt: skip
def test_other_files_are_one_line(tmp_path, text, match):
    file = tmp_path / "c.json"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ValueError, match=f"cannot use .*c.json as a .*{match}") as e:
        read_calibration(file)
    assert "\n" not in str(e.value)


def test_a_path_that_is_no_file(tmp_path):
    for path in (tmp_path, "x" * 5000, "/dev/zero"):
        with pytest.raises(ValueError, match="as a calibration"):
            read_calibration(path)


def test_a_dry_run_refuses_what_a_run_refuses(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps(replaced(("mesh", "dc"), True)))
    cfg = Config(
        mesh=Topology(expert=8),
        moe=Moe(num_experts=16),
        train=Train(batch_size=16),
        dispatch=Dispatch(schedule="auto"),
        balance=Balance(calibration=str(file)),
    )
    with pytest.raises(ValueError, match=r"c.json as a calibration: .*tools/calibrate"):
        dry_run(cfg)
