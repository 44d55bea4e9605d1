"""Test that a damaged calibration is refused in one line, in a run and in a dry run."""

import copy
import json
import random

import pytest

from moejax.config import Balance, Config, Data, Dispatch, Model, Moe, Train
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


def config(path) -> Config:
    return Config(
        mesh=Topology(expert=8),
        model=Model(
            d_model=32, num_layers=1, num_heads=2, num_kv_heads=1,
            compute_dtype="float32",
        ),
        moe=Moe(num_experts=16, d_expert=32),
        data=Data(seq_len=32),
        train=Train(batch_size=16, loss_chunk=32),
        dispatch=Dispatch(schedule="auto"),
        balance=Balance(calibration=str(path)),
    )  # fmt: skip


def test_a_calibration_comes_back():
    assert json.loads(Calibration.from_json(json.dumps(GOOD)).to_json()) == GOOD


def refusal(text: str | bytes) -> str:
    """Return the line with which a calibration is refused, or ''."""
    try:
        calibration = Calibration.from_json(text)
    except ValueError as error:
        return str(error)
    assert json.loads(calibration.to_json())
    return ""


def test_odd_values_are_one_line_or_in_range():
    lines = [
        refusal(json.dumps(replaced(path, value)))
        for path in paths(GOOD)
        for value in ODD
    ]
    assert all(len(line) < 400 and "\n" not in line for line in lines)
    assert sum(map(bool, lines)) > 0.9 * len(lines)


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b"\xff\xfe", b"\0" * 99, b"[" * 10**5, b"{" * 10**5,
     b"1" * 5000, b'{"mesh": ' * 10**4, b" " * 2**21],
    ids=range(10),
)  # fmt: skip
def test_other_files_are_one_line(tmp_path, text):
    file = tmp_path / "c.json"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=r"cannot use .*c.json as a calibration") as e:
        read_calibration(file)
    assert "\n" not in str(e.value)


def test_flipped_bytes_give_no_traceback():
    rng, text = random.Random(0), json.dumps(GOOD)
    for _ in range(300):
        damaged = list(text)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(text))] = chr(rng.randrange(256))
        assert "\n" not in refusal("".join(damaged))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("collectives", "all_to_all", "expert", "r2"), "x"),
        (("collectives", "ppermute"), {"wheel": LINE}),
        (("mesh", "dc"), True),
        (("compile_sec",), float("nan")),
        (("when",), 7),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(tmp_path, path, value):
    file = tmp_path / "c.json"
    file.write_text(json.dumps(replaced(path, value)))
    with pytest.raises(ValueError, match=r"c.json as a calibration: .*tools/calibrate"):
        dry_run(config(file))


def test_a_file_that_is_none(tmp_path):
    for path in (tmp_path, tmp_path / "none.json", "x" * 5000, "/dev/zero"):
        with pytest.raises(ValueError, match="as a calibration"):
            read_calibration(path)
