"""Test what is read of a run's folder: the figures of its log, its state, damage."""

import json
import os
import random
import warnings

import numpy as np
import pytest

from tests.support.metrics_lines import DECISIONS, balanced_lines, decided, log_lines
from tests.support.mutations import BYTES, TEXT, mutate
from tests.support.page_contract import decode, require_contract
from tests.support.run_folders import ATTEMPTS, PLANS, finish, make_folder, table
from tools.run_page.metrics import Limits
from tools.run_page.plain import binned, evenly
from tools.run_page.read import read_run

SMALL = Limits(
    num_bins=8, num_decisions=3, num_goodput=3, load_bytes=100, rows_bytes=50
)


def read(folder, limits=None) -> dict:
    """Return the data of the page of a run, after a check of its form."""
    data = read_run(folder, limits or Limits())
    require_contract(data)
    return data


def steps_of(folder) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def test_curves_are_those_of_the_log(tmp_path):
    run = read(folder := make_folder(tmp_path / "run"))
    steps = steps_of(folder)
    curves = run["curves"]
    assert (run["step"], run["num_steps"], run["every_steps"]) == (40, 40, 1)
    assert curves["loss"]["step"] == list(range(1, 41))
    assert curves["loss"]["mean"] == [float(f"{r['loss']:.5g}") for r in steps]
    worst = [max(record["device_max_over_mean"]) for record in steps]
    found = curves["device_max_over_mean"]["mean"]
    assert found == [float(f"{x:.5g}") for x in worst]
    assert curves["adopt_msec"]["step"] == [9, 14, 34]
    assert run["evals"] == {"step": [20, 40], "loss": [1.1, 1.1]}
    by_layer = run["layer_curves"]["expert_max_over_mean"]
    ratio_nl = decode(by_layer["mean_b64"], "<f2", 40, 3)
    expected_nl = np.array([record["expert_max_over_mean"] for record in steps])
    assert np.array_equal(ratio_nl, expected_nl.astype(np.float16))


def test_tables_are_loads_over_their_mean(tmp_path):
    run = read(folder := make_folder(tmp_path / "run"))
    for name, field, columns in (
        ("load", "tokens_le", "num_experts"),
        ("rows", "rows_lw", "num_devices"),
    ):
        shown = run[name]
        assert shown["step"] == [10, 20, 30, 40]
        sizes = 4, shown["num_layers"], shown[columns]
        ratio_qlx = 2.0 ** ((decode(shown["log2_b64"], "u1", *sizes) - 128.0) / 32)
        tokens = [r[field] for r in steps_of(folder) if field in r]
        expected = np.array(tokens) / np.mean(tokens, axis=2, keepdims=True)
        expected = np.maximum(expected, 2.0 ** (-127 / 32))  # byte 1
        assert np.abs(np.log2(ratio_qlx / expected)).max() <= 1 / 64 + 1e-6


def test_a_load_of_zero_is_byte_zero_alone(tmp_path):
    lines = ['{"step": 1, "loss": 1.0, "tokens_le": [[0, 1, 1000000], [0, 0, 0]]}']
    load = read(make_folder(tmp_path / "run", metrics=lines))["load"]
    assert decode(load["log2_b64"], "u1", 2, 3).tolist() == [[0, 1, 179], [128] * 3]


def test_plans_are_tables_with_their_changes(tmp_path):
    run = read(make_folder(tmp_path / "run"))
    tables = [decode(plan["slots_b64"], "<i2", 3, 12) for plan in run["plans"]]
    swapped = table(0)
    swapped[0, 11], swapped[2, 0] = 5, 1
    for found, expected in zip(tables, (table(0), swapped, table(1)), strict=True):
        assert np.array_equal(found, expected)
    assert [plan["kind"] for plan in run["plans"]] == ["start", "swap", "relayout"]
    assert run["bytes"] == [{"step": 1, "by": {"all_to_all": 1000}}]


def test_decisions_say_what_they_changed_and_took(tmp_path):
    lines = [json.loads(line) for line in balanced_lines(40, DECISIONS)]
    for line in lines:
        if "loss" in line:
            line["step_msec"] = 50.0 if line["step"] <= 14 else 40.0 + line["step"]
        if line["step"] == 34 and "loss" in line:
            line |= {"adopt_msec": 500.0, "adopt_wait_msec": 41_500.0}
    decisions = read(make_folder(tmp_path / "run", metrics=lines))["decisions"]
    found = [(d["kind"], d["adopted"], d["collected_step"]) for d in decisions]
    assert found == [
        ("keep", False, 5), ("swap", True, 10), ("relayout", True, 20),
        ("swap", False, 39),
    ]  # fmt: skip
    before, after = range(15, 34), range(35, 41)
    medians = [np.median([40.0 + s for s in steps]) for steps in (before, after)]
    # From step 15 on; up to the relayout at step 34.
    gains = [d["gain_msec_measured"] for d in decisions]
    assert gains == [None, 50 - medians[0], medians[0] - medians[1], None]
    # Half a 95 % interval of each median, by McGill, Tukey and Larsen; the steps before
    # the swap all took 50 ms.
    iqrs = [np.subtract(*np.percentile(steps, (75, 25))) for steps in (before, after)]
    halves = [1.57 * iqr / len(s) ** 0.5 for iqr, s in zip(iqrs, (before, after))]
    spreads = [d["gain_msec_spread"] for d in decisions]
    expected = [None, halves[0], np.hypot(*halves), None]
    assert spreads == [x and pytest.approx(x, rel=1e-4) for x in expected]
    assert [d["waited_sec"] for d in decisions] == [None, 0.001, 42, None]
    assert decisions[2]["changes"]["slots_per_device"] == [2, 3]


