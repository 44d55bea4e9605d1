"""Test tools/show_plan.py on synthetic loads and on the directory of a run."""

import json

import numpy as np
import pytest

from moejax.perf import traffic
from moejax.plan.expert_plan import ExpertPlan
from tests.support.metrics_lines import write_run
from tests.support.run_folders import write_checkpoint_record
from tools import show_plan
from tools.bench import expert_loads

DEVICES, EXPERTS = 4, 8
SYNTHETIC = ["--synthetic", "zipf:1.5", f"--devices={DEVICES}", "--slots=3"]
ROW_P = [0, 1, 7, 2, 3, 7, 4, 5, 7, 6, -1, 7]
"""Slots of a plan in which expert 7 is on all devices."""


def run_tool(capsys, *words) -> tuple[str, dict]:
    """Run the tool with --json, and return the printed text and the record."""
    assert show_plan.main([*map(str, words), "--json"]) == 0
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    return text, json.loads(last)


def save_run(folder, *lines: dict):
    """Write the files of a run that the tool reads, with these lines of metrics."""
    write_run(folder, list(map(json.dumps, lines)))
    config = {
        "mesh": {"expert": DEVICES},
        "dispatch": {"group": "expert", "split": None},
        "balance": {"policy": "eplb"},
    }
    plan = ExpertPlan(np.array([ROW_P, ROW_P], np.int32), EXPERTS)
    write_checkpoint_record(folder, 40, {"plan": plan.to_json(), "config": config})
    return folder


def test_ratios_are_those_of_the_plan_and_the_next_sample(capsys):
    text, record = run_tool(capsys, *SYNTHETIC, "--policy=eplb", "--sample=7")
    load_lwe = expert_loads.synthetic("zipf:1.5", DEVICES, EXPERTS, 50).load_tlwe[8]
    plan = ExpertPlan.from_json(json.dumps(record["plan"]))
    for layer, load_we in enumerate(load_lwe):
        home_w = load_we.sum(axis=0).reshape(DEVICES, -1).sum(axis=1)
        before = home_w.max() / home_w.mean()
        assert np.isclose(record["device_max_over_mean_before"][layer], before)
        rows_wp = traffic.rows_by_slot(load_we, plan.slot_to_expert_lp[layer], DEVICES)
        after = traffic.max_over_mean(traffic.device_rows(rows_wp))
        assert np.isclose(record["device_max_over_mean_after"][layer], after)
        assert after < before
    worst = int(np.argmax(record["device_max_over_mean_before"]))
    assert record["title"].endswith(f"in layer {worst}")
    row_p = plan.slot_to_expert_lp[worst]
    for line, expert_s in zip(text.splitlines()[-DEVICES:], np.split(row_p, DEVICES)):
        words = line.split()[3:]
        assert [int(word.rstrip("*")) for word in words] == expert_s.tolist()
        for word, expert in zip(words, expert_s):
            assert word.endswith("*") == (np.sum(row_p == expert) > 1)


def test_plan_of_a_run_with_its_last_load(tmp_path, capsys):
    tokens_e = [10.0] * 7 + [130.0]
    first, last = [[1] * 8] * 2, [tokens_e, tokens_e]
    lines = [{"step": 10, "tokens_le": first}, {"step": 40, "tokens_le": last}]
    lines.append({"step": 50, "tokens_le": [[1], ["x"]]})
    _, record = run_tool(capsys, "--run", save_run(tmp_path / "run", *lines))
    mean = 200 / DEVICES
    assert np.allclose(record["device_max_over_mean_before"], (10 + 130) / mean)
    assert np.allclose(record["device_max_over_mean_after"], (20 + 130 / 4) / mean)
    assert "load of step 40" in record["source"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--run", "{tmp}/empty"], "holds no tokens_le"),
        (["--run", "{tmp}/other"], "[1, 2]"),
        (["--run", "{tmp}"], "no complete checkpoint"),
        ([*SYNTHETIC, "--policy=flexmo"], "flexmoe"),
        ([*SYNTHETIC, "--sample=50"], "0 to 49"),
        ([*SYNTHETIC, "--layer=9"], "use one of 0, 1"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, words, what):
    save_run(tmp_path / "empty", {"step": 1})
    save_run(tmp_path / "other", {"step": 1, "tokens_le": [[1, 2]]})
    assert show_plan.main([word.format(tmp=tmp_path) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert what in err
