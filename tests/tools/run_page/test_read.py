"""Test what is read of a run's folder: curves, loads, decisions, damage."""

import json

import numpy as np
import pytest

from tests.support.large_run import write_large_run
from tests.support.metrics_lines import DECISIONS, balanced_lines, decided, log_lines
from tests.support.page_contract import decode, require_contract
from tests.support.run_folders import ATTEMPTS, PLANS, make_folder, table
from tools.run_page.read import RunReader, page_data
from tools.run_page.read_metrics import Limits

LARGE = Limits()
SMALL = Limits(num_bins=8, load_bytes=100, rows_bytes=50, num_goodput=3)


def read_one(folder, limits=LARGE) -> dict:
    """Return the data of the page of a run, after a check of its form."""
    data = page_data(RunReader(folder, limits))
    require_contract(data)
    return data["runs"][0]


def steps_of(folder) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def test_curves_are_those_of_the_log(tmp_path):
    run = read_one(folder := make_folder(tmp_path / "run"))
    steps = steps_of(folder)
    curves = run["curves"]
    assert (run["step"], run["num_steps"], run["every_steps"]) == (40, 40, 1)
    assert curves["loss"]["step"] == list(range(1, 41))
    loss = [float(f"{record['loss']:.5g}") for record in steps]
    assert curves["loss"]["mean"] == loss
    worst = [max(record["device_max_over_mean"]) for record in steps]
    found = curves["device_max_over_mean"]["mean"]
    assert found == [float(f"{x:.5g}") for x in worst]
    assert curves["adopt_msec"]["step"] == [9, 14, 34]
    assert run["evals"] == {"step": [20, 40], "loss": [1.1, 1.1]}
    by_layer = run["layer_curves"]["expert_max_over_mean"]
    ratio_nl = decode(by_layer["mean_b64"], "<f2", 40, 3)
    expected_nl = np.array([record["expert_max_over_mean"] for record in steps])
    assert np.array_equal(ratio_nl, expected_nl.astype(np.float16))


def test_thinned_curves_have_the_mean_of_the_whole(tmp_path):
    run = read_one(folder := make_folder(tmp_path / "run"), limits=SMALL)
    assert run["every_steps"] == 8
    curve = run["curves"]["loss"]
    assert len(curve["step"]) == 5
    loss_n = np.array([record["loss"] for record in steps_of(folder)])
    assert np.mean(curve["mean"]) == pytest.approx(loss_n.mean(), rel=1e-4)
    assert max(curve["max"]) == pytest.approx(loss_n.max(), rel=1e-4)
    assert min(curve["min"]) == pytest.approx(loss_n.min(), rel=1e-4)


def test_tables_are_loads_over_their_mean(tmp_path):
    run = read_one(folder := make_folder(tmp_path / "run"))
    for name, field, columns in (
        ("load", "tokens_le", "num_experts"),
        ("rows", "rows_lw", "num_devices"),
    ):
        table = run[name]
        assert table["step"] == [10, 20, 30, 40]
        sizes = 4, table["num_layers"], table[columns]
        ratio_qlx = 2.0 ** ((decode(table["log2_b64"], "u1", *sizes) - 128.0) / 32)
        tokens = [r[field] for r in steps_of(folder) if field in r]
        expected = np.array(tokens) / np.mean(tokens, axis=2, keepdims=True)
        expected = np.maximum(expected, 2.0 ** (-127 / 32))  # byte 1
        assert np.abs(np.log2(ratio_qlx / expected)).max() <= 1 / 64 + 1e-6


def test_a_load_of_zero_is_byte_zero_alone(tmp_path):
    lines = ['{"step": 1, "loss": 1.0, "tokens_le": [[0, 1, 1000000], [0, 0, 0]]}']
    load = read_one(make_folder(tmp_path / "run", metrics=lines))["load"]
    assert decode(load["log2_b64"], "u1", 2, 3).tolist() == [[0, 1, 179], [128] * 3]


def test_tables_are_thinned_with_the_first_and_the_last(tmp_path):
    lines = log_lines(390)
    run = read_one(make_folder(tmp_path / "run", metrics=lines), limits=SMALL)
    for name, num_bytes in (("load", 24), ("rows", 12)):
        steps = run[name]["step"]
        assert (steps[0], steps[-1]) == (10, 390)
        assert len(set(np.diff(steps[:-1]))) == 1
        assert 3 <= len(steps) <= 1 + SMALL.load_bytes // num_bytes
    assert any("tokens_le: 4 of 39 tables" in note for note in run["notes"])


