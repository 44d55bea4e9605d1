"""Test the records of steps and the file metrics.jsonl."""

import dataclasses
import errno
import json
import math

import numpy as np
import pytest

from moejax.config import Config, Train
from moejax.moe.types import RouterLosses, RoutingStats
from tests.support.close import assert_close
from train.logs import record_lines
from train.logs import records as records_module
from train.logs.records import MetricsLog, Records, home_std_over_std, step_record
from train.logs.run_dir import RunDir
from train.logs.track.setup import Setup
from train.step.step import StepMetrics


def make_metrics(rng) -> StepMetrics:
    """Return random metrics of a step with 2 layers, 4 devices and 8 experts."""
    routing = RoutingStats(
        tokens_lwe=rng.integers(1, 9, (2, 4, 8)),
        rows_lw=rng.integers(1, 99, (2, 4)),
        rounds_l=np.ones(2, np.int32),
        dropped_l=np.zeros(2, np.int32),
        fullest_pair_l=np.full(2, 7),
        fullest_device_l=np.full(2, 25),
        bound_l=np.full(2, 20),
    )
    losses = RouterLosses(*[np.ones(2)] * 5)
    return StepMetrics(2.0, 2.5, losses, 1.0, 1e-3, False, 0, routing)


def test_loads_are_logged_every_log_load_every_steps(tmp_path):
    rng = np.random.default_rng(0)
    cfg = Config(train=Train(log_load_every_steps=3))
    routing = []
    tracking = Setup(("tensorboard",), str(tmp_path), 0, "a = 1", {})
    with Records(RunDir(tmp_path, None), cfg, 0, tracking) as records:
        for step in range(1, 8):
            metrics = make_metrics(rng)
            routing.append(metrics.routing)
            record = step_record(step, metrics, 0.5, 100)
            records.step(record, metrics.routing.tokens_le)
            if step == 4:
                decision = {
                    "kind": "keep",
                    "device_max_over_mean_before": 1.5,
                    "device_max_over_mean_after": 1.5,
                }
                records.event({"step": step, "decision": decision})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records.pop(4) == {"step": 4, "decision": decision}
    for step, (record, stats) in enumerate(zip(records, routing, strict=True), start=1):
        assert record["step"] == step
        is_due = step % 3 == 0
        assert ("rows_lw" in record) == ("tokens_le" in record) == is_due
        if is_due:
            assert record["rows_lw"] == stats.rows_lw.tolist()
            assert record["tokens_le"] == stats.tokens_lwe.sum(axis=1).tolist()
        ratio_l = stats.rows_lw.max(axis=1) / stats.rows_lw.mean(axis=1)
        rounded_l = np.array(record["device_max_over_mean"])
        assert_close(rounded_l, ratio_l.round(4))
    (board,) = (tmp_path / "tensorboard").iterdir()
    assert b"balance/device_max_over_mean_before" in board.read_bytes()


def test_home_std_over_std_is_the_ratio_of_deviations():
    """RB of Pro-Prophet, by layer: 2 where deviations are halved, whatever the number
    of devices; 1 where nothing changes, and infinite where none is left."""
    home_lw = np.array([[1, 3, 5, 7], [1, 3, 5, 7], [4, 4, 4, 4], [1, 3, 5, 7]])
    rows_lw = np.array([[5, 7, 9, 11], [1, 3, 5, 7], [8, 8, 8, 8], [4, 4, 4, 4]])
    found_l = home_std_over_std(home_lw, rows_lw)
    std = home_lw[0].std() / 4 / (rows_lw[0].std() / 8)
    assert found_l == [pytest.approx(std), 1.0, 1.0, np.inf]
    assert std == pytest.approx(2.0)


def test_dropped_choices_are_a_share_of_all():
    metrics = make_metrics(np.random.default_rng(1))
    num_choices = int(metrics.routing.tokens_lwe.sum())
    dropped_l = np.array([3, 4])
    routing = dataclasses.replace(metrics.routing, dropped_l=dropped_l)
    record = step_record(1, dataclasses.replace(metrics, routing=routing), 0.5, 100)
    assert record["dropped"] == 7
    assert record["dropped_share"] == pytest.approx(7 / num_choices, abs=1e-6)


