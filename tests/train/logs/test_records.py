"""Test the records of steps and of attempts."""

import contextlib
import dataclasses
import json
import mmap
import types

import numpy as np
import pytest

from moejax.config import Config, Train
from moejax.moe.types import RouterLosses, RoutingStats
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.run_schema import check
from train.logs.records import (
    GIB,
    Records,
    attempt_line,
    home_std_over_std,
    memory_fields,
    step_record,
)
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
    cfg = Config(train=Train(log_load_every_steps=3, log_sources=True))
    routing = []
    with Records(tmp_path, cfg, 0, 1, 0.0, ("tensorboard",), "a = 1") as records:
        for step in range(1, 8):
            metrics = make_metrics(rng)
            routing.append(metrics.routing)
            record = step_record(step, metrics, 0.5, 100)
            stats = metrics.routing
            records.step(record, stats.tokens_le, lambda s=stats: s.tokens_lwe)
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
    loads = tmp_path / "loads.jsonl"
    by_source = [json.loads(line) for line in loads.read_text().splitlines()]
    assert by_source == [
        {"step": step, "load_lwe": routing[step - 1].tokens_lwe.tolist()}
        for step in (3, 6)
    ]
    Records(tmp_path, cfg, 4, 2, 0.0)  # resumes at step 4
    assert [json.loads(x)["step"] for x in loads.read_text().splitlines()] == [3]
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


def test_dropped_choices_are_a_share_and_experts_without_a_choice_are_dead():
    metrics = make_metrics(np.random.default_rng(2))
    tokens_lwe = metrics.routing.tokens_lwe.copy()
    tokens_lwe[1, :, [2, 5]] = 0
    tokens_lwe[0, 1:, 3] = 0  # chosen by tokens of one device
    routing = dataclasses.replace(
        metrics.routing, tokens_lwe=tokens_lwe, dropped_l=np.array([3, 4])
    )
    record = step_record(1, dataclasses.replace(metrics, routing=routing), 0.5, 100)
    assert record["dropped"] == 7
    assert record["dropped_share"] == pytest.approx(7 / tokens_lwe.sum(), abs=1e-6)
    assert record["dead_experts"] == [0, 2]


@pytest.mark.parametrize(
    ("fault", "last_step", "end", "why"),
    [
        (None, 9, "finished", ""),
        (None, 5, "stopped", ""),
        (OSError("no\nspace"), 5, "failed", "no space"),
        (KeyboardInterrupt(), 5, "failed", "KeyboardInterrupt"),
    ],
)
def test_an_attempt_has_a_line_of_its_begin_and_of_its_end(
    tmp_path, fault, last_step, end, why
):
    cfg = Config(mesh=Topology(data=2, expert=4), train=Train(num_steps=9))
    begin = attempt_line(3, 2, 1e9, cfg.mesh)
    with (
        contextlib.suppress(OSError, KeyboardInterrupt),
        Records(tmp_path, cfg, 3, 2, 1e9) as records,
    ):
        assert json.loads((tmp_path / "attempts.jsonl").read_text()) == begin
        metrics = make_metrics(np.random.default_rng(0))
        record = step_record(last_step, metrics, 0.5, 100)
        records.step(record, np.ones((2, 8)), lambda: np.ones((2, 4, 8)))
        if fault is not None:
            raise fault
    lines = (tmp_path / "attempts.jsonl").read_text().splitlines()
    assert len(lines) == 2
    line = json.loads(lines[1])
    check("attempt_begin", begin)
    check("attempt_end", line)
    assert (line["attempt"], line["step"]) == (2, last_step)
    assert (line["end"], line["why"]) == (end, why)


def test_memory_is_that_of_the_fullest_device():
    def device(**sizes_gib: float):
        stats = {name: int(gib * GIB) for name, gib in sizes_gib.items()}
        return types.SimpleNamespace(memory_stats=lambda: stats or None)

    fields = memory_fields(
        [
            device(bytes_in_use=1.5, peak_bytes_in_use=2.5),
            device(bytes_in_use=1.25, peak_bytes_in_use=3.0),
        ]
    )
    assert fields["device_memory_gib"] == 1.5
    assert fields["peak_device_memory_gib"] == 3.0
    without = memory_fields([device()])
    assert without["device_memory_gib"] is without["peak_device_memory_gib"] is None


def test_host_memory_grows_with_what_is_written():
    before = memory_fields([])["host_memory_gib"]
    block = mmap.mmap(-1, 2**26)  # 64 MiB that no allocator has in reserve
    for _ in range(64):
        block.write(b"x" * 2**20)
    grown_mib = 1024 * (memory_fields([])["host_memory_gib"] - before)
    assert 50 < grown_mib < 100
    block.close()