def test_decisions_say_what_they_changed(tmp_path):
    lines = [json.loads(line) for line in balanced_lines(40, DECISIONS)]
    for line in lines:
        if "loss" in line:
            line["step_msec"] = 50.0 if line["step"] <= 14 else 40.0 + line["step"] % 2
    run = read_one(make_folder(tmp_path / "run", metrics=lines))
    found = [(d["kind"], d["adopted"], d["collected_step"]) for d in run["decisions"]]
    assert found == [
        ("keep", False, 5), ("swap", True, 10), ("relayout", True, 20),
        ("swap", False, 39),
    ]  # fmt: skip
    gains = [d["gain_msec_measured"] for d in run["decisions"]]
    before, after = range(15, 34), range(35, 41)
    medians = [np.median([40.0 + s % 2 for s in steps]) for steps in (before, after)]
    # From step 15 on; up to the relayout at step 34.
    assert gains == [None, 50 - medians[0], medians[0] - medians[1], None]
    assert run["decisions"][2]["changes"]["slots_per_device"] == [2, 3]


def test_the_later_of_two_decisions_for_a_step_is_adopted(tmp_path):
    two = [decided("relayout", 20, 34), decided("relayout", 30, 34)]
    run = read_one(make_folder(tmp_path / "run", metrics=balanced_lines(40, two)))
    assert [d["adopted"] for d in run["decisions"]] == [False, True]
    replaced = [d["replaced_by"] for d in run["decisions"]]
    assert replaced == [{"kind": "relayout", "step": 30}, None]


def test_a_decision_says_how_long_the_run_waited(tmp_path):
    lines = [json.loads(line) for line in balanced_lines(40, DECISIONS)]
    for line in lines:
        if line["step"] == 34 and "loss" in line:
            line |= {"adopt_msec": 500.0, "adopt_wait_msec": 41_500.0}
    run = read_one(make_folder(tmp_path / "run", metrics=lines))
    # A run of an older version has the first alone.
    assert [d["waited_sec"] for d in run["decisions"]] == [None, 0.001, 42, None]


def test_plans_are_tables_with_their_changes(tmp_path):
    run = read_one(make_folder(tmp_path / "run"))
    tables = [decode(plan["slots_b64"], "<i2", 3, 12) for plan in run["plans"]]
    swapped = table(0)
    swapped[0, 11], swapped[2, 0] = 5, 1
    for found, expected in zip(tables, (table(0), swapped, table(1)), strict=True):
        assert np.array_equal(found, expected)
    assert [plan["kind"] for plan in run["plans"]] == ["start", "swap", "relayout"]
    assert run["bytes"] == [{"step": 1, "by": {"all_to_all": 1000}}]


@pytest.mark.parametrize(
    "damage",
    [
        "{}",
        '{"step": 20}',
        json.dumps(PLANS[1] | {"changed": [[0, 12, 1]]}),
        json.dumps(PLANS[1] | {"changed": [[0, -1, 1]]}),
        json.dumps(PLANS[1] | {"changed": 3}),
        json.dumps(PLANS[2] | {"slot_to_expert_lp": [[1, 2], [3]]}),
        json.dumps(PLANS[2] | {"slot_to_expert_lp": [[0.5] * 12]}),
        json.dumps(PLANS[2] | {"slot_to_expert_lp": [[10**9] * 12]}),
        json.dumps(PLANS[2] | {"num_devices": 5}),
        json.dumps(PLANS[2] | {"num_devices": None}),
    ],
)
def test_damaged_plans_are_left_out_and_counted(tmp_path, damage):
    whole = read_one(make_folder(tmp_path / "a"))
    run = read_one(make_folder(tmp_path / "b", plans=[*PLANS[:2], damage, PLANS[2]]))
    assert run["plans"] == whole["plans"]
    assert "plans.jsonl: 1 damaged line is left out" in run["notes"]


def test_goodput_over_time_and_attempts(tmp_path):
    run = read_one(make_folder(tmp_path / "run"))
    goodput = run["goodput"]
    assert (goodput["wall_sec"], goodput["down_sec"]) == (30, 5)
    assert goodput["share"]["useful"] == pytest.approx(20 / 30, rel=1e-4)
    assert goodput["num_attempts"] == 2
    assert goodput["step"] == [0, 30, 20, 40]
    assert goodput["sec"]["useful"] == [0, 15, 10, 20]
    assert [a["step"] for a in run["attempts"]] == [0, 20]
    assert run["attempts"][1]["num_devices"] == 4
    end = {"step": 31, "attempt": 1, "at": 1e9 + 21, "end": "failed", "why": "x"}
    ends = read_one(make_folder(tmp_path / "ends", attempts=[*ATTEMPTS, end]))
    assert ends["attempts"] == [
        run["attempts"][0]
        | {"end": "failed", "why": "x", "end_step": 31, "end_at": 1e9 + 21},
        run["attempts"][1],
    ]
    old = read_one(make_folder(tmp_path / "old", attempts=None, plans=None))
    assert [a["step"] for a in old["attempts"]] == [0, 20]
    assert (
        "without attempts.jsonl, plans.jsonl: what it holds is not shown"
        in (old["notes"])
    )


