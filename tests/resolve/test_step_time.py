"""Predicted time of a step: parts by hand, and the GPUs that have run one."""

import dataclasses

import pytest

from moejax.config import Balance, Config, Model, Moe, Optimizer, Train
from moejax.perf import target
from moejax.plan.layout import Topology
from moejax.resolve.speeds import presumed
from tests.support.run_main import ROOT
from train.config import gin_reader
from train.dry_run import dry_run

H100 = target.load("h100")
CFG = Config(
    mesh=Topology(expert=4),
    model=Model(
        vocab_size=1000, d_model=64, num_layers=2, compute_dtype="bfloat16",
        remat="full",
    ),
    moe=Moe(num_experts=8, top_k=2, d_expert=32),
    optimizer=Optimizer(mu_dtype="bfloat16"),
    train=Train(batch_size=16, accumulate_steps=2),
)  # fmt: skip
TOKENS = 16 * 256 / 4
"""Tokens of a device in a step."""


def test_a_schedule_that_auto_takes_costs_what_the_same_one_costs_named():
    """With schedule 'local' owners compute whole experts, which takes as long as all
    of their shards."""
    cfg = dataclasses.replace(CFG, mesh=Topology(tensor=2))
    times = {}
    for schedule in ("auto", "local", "s1h"):
        dispatch = dataclasses.replace(cfg.dispatch, schedule=schedule)
        record = dry_run(dataclasses.replace(cfg, dispatch=dispatch), H100)
        times[schedule] = record["step"]["parts"]["experts"], record["step"]["sec"]
    assert times["local"][0] == pytest.approx(times["s1h"][0])
    assert times["auto"] in (times["local"], times["s1h"])


def test_parts_by_hand():
    record = dry_run(CFG, H100)
    parts, rates = record["step"]["parts"], H100.rates
    # Two choices of three matrices 64 x 32, in two layers; four passes with remat.
    expert_flops = 4 * TOKENS * 2 * 2 * 2 * 3 * 64 * 32
    assert parts["experts"] == pytest.approx(expert_flops / rates.grouped_flops_per_sec)
    head_flops = 4 * TOKENS * 2 * 64 * 1000
    assert parts["head"] == pytest.approx(head_flops / rates.dense_flops_per_sec)
    # Update: 2 x (4 + 4 + 2) bytes and the gradient. Micro-batch: two casts, one sum.
    num_params = record["memory"]["masters"] / 4
    num_bytes = (2 * 10 + 4 + 2 * (2 * 6 + 10)) * num_params
    assert parts["weights"] == pytest.approx(num_bytes / rates.hbm_bytes_per_sec)
    assert record["step"]["sec"] == pytest.approx(sum(parts.values()))
    assert record["step"]["tok_per_sec"] == pytest.approx(
        16 * 256 / record["step"]["sec"]
    )


def test_a_calibration_predicts_a_step_on_this_machine(tmp_path):
    """A calibration has FLOP/s for all products and no rate of memory. Without one no
    step is predicted."""
    speeds = presumed(dataclasses.asdict(CFG.mesh), "cpu")
    path = tmp_path / "calibration.json"
    path.write_text(dataclasses.replace(speeds, when="2026-11-28").to_json())
    record = dry_run(dataclasses.replace(CFG, balance=Balance(calibration=str(path))))
    parts, on_gpu = record["step"]["parts"], dry_run(CFG, H100)["step"]["parts"]
    slower = H100.rates.grouped_flops_per_sec / speeds.flops_per_sec
    assert parts["experts"] == pytest.approx(slower * on_gpu["experts"])
    slower = H100.rates.dense_flops_per_sec / speeds.flops_per_sec
    assert parts["head"] == pytest.approx(slower * on_gpu["head"])
    assert parts["weights"] == 0
    assert record["step"]["mfu"] is None
    assert "step" not in dry_run(CFG)


@pytest.mark.parametrize(
    ("name", "num_layers", "measured_sec", "ratio"),
    [("h100", 8, 0.3468, 1.15), ("h200", 16, 0.5807, 1.12)],
)
def test_gpus_took_as_long_as_the_dry_run_says(name, num_layers, measured_sec, ratio):
    """The clocks of docs/measured.md, and the ratios that the dry run prints."""
    cfg = gin_reader.load(
        [ROOT / "tools/gpu/olmoe.gin"], [f"Model.num_layers = {num_layers}"]
    )
    predicted_sec = dry_run(cfg, target.load(name))["step"]["sec"]
    assert measured_sec / predicted_sec == pytest.approx(ratio, abs=0.005)