def test_experts_without_a_choice_are_dead_for_the_step():
    metrics = make_metrics(np.random.default_rng(2))
    tokens_lwe = metrics.routing.tokens_lwe.copy()
    tokens_lwe[1, :, [2, 5]] = 0
    tokens_lwe[0, 1:, 3] = 0  # chosen by tokens of one device
    routing = dataclasses.replace(metrics.routing, tokens_lwe=tokens_lwe)
    record = step_record(1, dataclasses.replace(metrics, routing=routing), 0.5, 100)
    assert record["dead_experts"] == [0, 2]


def read_steps(path):
    """Return the steps of the lines of a file."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_metrics_are_valid_json(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(
        {
            "step": 1,
            "loss": np.float32(1.5),
            "bad": [math.nan, -math.inf, {"deep": (np.float64("inf"), 2.0)}],
            "rounds_l": np.array([1, 2]),
            "ratio_l": np.array([np.nan, 1.25], np.float32),
        }
    )

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.endswith("}\n")
    assert json.loads(text, parse_constant=refuse) == {
        "step": 1,
        "loss": 1.5,
        "bad": [None, None, {"deep": [None, 2.0]}],
        "rounds_l": [1, 2],
        "ratio_l": [None, 1.25],
    }
    log.close()


@pytest.mark.parametrize(
    "torn", [b"", b'{"step": 2, "lo', b'{"step": 2}', b"\0\0\0\n", b"[2]\n", b"\xff\n"]
)
@pytest.mark.parametrize("step", [0, 1, 3, 9])
def test_cut_back(tmp_path, step, torn):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for k in (1, 2, 2, 3):
        log.append({"step": k})
    log.close()
    with path.open("ab") as file:
        file.write(torn)
    log = MetricsLog(path)
    log.cut_back(step)
    kept = [k for k in (1, 2, 2, 3) if k <= step]
    assert read_steps(path) == kept
    log.append({"step": step + 1})
    assert read_steps(path) == [*kept, step + 1]
    log.close()
    log.close()


def test_lines_are_there_before_close(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for k in range(3):
        log.append({"step": k})
        assert read_steps(tmp_path / "metrics.jsonl") == list(range(k + 1))
    log.close()


def test_full_disk_costs_lines_and_not_the_run():
    messages = []
    log = MetricsLog("/dev/full", say=messages.append)
    for k in range(3):
        log.append({"step": k})
    assert len(messages) == 1
    assert "METRICS NOT WRITTEN from step 0 on" in messages[0]
    assert "No space left" in messages[0]


def test_line_that_fits_in_part_is_taken_back(tmp_path, monkeypatch):
    """A line that a full disk cuts off is removed, so that the file has whole lines
    only."""
    messages = []
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, say=messages.append)
    log.append({"step": 1})
    whole = log._file

    class Short:
        write = staticmethod(lambda line: whole.write(line[:4]))
        fileno, truncate = whole.fileno, whole.truncate

    monkeypatch.setattr(log, "_file", Short)
    log.append({"step": 2})
    log.append({"step": 3})
    monkeypatch.setattr(log, "_file", whole)
    log.append({"step": 4})
    assert read_steps(path) == [1, 4]
    assert len(messages) == 2
    assert "written again, without 2 lines" in messages[1]
    log.close()


def test_an_error_of_the_last_sync_is_said_and_ends_nothing(tmp_path, monkeypatch):
    messages = []
    log = MetricsLog(tmp_path / "metrics.jsonl", say=messages.append)
    log.append({"step": 1})

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(records_module.os, "fsync", fail)
    log.close()
    assert "METRICS MAY BE LOST" in messages[0]
    assert str(tmp_path / "metrics.jsonl") in messages[0]


def test_an_error_of_a_cut_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_lines.os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"):
        record_lines.cut_back(path, 1, pytest.fail)