def test_attempts_of_two_schemas_are_noted(tmp_path):
    run = read_one(make_folder(tmp_path / "run", attempts=ATTEMPTS[1:]))
    assert any("wrote schemas 1, 2" in note for note in run["notes"])


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": 9, "lo',
        "\0\0\0\0",
        "[1]",
        '{"loss": 1.0}',
        '{"step": 9, "decision": 3}',
        '{"step": 9, "decision": {"kind": "swap", "adopt_step": Infinity}}',
        '{"step": 9, "loss": 7.0}',
        '{"step": 900000, "loss": 7.0}',
        f'{{"step": {10**400}, "loss": 1}}',
        "[" * 100_000,
    ],
)
def test_damaged_lines_are_left_out_and_counted(tmp_path, damage):
    lines = balanced_lines(40, DECISIONS)
    whole = read_one(make_folder(tmp_path / "a"))
    run = read_one(
        make_folder(tmp_path / "b", metrics=[*lines[:14], damage, *lines[14:]])
    )
    assert run.pop("notes") == [
        "metrics.jsonl: 1 damaged line or step out of order is left out"
    ]
    for name in run.keys() - {"name", "path"}:
        assert run[name] == whole[name], name


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e999", "null", '"x"', "[]"])
def test_values_that_are_not_finite_become_null(tmp_path, value):
    lines = [
        '{"step": 1, "loss": 2.5, "rounds": [1, 2]}',
        f'{{"step": 2, "loss": {value}, "rounds": [{value}, 3], "mfu": {value}}}',
    ]
    run = read_one(make_folder(tmp_path / "run", metrics=lines))
    assert run["curves"]["loss"]["mean"] == [2.5, None]
    assert run["curves"]["mfu"]["mean"] == [None]
    assert run["curves"]["rounds"]["mean"][0] == 2


@pytest.mark.parametrize(
    "bad", ['"x"', "[1]", "[[1, 2], [3]]", "[[null]]", "[[-1, 2]]"]
)
def test_damaged_loads_are_left_out(tmp_path, bad):
    lines = [
        '{"step": 1, "loss": 1.0, "tokens_le": [[1, 3]]}',
        f'{{"step": 2, "loss": 1.0, "tokens_le": {bad}}}',
    ]
    run = read_one(make_folder(tmp_path / "run", metrics=lines))
    assert run["load"]["step"] == [1]
    assert "tokens_le: 1 damaged table is left out" in run["notes"]
    assert run["step"] == 2


def test_a_log_with_gaps_is_read(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (7, 9, 30, 31, 99)]
    run = read_one(make_folder(tmp_path / "run", metrics=lines))
    assert run["curves"]["loss"]["step"] == [7, 9, 30, 31]
    assert run["step"] == 31  # the next line would confirm 99


def test_a_torn_line_and_a_damaged_summary_are_noted(tmp_path):
    folder = make_folder(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    (folder / "summary.json").write_text('{"step": ')
    notes = read_one(folder)["notes"]
    assert "metrics.jsonl: the last line is torn after 16 bytes, and is left out" in (
        notes
    )
    assert "summary.json is damaged, and is left out" in notes


@pytest.mark.parametrize("text", ["\ud800", "<script>", "a" * 5000])
def test_texts_of_files_are_bounded_and_can_be_encoded(tmp_path, text):
    record = {"step": 1, "decision": {"kind": "keep", "adopt_step": 2, "why": text}}
    lines = ['{"step": 1, "loss": 1.0}', json.dumps(record)]
    run = read_one(make_folder(tmp_path / "run", metrics=lines))
    why = run["decisions"][0]["why"]
    assert len(why.encode()) <= 1000
    assert why in (text, "?", text[:998] + "..")


@pytest.mark.parametrize(
    ("num_steps", "sizes"),
    [(300, (2, 16, 4)), pytest.param(6000, (64, 256, 32), marks=pytest.mark.long)],
)
def test_a_long_run_is_thinned_within_its_limits(tmp_path, num_steps, sizes):
    """The larger run has 130 MB, as a run of 100,000 steps has 2.1 GB."""
    limits = LARGE if num_steps > 1000 else SMALL
    folder = write_large_run(tmp_path / "run", num_steps, *sizes)
    run = read_one(folder, limits=limits)
    num_layers, num_experts, num_devices = sizes
    assert run["step"] == num_steps
    assert len(run["curves"]["loss"]["step"]) <= limits.num_bins
    for name, most, size in (
        ("load", limits.load_bytes, num_layers * num_experts),
        ("rows", limits.rows_bytes, num_layers * num_devices),
    ):
        steps = run[name]["step"]
        assert (steps[0], steps[-1]) == (10, num_steps)
        assert len(steps) <= max(2, most // size) + 1
    assert run["plans"][0]["step"] == 1
    assert all(d["adopted"] for d in run["decisions"] if d["adopt_step"] < num_steps)
    assert len(json.dumps(run)) < 9e6
