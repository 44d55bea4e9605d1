"""Test tools/plot_run.py: the arrays of a run, its pictures, and damaged logs."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.support.close import assert_close
from tests.support.metrics_lines import DECISIONS, balanced_lines, log_lines, write_run
from tools import plot_run
from tools.plots.run_arrays import MAX_LOADS, Adoption, read_run

pytestmark = pytest.mark.filterwarnings("error")  # matplotlib warns of ugly layouts

PICTURES = ["loss.png", "throughput.png", "load.png", "devices.png", "experts.png"]


def test_arrays_are_those_of_the_log(tmp_path):
    lines = log_lines(40)
    (write_run(tmp_path / "a", lines) / "config.gin").write_text(
        "Checkpoint.every_steps = 7\nTrain.eval_every_steps = 20\n"
    )
    run = read_run(tmp_path / "a")
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if "loss" in record]
    assert run.step_n.tolist() == list(range(1, 41))
    ratio_nl = np.array([record["expert_max_over_mean"] for record in steps])
    assert_close(run.ratio_nl, ratio_nl, dtype=np.float32)
    assert_close(run.loss_n, np.array([record["loss"] for record in steps]))
    assert run.eval_step_m.tolist() == [20, 40]
    assert run.load_step_q.tolist() == [10, 20, 30, 40]
    tokens_le = np.array(steps[29]["tokens_le"])
    expected_le = tokens_le / tokens_le.mean(axis=1, keepdims=True)
    assert_close(run.load_qle[2], expected_le, dtype=np.float32)
    assert_close(run.load_qle.max(axis=2), run.ratio_nl[9::10], dtype=np.float32)
    rows_lw = np.array(steps[29]["rows_lw"])
    expected_lw = rows_lw / rows_lw.mean(axis=1, keepdims=True)
    assert_close(run.rows_qlw[2], expected_lw, dtype=np.float32)
    assert run.rows_step_q.tolist() == [10, 20, 30, 40]
    rows_max_ql = run.rows_qlw.max(axis=2)
    assert_close(rows_max_ql, run.device_ratio_nl[9::10], dtype=np.float32)
    assert (run.save_every_steps, run.num_bad_lines) == (7, 0)
    assert (run.adoptions, run.act_above) == ((), None)


def test_adoptions_are_decisions_that_came_into_force(tmp_path):
    lines = balanced_lines(40, DECISIONS)
    folder = write_run(tmp_path / "run", lines)
    (folder / "config.gin").write_text(
        "Balance.policy = 'eplb'\nBalance.act_above = 1.25\n"
    )
    run = read_run(folder)
    swap = Adoption(step=14, kind="swap", collected_step=10, changes="")
    relayout = Adoption(34, "relayout", 20, "slots 2→3")
    assert run.adoptions == (swap, relayout)
    assert (run.act_above, run.num_bad_lines) == (1.25, 0)
    assert len(run.step_n) == 40
    without = [line for line in lines if "adopt_msec" not in line]
    assert read_run(write_run(tmp_path / "pending", without)).adoptions == ()


@pytest.mark.slow
def test_pictures_of_one_run_and_of_two(tmp_path, capsys):
    one = write_run(tmp_path / "one", log_lines(60))
    two = write_run(tmp_path / "two", log_lines(90, num_layers=30, num_experts=64))
    assert plot_run.main([str(one), "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["files"] == [str(one / name) for name in PICTURES]
    assert record["num_steps"] == [60]
    out = tmp_path / "out"
    assert plot_run.main([str(two), str(one), f"--out={out}"]) == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(PICTURES)
    for path in [*one.glob("*.png"), *out.iterdir()]:
        assert path.stat().st_size <= 150_000
        with Image.open(path) as picture:
            assert picture.width == 836


def test_run_without_loads_has_two_pictures(tmp_path):
    lines = ['{"step": 1, "loss": 2.0}', '{"step": 2, "loss": null}']
    folder = write_run(tmp_path / "bare", lines)
    assert plot_run.main([str(folder)]) == 0
    assert sorted(path.name for path in folder.glob("*.png")) == sorted(PICTURES[:2])


def test_a_step_that_was_logged_twice_counts_as_written_last(tmp_path):
    lines = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 2.0}'] * 2
    run = read_run(write_run(tmp_path / "run", [*lines, '{"step": 2, "loss": 1.0}']))
    assert run.step_n.tolist() == [1, 2]
    assert run.loss_n.tolist() == [3.0, 1.0]


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": 9, "lo',
        '{"step": 41}{"step',
        "\0\0\0\0",
        "[1]",
        '{"loss": 1.0}',
        '{"step": true, "loss": 1}',
        '{"step": -1, "loss": 1}',
        '{"step": 9, "decision": 3}',
        '{"step": 9, "decision": {"kind": "swap", "adopt_step": Infinity}}',
        '{"step": 9, "decision": {"kind": "swap", "adopt_step": 9, "changes": ["x"]}}',
        f'{{"step": {10**400}, "loss": 1}}',
        "[" * 100_000,
    ],
)
def test_damaged_lines_are_left_out_and_counted(tmp_path, damage):
    lines = log_lines(40)
    whole = read_run(write_run(tmp_path / "whole", lines))
    damaged = [*lines[:7], damage, *lines[7:]]
    run = read_run(write_run(tmp_path / "run", damaged, end="\n" + damage))
    assert run.num_bad_lines == 2
    for name in ("step_n", "loss_n", "ratio_nl", "eval_loss_m", "load_qle"):
        assert np.array_equal(getattr(run, name), getattr(whole, name))


@pytest.mark.parametrize("bad", ['"x"', "[1]", "[[1, 2], [3]]", "[[null]]", "[[]]"])
def test_damaged_loads_are_left_out_and_counted(tmp_path, bad):
    lines = [
        '{"step": 10, "loss": 1.0, "tokens_le": [[1, 3]]}',
        '{"step": 20, "loss": 1.0, "expert_max_over_mean": 3, "tokens_le": '
        + bad
        + "}",
    ]
    run = read_run(write_run(tmp_path / "run", lines))
    assert run.load_step_q.tolist() == [10]
    assert (len(run.step_n), run.num_bad_lines) == (2, 1)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "is not a folder"),
        ("no log", "has no metrics.jsonl"),
        ("", "holds no training step"),
        ('{"step": 1, "eval_loss": 1.0}', "holds no training step"),
        ("text\n" * 50 + '{"step": 1, "loss": 1.0}\n', "50 damaged lines"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, content, what):
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
    if content not in (None, "no log"):
        (folder / "metrics.jsonl").write_text(content)
    assert plot_run.main([str(folder), "--json"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert what in err
    assert json.loads(out) == {"error": err[len("error: ") : -1], "exit_code": 2}


def test_loads_of_a_long_run_are_thinned(tmp_path):
    lines = [
        json.dumps({"step": step, "loss": 1.0, "tokens_le": [[step, 1]]})
        for step in range(1, 3 * MAX_LOADS)
    ]
    run = read_run(write_run(tmp_path / "run", lines))
    assert MAX_LOADS / 2 <= len(run.load_step_q) <= MAX_LOADS
    assert set(np.diff(run.load_step_q)) == {4}
    assert len(run.step_n) == 3 * MAX_LOADS - 1


def test_smooth_is_a_centred_mean_of_finite_values():
    y_n = np.random.default_rng(0).normal(size=200)
    y_n[[3, 70]] = np.nan
    expected = [np.nanmean(y_n[max(0, i - 2) : i + 3]) for i in range(200)]
    assert_close(plot_run.smooth(y_n), np.array(expected))


def test_runs_of_one_name_are_named_by_their_paths(tmp_path):
    folders = [tmp_path / part / "run" for part in ("a", "b")]
    for folder in folders:
        folder.parent.mkdir()
        write_run(folder, log_lines(3))
    runs = plot_run.distinguish([read_run(folder) for folder in folders], folders)
    assert [run.name for run in runs] == [str(folder) for folder in folders]


def test_program_runs_from_anywhere(repo, tmp_path):
    folder = write_run(tmp_path / "run", log_lines(3))
    code = subprocess.call(
        [sys.executable, str(repo / "tools" / "plot_run.py"), str(folder)], cwd=tmp_path
    )
    assert code == 0
