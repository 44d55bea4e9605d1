"""Test tools/testbed/run.py without a cluster: bad input and the computed figures."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tools.testbed import quota, run
from tools.testbed import trace as testbed_trace
from tools.testbed.cluster import Cluster
from tools.testbed.run import find_run_dir, median_sec, step_records


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ({"dcs": 0}, "dcs=0 must be 1 to 64"),
        ({"dcs": 65}, "dcs=65 must be 1 to 64"),
        ({"per_dc": 0}, "per_dc=0 must be 1 or more"),
        ({"dcs": 1}, "one process: a cluster has at least 2"),
        ({"rate_mbit": -1.0}, "rate_mbit=-1.0 must be 0.1 to 100000"),
        ({"rate_mbit": float("nan")}, "rate_mbit=nan must be"),
        ({"quota": 0.0}, "quota=0.0 must be 0.02 to 1024 cores"),
    ],
)
def test_an_impossible_cluster_is_refused(sizes, rule):
    with pytest.raises(ValueError, match=rule):
        Cluster(**sizes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "no program is named"),
        (["run", "--", "no/such.py"], "no/such.py is not a file"),
        (["run", "--dcs=0", "--", "true"], "dcs=0 must be 1 to 64"),
        (["pair", "a.gin", "b.gin", "--blocks=0"], "--blocks=0 must be 1 or more"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(words, message, capsys):
    assert run.main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_quotas_are_written_in_the_format_of_each_cgroup_version():
    period = "50000"
    v1 = {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": "12500"}
    assert quota.quota_files(0.25, is_v2=False) == v1
    assert quota.quota_files(None, is_v2=False)["cpu.cfs_quota_us"] == "-1"
    assert quota.quota_files(0.25, is_v2=True) == {"cpu.max": "12500 50000"}
    assert quota.quota_files(None, is_v2=True) == {"cpu.max": "max 50000"}


def test_a_process_with_a_quota_stays_on_one_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 3})
    assert [quota.cores_of(i, 0.25) for i in range(4)] == [{0}, {1}, {3}, {0}]
    assert quota.cores_of(1, None) == quota.cores_of(1, 2.0) == {0, 1, 3}


def test_a_command_runs_in_its_group_as_a_batch_on_its_cores(tmp_path):
    groups = quota.Groups((tmp_path,), is_v2=False)
    code = "import os; print(os.getpid(), os.sched_getscheduler(0) == os.SCHED_BATCH, "
    code += "os.sched_getaffinity(0))"
    words = [*quota.prefix(groups, 0, 0.25), sys.executable, "-c", code]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    pid = (tmp_path / "cgroup.procs").read_text().strip()
    core = min(os.sched_getaffinity(0))
    assert result.stdout.split(maxsplit=1) == [pid, f"True {{{core}}}\n"]


def test_steps_are_found_where_the_run_writes_them(tmp_path):
    gin = ["train/main.py", "--gin_file", "configs/tiny_cpu.gin"]
    assert find_run_dir(gin) == pathlib.Path("runs/tiny_cpu")
    assert find_run_dir([*gin, "--run_dir=a/b"]) == pathlib.Path("a/b")
    assert find_run_dir(["program.py"]) is None
    assert step_records(tmp_path) == []
    lines = [{"step": 1, "step_msec": 10.0}, {"eval_loss": 1.0}]
    lines += [{"step": 2, "step_msec": 30.0}, {"step": 3, "step_msec": 20.0}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 4, "step_ms'
    (tmp_path / "metrics.jsonl").write_text(text)
    records = step_records(tmp_path)
    assert [x["step"] for x in records] == [1, 2, 3]
    assert median_sec(records) == 0.02


def test_one_layer_of_a_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(testbed_trace, "FIRST_SAMPLE", 1)
    tokens = np.arange(3 * 2 * 4 * 8, dtype=np.uint16).reshape(3, 2, 4, 8)
    trace, out = tmp_path / "trace.npz", tmp_path / "layer.npz"
    np.savez(trace, tokens=tokens, layer=[4, 16])
    bindings = testbed_trace.bindings(trace, 16, tmp_path)
    assert bindings == (f"Recorded.source = '{out}'",)
    assert (np.load(out)["tokens"] == tokens[1:, 1:]).all()
    with pytest.raises(ValueError, match="no layer '5'"):
        testbed_trace.bindings(trace, 5, tmp_path)
    monkeypatch.setattr(testbed_trace, "FIRST_SAMPLE", 3)
    with pytest.raises(ValueError, match="has 3 samples"):
        testbed_trace.bindings(trace, 16, tmp_path)
    assert testbed_trace.bindings(tmp_path / "none.npz", 4, tmp_path) == ()
    assert "using the config's synthetic load" in capsys.readouterr().err
