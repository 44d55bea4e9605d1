"""Test tools/show_plan.py on synthetic loads and on the directory of a run."""

import json

import numpy as np
import pytest
from PIL import Image

from moejax.perf import traffic
from moejax.plan.expert_plan import ExpertPlan
from tools import show_plan
from tools.bench import expert_loads
from tools.plots.plan_picture import replica_colors
from train.checkpoint.record import record_sha256

pytestmark = pytest.mark.filterwarnings("error")  # matplotlib warns of ugly layouts

DEVICES, EXPERTS = 4, 8


def run_tool(capsys, *words) -> tuple[str, dict]:
    """Run the tool with --json, and return the printed text and the record."""
    assert show_plan.main([*map(str, words), "--json"]) == 0
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    return text, json.loads(last)


def test_ratios_are_those_of_the_plan_and_the_next_sample(tmp_path, capsys):
    out = tmp_path / "plan.png"
    words = ["--synthetic", "zipf:1.5", f"--devices={DEVICES}", "--slots=3"]
    text, record = run_tool(capsys, *words, "--policy=eplb", "--sample=7", "--out", out)
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
    assert record["digest"] == plan.digest
    worst = int(np.argmax(record["device_max_over_mean_before"]))
    assert record["title"].endswith(f"in layer {worst}")
    assert f"{record['device_max_over_mean_after'][worst]:.2f}" in record["title"]
    with Image.open(out) as picture:
        assert picture.width >= 800
    assert out.stat().st_size < 150_000
    rows = text.splitlines()[-1 - DEVICES : -1]  # the last names the file
    table_ws = plan.slot_to_expert_lp[worst].reshape(DEVICES, -1)
    for row, expert_s in zip(rows, table_ws):
        assert [int(word.rstrip("*")) for word in row.split()[-3:]] == expert_s.tolist()


def test_shadows_and_empty_slots_are_shown(tmp_path, capsys):
    out = tmp_path / "plan.png"
    words = ["--synthetic", "one_hot", f"--devices={DEVICES}", "--shadows=3"]
    text, record = run_tool(capsys, *words, "--policy=fastermoe", "--out", out)
    expert_p = np.array(record["plan"]["slot_to_expert_lp"][0]).reshape(DEVICES, -1)
    copies_e = np.bincount(expert_p[expert_p >= 0])
    assert copies_e.max() == DEVICES  # the hot expert is on every device
    assert f" {np.argmax(copies_e)}*" in text
    assert " -\n" in text  # its owner's shadow slot
    assert out.is_file()


def test_only_replicas_are_colored_and_each_differs():
    table_ws = np.array([[0, 1, 5], [2, 3, 5], [4, 0, 5], [6, 7, -1]])
    colors = replica_colors(table_ws)
    assert set(colors) == {0, 5}
    assert len(set(colors.values())) == 2


def write_run(folder, plan: ExpertPlan, lines: list[dict], policy: str = "eplb"):
    """Write the files of a run that the tool reads: the record of a checkpoint, and
    metrics.jsonl."""
    config = {
        "mesh": {"expert": DEVICES},
        "dispatch": {"group": "expert", "split": None},
        "balance": {"policy": policy},
    }
    meta = {"plan": plan.to_json(), "config": config}
    record = {"step": 40, "eval_loss": None, "meta": meta, "arrays": {}}
    record["sha256"] = record_sha256(record)
    path = folder / "checkpoints" / "40" / "record" / "metadata"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def make_plan(*rows: list[int]) -> ExpertPlan:
    return ExpertPlan(np.array(rows, np.int32), EXPERTS)


def test_plan_of_a_run_with_its_last_load(tmp_path, capsys):
    row_p = [0, 1, 7, 2, 3, 7, 4, 5, 7, 6, -1, 7]
    plan = make_plan(row_p, row_p)
    decision = {
        "kind": "swap", "step": 30, "digest_before": "aaaa", "digest": plan.digest,
        "changes": {}, "device_max_over_mean_before": 2.9,
        "device_max_over_mean_after": 1.2, "num_moves": 3,
    }  # fmt: skip
    tokens_e = [10.0] * 7 + [130.0]
    lines = [
        {"step": 10, "tokens_le": [[1] * 8] * 2},
        {"step": 20, "decision": {"kind": "keep"}},
        {"step": 30, "decision": decision},
        {"step": 40, "tokens_le": [tokens_e, tokens_e]},
    ]
    run = write_run(tmp_path / "run", plan, lines)
    text, record = run_tool(capsys, "--run", run, "--out", tmp_path / "a.png")
    assert record["digest"] == plan.digest
    mean = 200 / DEVICES
    assert np.allclose(record["device_max_over_mean_before"], (10 + 130) / mean)
    assert np.allclose(record["device_max_over_mean_after"], (20 + 130 / 4) / mean)
    assert "load of step 40" in record["source"]
    assert f"step 30  swap aaaa->{plan.digest}" in text
    assert "keep" not in text


def test_bad_input_is_one_line(tmp_path, capsys):
    plan = make_plan(list(range(EXPERTS)))
    empty = write_run(tmp_path / "empty", plan, [])
    other = write_run(tmp_path / "other", plan, [{"step": 1, "tokens_le": [[1, 2]]}])
    one = ["--synthetic", "zipf", f"--devices={DEVICES}"]
    cases = [
        (["--run", empty], "holds no tokens_le"),
        (["--run", other], "[1, 2]"),
        (["--run", tmp_path], "no complete checkpoint"),
        ([*one, "--policy=flexmo"], "flexmoe"),
        ([*one, "--sample=50"], "0 to 49"),
        ([*one, "--layer=9"], "use one of 0, 1"),
    ]
    for words, what in cases:
        out = tmp_path / "no.png"
        assert show_plan.main([*map(str, words), "--out", str(out), "--json"]) == 2
        printed, err = capsys.readouterr()
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert what in err
        assert json.loads(printed)["exit_code"] == 2
        assert not out.exists()
