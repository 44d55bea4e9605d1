"""Test tools/compare_runs.py: what differs between two runs, and damaged files."""

import json
import subprocess
import sys

import pytest

from moejax.config import Config
from tests.support.metrics_lines import DECISIONS, balanced_lines, write_run
from tools import compare_runs
from train.checkpoint.record import make_record
from train.config import gin_reader
from train.logs.record_lines import TIMED

ARRAYS = {
    name: {"dtype": "float32", "shape": [2], "checksum": i}
    for i, name in enumerate(["params/a", "params/b", "step"])
}


def make_run(folder):
    """Write a run directory with metrics, samples and two checkpoints."""
    write_run(folder, balanced_lines(40, DECISIONS))
    (folder / "config.gin").write_text(gin_reader.render(Config()))
    for process in range(2):
        lines = [
            {"step": s, "rows": [process, 2 + process], "ids": [f"{s}-{process}", "x"]}
            for s in (1, 2)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"samples-{process}.jsonl").write_text(text)
    for step in (20, 40):
        save(folder, step, ARRAYS)
    return folder


def save(folder, step: int, arrays) -> None:
    path = folder / "checkpoints" / str(step) / "record"
    path.mkdir(parents=True, exist_ok=True)
    record = make_record(step, arrays, {})
    (path / "metadata").write_text(json.dumps(record))


@pytest.fixture
def runs(tmp_path):
    return make_run(tmp_path / "a"), make_run(tmp_path / "b")


def compare(runs, capsys) -> tuple[int, dict, str]:
    """Return the exit code, the JSON object and the text before it."""
    code = compare_runs.main([*map(str, runs), "--json"])
    out = capsys.readouterr().out.splitlines()
    return code, json.loads(out[-1]), "\n".join(out[:-1])


def edit(path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_equal_runs(runs, capsys):
    """Times, the run directory, the number of processes and old checkpoints may
    differ."""
    edit(runs[1] / "metrics.jsonl", '"step_msec": 50.0', '"step_msec": 51.0')
    edit(runs[1] / "config.gin", "Train.run_dir = None", "Train.run_dir = 'b'")
    first, second = (runs[1] / f"samples-{i}.jsonl" for i in range(2))
    first.write_text(first.read_text() + second.read_text())
    second.unlink()
    save(runs[1], 10, ARRAYS)
    code, record, text = compare(runs, capsys)
    assert (code, record["are_equal"]) == (0, True)
    assert "DIFFERENT" not in text
    assert record["checkpoints"]["steps"] == [20, 40]
    assert record["checkpoints"]["steps_of_one_run"] == [[], [10]]
    assert record["samples"]["num_common"] == 2


def test_each_difference_is_named(runs, capsys):
    edit(runs[1] / "config.gin", "Moe.top_k = 2", "Moe.top_k = 3")
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines()
    for i, line in enumerate(lines):
        record = json.loads(line)
        if record["step"] >= 30 and "loss" in record:
            lines[i] = json.dumps(record | {"loss": record["loss"] + 0.5})
    (runs[1] / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    edit(runs[1] / "samples-1.jsonl", "2-1", "2-9")
    save(runs[1], 40, ARRAYS | {"params/b": ARRAYS["step"]})
    code, record, text = compare(runs, capsys)
    assert (code, record["are_equal"]) == (1, False)
    assert record["configuration"]["fields"] == {"moe.top_k": [2, 3]}
    metrics = record["metrics"]
    assert metrics["first_field"] == "loss"
    assert metrics["fields"]["loss"]["first_step"] == 30
    assert metrics["fields"]["loss"]["count"] == 11
    assert metrics["fields"]["loss"]["max_difference"] == pytest.approx(0.5)
    assert metrics["steps_of_one_run"] == [[40], []]
    assert record["samples"]["steps"] == [2]
    assert record["checkpoints"]["leaves"] == {"40": ["params/b"]}
    for part in ("step 30, in loss", "moe.top_k: 2 and 3", "step 40: params/b"):
        assert part in text


def test_times_are_left_out_and_nothing_else(runs, capsys):
    """The saving that the cost model sees is in msec and depends on no clock."""
    for number, run in enumerate(runs):
        record = {"step": 1, "loss": 2.0, "modelled_saving_msec": 3.0 + number}
        record |= dict.fromkeys(TIMED, 5.0 + number)
        (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    code, record, _ = compare(runs, capsys)
    assert code == 1
    assert list(record["metrics"]["fields"]) == ["modelled_saving_msec"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"step": 1}\n[]\n'),
        ("samples-1.jsonl", '{"step": 1, "rows": [0], "ids": []}\n'),
        ("samples-0.jsonl", '{"step": 1, "rows": 3, "ids": [1]}\n'),
        ("config.gin", "Moe.topk = 4\n"),
        ("checkpoints/40/record/metadata", "{}"),
    ],
)
def test_a_damaged_file_is_named(runs, capsys, name, text):
    (runs[1] / name).write_bytes(text.encode(errors="surrogateescape"))
    assert compare_runs.main(list(map(str, runs))) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert str(runs[1] / name.split("/record")[0]) in err


def test_numbers_beyond_the_largest_float_differ_by_no_amount(runs, capsys):
    for run, number in zip(runs, (10**400, 1.5), strict=True):
        (run / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {number}}}\n')
    assert compare_runs.main(list(map(str, runs))) == 1
    assert "loss: 1 lines from step 1 on\n" in capsys.readouterr().out


def test_no_run_and_no_metrics(runs, tmp_path, capsys):
    for other, missing in ((tmp_path, "config.gin"), (runs[1], "metrics.jsonl")):
        (runs[1] / "metrics.jsonl").unlink(missing_ok=True)
        assert compare_runs.main([str(runs[0]), str(other)]) == 2
        assert missing in capsys.readouterr().err


def test_jax_is_not_imported(runs, repo):
    code = (
        "import sys; from tools.compare_runs import main; "
        f"code = main({list(map(str, runs))!r}); "
        "sys.exit(code if 'jax' not in sys.modules else 9)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=repo, check=True)
