import json

import numpy as np

from moejax.config import Config, Train
from moejax.moe.types import RouterLosses, RoutingStats
from tests.support.close import assert_close
from train.logs.metrics import step_record
from train.logs.records import Records
from train.logs.run_dir import RunDir
from train.step.step import StepMetrics


def metrics_of(rng) -> StepMetrics:
    routing = RoutingStats(
        tokens_lwe=rng.integers(1, 9, (2, 4, 8)),
        rows_lw=rng.integers(1, 99, (2, 4)),
        rounds_l=np.ones(2, np.int32),
        dropped_l=np.zeros(2, np.int32),
        fullest_pair_l=np.full(2, 7),
        fullest_device_l=np.full(2, 25),
        bound_l=np.full(2, 20),
    )
    losses = RouterLosses(*[np.ones(2)] * 4)
    return StepMetrics(2.0, 2.5, losses, 1.0, 1e-3, False, 0, routing)


def test_loads_of_experts_and_devices_stand_every_so_many_steps(tmp_path):
    rng = np.random.default_rng(0)
    cfg = Config(train=Train(log_load_every_steps=3))
    routing = []
    with Records(RunDir(tmp_path, None), cfg, 0, "a = 1") as records:
        for step in range(1, 8):
            metrics = metrics_of(rng)
            routing.append(metrics.routing)
            record = step_record(step, metrics, 0.5, 100)
            records.step(record, metrics.routing.tokens_le)
            if step == 4:
                decision = {"kind": "keep", "ratio_before": 1.5, "ratio_after": 1.5}
                records.event({"step": step, "decision": decision})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert found.pop(4) == {"step": 4, "decision": decision}
    for step, (record, stats) in enumerate(zip(found, routing, strict=True), start=1):
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
    assert b"balance/ratio_before" in board.read_bytes()
