"""Runs with the options of published families and a policy: swaps while their own
routers choose, resumes, and steps that are those of the home plan."""

import shutil

import numpy as np
import pytest

from tests.support.close import assert_close
from tests.support.run_main import checkpoint_record, metric_lines
from tests.support.watched_run import restored, run_here, watched
from train.balance.record import BalanceRecord
from train.data.feed import feed
from train.step.compiled import on_devices

pytestmark = [pytest.mark.slow, pytest.mark.long]  # two programs for each family
NUM_STEPS, EVERY = 36, 6
LEARNED = (
    "Router.balance_loss = 0.0", f"Train.num_steps = {NUM_STEPS}",
    f"Checkpoint.every_steps = {EVERY}", "Checkpoint.keep_last = 20",
    "Train.eval_every_steps = 100", "Balance.every_steps = 3",
    "Balance.act_above = 1.05", "Balance.rest_below = 1.01", "Rope.scaling = 'yarn'",
    "Rope.factor = 4.0", "Rope.original_max_position_embeddings = 64",
    "Model.num_heads = 2",
)  # fmt: skip
FAMILIES = {
    "gpt_oss": (
        "Router.kind = 'softmax'", "Router.bias = True", "Moe.expert_bias = True",
        "Moe.activation = 'clamped_swiglu'", "Moe.swiglu_limit = 0.5",
        "Model.num_layers = 2", "Attention.layers = ('sliding', 'full')",
        "Attention.sliding_window = 5", "Attention.bias = 'all'",
        "Attention.sinks = True", "Rope.truncate = False",
    ),
    "deepseek": (
        "Router.kind = 'sigmoid'", "Router.bias_rate = 0.001", "Router.num_groups = 4",
        "Router.top_groups = 2", "Router.gate_scale = 2.5", "Model.num_layers = 3",
        "Model.first_k_dense = 1", "Model.num_kv_heads = 2", "Model.d_ff = 32",
        "Mla.kv_lora_rank = 8", "Mla.q_lora_rank = 6", "Mla.qk_nope_head_dim = 4",
        "Mla.qk_rope_head_dim = 4", "Mla.v_head_dim = 6", "Rope.mscale = 1.0",
        "Rope.mscale_all_dim = 1.0", "Moe.num_shared_experts = 1",
    ),
}  # fmt: skip
OTHERS = {
    "gpt_oss": ("Moe.swiglu_limit = 0.6", "moe.swiglu_limit: 0.5 saved, 0.6 here"),
    "deepseek": ("Mla.norm_eps = 1e-5", "mla.norm_eps: 1e-06 saved, 1e-05 here"),
}
"""An option of each family with another value, and what the refusal says."""
HOME = "Balance.policy = 'home'"


@pytest.fixture(scope="module", params=FAMILIES)
def done(request, tmp_path_factory):
    """The family, a house of its own, its parameters, and a run with swaps."""
    params = (*LEARNED, *FAMILIES[request.param])
    with watched() as house:
        run_dir = tmp_path_factory.mktemp(request.param) / "run"
        yield request.param, house, params, run_here(house, run_dir, *params)


def losses(run) -> np.ndarray:
    return np.float32([line["loss"] for line in run.steps.values()])


def test_experts_are_swapped_and_the_loss_falls(done):
    _, _, _, run = done
    assert len(run.adopted) >= 2
    assert {x["kind"] for x in run.decisions} <= {"swap", "keep"}
    loss_t = losses(run)
    assert len(loss_t) == NUM_STEPS
    assert np.isfinite(loss_t).all()
    assert loss_t[-5:].mean() < loss_t[:5].mean() - 0.3


def test_each_step_is_that_of_the_home_plan(done, tmp_path):
    """From each saved state, the loss of the next step under the home plan is what the
    run with swaps logged."""
    _, house, params, run = done
    num_swapped = 0
    for saved in range(EVERY, NUM_STEPS, EVERY):
        there = tmp_path / str(saved) / "checkpoints" / str(saved)
        shutil.copytree(run.run_dir / "checkpoints" / str(saved), there)
        job, state, now = restored(there.parents[1], *params, HOME)
        state, home = now.begin(state), job.model.run.home_plan()
        num_swapped += run.plan(saved) != home
        assert now.plan == home
        placement = on_devices(now.plan, now.layout, job.model.mesh)
        sizes = job.cfg.train.batch_size, 1, job.window_sharding
        windows = feed(job.batches, saved, *sizes)
        _, metrics = house.steps(job.model)[0](state, placement, windows)
        assert_close(np.float32(metrics.loss), np.float32(run.steps[saved + 1]["loss"]))
    assert num_swapped >= 2


def test_a_resumed_run_is_the_same_run(done, tmp_path):
    """Every metric of a step, every decision and the final arrays are; a part of the
    run also evaluates at its end."""
    _, house, params, run = done
    run_dir = tmp_path / "run"
    for stop in (8, 21, NUM_STEPS):
        run_here(house, run_dir, *params, f"Train.num_steps = {stop}")
    lines, expected = (
        [line for line in metric_lines(x) if "eval_loss" not in line]
        for x in (run_dir, run.run_dir)
    )
    assert lines == expected
    records = [checkpoint_record(x, NUM_STEPS) for x in (run_dir, run.run_dir)]
    assert records[0]["arrays"] == records[1]["arrays"]
    assert records[0]["meta"]["plan"] == records[1]["meta"]["plan"]
    balances = [BalanceRecord.from_json(x["meta"]["balance"]) for x in records]
    assert balances[0].settled() == balances[1].settled()


def test_a_resume_with_another_function_is_refused(done, tmp_path):
    family, house, params, run = done
    change, words = OTHERS[family]
    run_dir = tmp_path / "run"
    shutil.copytree(run.run_dir, run_dir)
    with pytest.raises(ValueError, match="checkpoint of another model") as error:
        run_here(house, run_dir, *params, change)
    assert words in str(error.value)