def test_the_later_of_two_decisions_for_a_step_is_adopted(tmp_path):
    two = [decided("relayout", 20, 34), decided("relayout", 30, 34)]
    run = read(make_folder(tmp_path / "run", metrics=balanced_lines(40, two)))
    assert [d["adopted"] for d in run["decisions"]] == [False, True]
    replaced = [d["replaced_by"] for d in run["decisions"]]
    assert replaced == [{"kind": "relayout", "step": 30}, None]


def test_goodput_over_time_and_attempts(tmp_path):
    end = {"step": 31, "attempt": 1, "at": 1e9 + 21, "end": "failed", "why": "x"}
    run = read(make_folder(tmp_path / "run", attempts=[*ATTEMPTS, end]))
    goodput = run["goodput"]
    assert (goodput["wall_sec"], goodput["down_sec"]) == (30, 5)
    assert goodput["share"]["useful"] == pytest.approx(20 / 30, rel=1e-4)
    assert goodput["num_attempts"] == 2
    assert goodput["step"] == [0, 30, 20, 40]
    assert goodput["sec"]["useful"] == [0, 15, 10, 20]
    ended = {"end": "failed", "why": "x", "end_step": 31, "end_at": 1e9 + 21}
    assert run["attempts"] == [ATTEMPTS[0] | ended, ATTEMPTS[1]]


def test_a_long_run_is_thinned(tmp_path):
    many = [decided("swap", step, step + 4) for step in range(10, 300, 10)]
    lines = sorted([*log_lines(390), *many], key=lambda line: json.loads(line)["step"])
    run = read(folder := make_folder(tmp_path / "run", metrics=lines), SMALL)
    curve, loss_n = run["curves"]["loss"], [x["loss"] for x in steps_of(folder)]
    width = run["every_steps"]
    assert (width, len(curve["step"])) == (49, 8)
    for name, reduce in (("min", np.min), ("mean", np.mean), ("max", np.max)):
        parts = [reduce(loss_n[i : i + width]) for i in range(0, 390, width)]
        assert curve[name] == pytest.approx(parts, rel=1e-4)
    for name in ("load", "rows"):
        steps = run[name]["step"]
        assert (steps[0], steps[-1], len(steps)) == (10, 390, 4)
    assert len(run["decisions"]) == 3
    assert len(run["goodput"]["step"]) == 3
    assert len([note for note in run["notes"] if "are shown" in note]) == 3


def test_bins_tell_a_missing_number_from_one_that_is_not_finite():
    number_nc = np.array([[1.0, np.nan], [np.inf, np.nan], [3.0, np.inf]])
    bins = binned(number_nc, 2)
    assert bins.has.tolist() == [[True, False], [True, True]]
    for number_bc in (bins.min, bins.mean, bins.max):
        assert number_bc[:, 0].tolist() == [1, 3]
        assert np.isnan(number_bc[:, 1]).all()


def test_items_are_thinned_evenly():
    for num_items in (0, 1, 2, 5, 6, 500):
        items = list(range(num_items))
        kept = evenly(items, 5)
        assert len(kept) == min(num_items, 5)
        assert kept[:1] + kept[-1:] == items[:1] + items[-1:]
        distances = set(np.diff(kept).tolist())
        assert max(distances, default=0) - min(distances, default=0) <= 1


@pytest.mark.parametrize("value", ["NaN", "-1e999", "null", '"x"', "[]"])
def test_values_that_are_not_finite_become_null(tmp_path, value):
    lines = [
        '{"step": 1, "loss": 2.5, "rounds": [1, 2]}',
        f'{{"step": 2, "loss": {value}, "rounds": [{value}, 3], "mfu": {value}}}',
    ]
    run = read(make_folder(tmp_path / "run", metrics=lines))
    assert run["curves"]["loss"]["mean"] == [2.5, None]
    assert run["curves"]["mfu"]["mean"] == [None]
    assert run["curves"]["rounds"]["mean"][0] == 2


DAMAGE = [
    *(
        ("metrics", line)
        for line in (
            '{"step": 9, "lo', "\0\0\0\0", "[1]", '{"loss": 1.0}',
            '{"step": 9, "decision": 3}',
            '{"step": 9, "decision": {"kind": "swap", "adopt_step": Infinity}}',
            '{"step": 9, "loss": 7.0}',
            f'{{"step": {10**400}, "loss": 1}}', "[" * 100_000,
        )
    ),
    *(
        ("plans", json.dumps(record))
        for record in (
            {}, PLANS[1] | {"changed": [[0, 12, 1]]},
            PLANS[1] | {"changed": [[0, -1, 1]]}, PLANS[1] | {"changed": 3},
            PLANS[2] | {"slot_to_expert_lp": [[1, 2], [3]]},
            PLANS[2] | {"slot_to_expert_lp": [[10**9] * 12]},
            PLANS[2] | {"num_devices": 5},
        )
    ),
    ("attempts", '{"step": 3}'), ("goodput", '{"step": 3, "sec": {}}'),
]  # fmt: skip
"""Lines that a run does not write, by file."""


@pytest.mark.parametrize(("name", "line"), DAMAGE)
def test_a_damaged_line_is_left_out_and_noted(tmp_path, name, line):
    whole = read(folder := make_folder(tmp_path / "run"))
    path = folder / f"{name}.jsonl"
    lines = path.read_text().splitlines()
    at = min(14, len(lines) - 1)
    path.write_text("\n".join([*lines[:at], line, *lines[at:]]) + "\n")
    run = read(folder)
    (note,) = run.pop("notes")
    assert note.startswith(f"{name}.jsonl: 1 damaged line")
    for field in run.keys() - {"made_at"}:
        assert run[field] == whole[field], field


@pytest.mark.parametrize("bad", ['"x"', "[[1, 2], [3]]", "[[null]]", "[[-1, 2]]"])
def test_a_damaged_load_is_left_out_and_noted(tmp_path, bad):
    lines = [
        '{"step": 1, "loss": 1.0, "tokens_le": [[1, 3]]}',
        f'{{"step": 2, "loss": 1.0, "tokens_le": {bad}}}',
    ]
    run = read(make_folder(tmp_path / "run", metrics=lines))
    assert (run["step"], run["load"]["step"]) == (2, [1])
    assert "tokens_le: 1 damaged table is left out" in run["notes"]


def test_a_torn_line_a_damaged_summary_and_missing_files_are_noted(tmp_path):
    folder = age(make_folder(tmp_path / "run", attempts=None, plans=None))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    (folder / "summary.json").write_text('{"step": ')
    notes = read(age(folder))["notes"]
    assert [note.split(":")[0] for note in notes] == [
        "summary.json is damaged, and is left out", "metrics.jsonl",
        "without attempts.jsonl, plans.jsonl",
    ]  # fmt: skip


def test_every_damaged_folder_has_a_page_or_is_refused(tmp_path):
    folder = make_folder(tmp_path / "run")
    finish(folder)
    names = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
    whole = {name: (folder / name).read_bytes() for name in names}
    mutators = {"jsonl": TEXT, "json": TEXT}
    for seed in range(60):
        rng = random.Random(seed)
        name = rng.choice([*names, "metrics.jsonl"])
        form = mutators.get(name.rpartition(".")[2], BYTES)
        how, damaged = mutate(whole[name], whole[rng.choice(names)], form, rng)
        (folder / name).write_bytes(damaged)
        try:
            with warnings.catch_warnings(action="error"):
                read(folder, SMALL)
        except Exception as error:
            if "it is not the log of a run" not in str(error):
                error.add_note(f"seed {seed}: {how} of {name}")
                raise
        (folder / name).write_bytes(whole[name])


def age(folder):
    """Let the files of a folder be as old as those of a run that has ended."""
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    return folder


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("saved", "stopped"),
        ("unsaved", "crashed"),
        ("an end by an error", "crashed"),
        ("an end of the first attempt", "stopped"),
        ("stopped, unsaved", "stopped"),
        ("a summary", "finished"),
        ("a summary of step 30", "stopped"),
        ("a summary, more steps asked for", "stopped"),
        ("growing files", "running"),
        ("an end by an error, growing files", "crashed"),
        ("no step", "empty"),
    ],
)
def test_the_state_of_a_run(tmp_path, what, expected):
    folder = make_folder(tmp_path / "run")
    end = {"step": 40, "attempt": 2, "at": 1e9, "end": "failed", "why": "the loss"}
    ends = {
        "an end by an error": end,
        "an end of the first attempt": end | {"attempt": 1},
        "stopped, unsaved": end | {"end": "stopped"},
    }
    if line := ends.get(what.removesuffix(", growing files")):
        with (folder / "attempts.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    if "unsaved" in what:
        (folder / "checkpoints" / "40").rename(folder / "checkpoints" / "30")
    if "summary" in what:
        finish(folder, step=30 if "30" in what else 40)
    if "more steps" in what:
        config = (folder / "config.gin").read_text()
        (folder / "config.gin").write_text(config.replace("= 40", "= 80"))
    if what == "no step":
        (folder / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 1.0}\n')
    age(folder)
    if "growing" in what:
        os.utime(folder / "metrics.jsonl")
    assert read(folder)["state"] == expected
