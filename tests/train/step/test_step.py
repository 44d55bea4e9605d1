"""One training step: on any mesh, with accumulation, and with non-finite updates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from moejax.axes import make_mesh
from moejax.config import Config, Data, Model, Moe, Optimizer, Router, Train
from moejax.moe.types import Windows
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from moejax.resolve.resolved import resolve
from tests.support.close import assert_close
from train.step.compiled import on_devices
from train.step.optimizer import is_decayed, learning_rate, make_optimizer
from train.step.state import abstract_state, init_state
from train.step.step import StepContext, make_train_step, window_sharding

SMALL = Config(
    mesh=Topology(data=2, expert=4),
    model=Model(
        vocab_size=64,
        d_model=32,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        d_ff=64,
        first_k_dense=1,
        qk_norm="head",
        compute_dtype="float32",
    ),
    moe=Moe(num_experts=8, top_k=2, d_expert=32, num_shared_experts=1),
    router=Router(balance_loss=0.02, sequence_balance_loss=0.01, jitter=0.01),
    data=Data(seq_len=16),
    train=Train(batch_size=16, num_steps=10, logit_z_loss=1e-4, loss_chunk=8),
)
WINDOWS = np.random.default_rng(0).integers(0, 64, (16, 17)).astype(np.int32)
POSITIONS = np.tile(np.r_[0:6, 0:11], (16, 1)).astype(np.int32)
"""Positions of two documents in each window."""


def keep_gradients() -> optax.GradientTransformation:
    """Return an optimizer that stores the last gradient and changes no parameter."""

    def update(grads, _state, _params=None):
        return jax.tree.map(jnp.zeros_like, grads), grads

    return optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.zeros_like, p), update
    )


def take_step(cfg: Config, optimizer=None, windows_bt=WINDOWS, change=lambda s: s):
    """Return the states before and after one step and its metrics, all as NumPy."""
    optimizer = optimizer or keep_gradients()
    devices = jax.devices()[: cfg.mesh.num_devices]
    mesh = make_mesh(cfg.mesh, devices)
    model = StepContext(resolve(cfg, mesh), optimizer)
    plan = ExpertPlan.home_in(model.layout, cfg.model.num_moe_layers)
    placement = on_devices(plan, model.layout, mesh)
    state = change(init_state(model.run, optimizer))
    before = jax.device_get(state)
    shape = (cfg.train.accumulate_steps, -1, windows_bt.shape[1])
    windows = Windows(windows_bt, POSITIONS[: len(windows_bt)])
    windows = jax.tree.map(lambda leaf: leaf.reshape(shape), windows)
    windows = jax.device_put(windows, window_sharding(mesh))
    after, metrics = make_train_step(model)(state, placement, windows)
    return before, jax.device_get(after), jax.device_get(metrics)


def with_mesh(cfg: Config, **sizes) -> Config:
    return dataclasses.replace(cfg, mesh=Topology(**sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"expert": 4}, marks=pytest.mark.long),
        pytest.param({"dc": 2, "expert": 2}, marks=pytest.mark.long),
    ],
)
def test_eight_devices_equal_four_and_one(sizes):
    """Loss and gradients agree to 1e-5 relative, the tolerance for float32."""
    _, eight, metrics = take_step(SMALL)
    _, other, expected = take_step(with_mesh(SMALL, **sizes))
    assert_close(eight.params, other.params)
    assert_close(eight.opt_state, other.opt_state)
    assert abs(metrics.loss / expected.loss - 1) < 1e-5
    assert abs(metrics.grad_norm / expected.grad_norm - 1) < 1e-5
    assert (metrics.routing.tokens_le == expected.routing.tokens_le).all()


@pytest.mark.long
def test_accumulation_is_the_mean_over_micro_batches():
    """Losses but `balance` are means over tokens, so micro-batches do not change them.
    `balance` is the mean over the micro-batches' values (decision 0003)."""
    router = dataclasses.replace(SMALL.router, balance_loss=0.0, jitter=0.0)
    whole = dataclasses.replace(SMALL, router=router)
    train = dataclasses.replace(SMALL.train, accumulate_steps=2)
    halves = dataclasses.replace(whole, train=train)
    _, expected_state, expected = take_step(whole)
    _, state, metrics = take_step(halves)
    assert_close(state.opt_state, expected_state.opt_state)
    assert abs(metrics.loss / expected.loss - 1) < 1e-5
    assert_close(metrics.router.z, expected.router.z)
    assert_close(metrics.router.sequence_balance, expected.router.sequence_balance)
    assert (metrics.routing.tokens_le == expected.routing.tokens_le).all()
    half = dataclasses.replace(train, batch_size=8, accumulate_steps=1)
    first, second = (
        take_step(dataclasses.replace(whole, train=half), windows_bt=half_bt)[2]
        for half_bt in np.split(WINDOWS, 2)
    )
    mean = (first.router.balance + second.router.balance) / 2
    assert_close(metrics.router.balance, mean)
    assert np.abs(metrics.router.balance - expected.router.balance).max() > 1e-4


@pytest.mark.long
def test_a_non_finite_update_changes_only_counters():
    """With NaN in one parameter, only the step and the count of skips change."""
    optimizer = make_optimizer(SMALL.optimizer, 10)
    poison = jax.jit(lambda leaf: leaf.at[0].set(jnp.nan))

    def change(state):
        norm = {"scale_d": poison(state.params["norm"]["scale_d"])}
        return state.replace(params=state.params | {"norm": norm})

    model = dataclasses.replace(SMALL.model, num_layers=1, first_k_dense=0)
    cfg = dataclasses.replace(with_mesh(SMALL), model=model)
    before, after, metrics = take_step(cfg, optimizer, change=change)
    assert metrics.is_skipped
    assert metrics.skipped_in_a_row == after.skipped_in_a_row == 1
    assert after.step == before.step + 1
    for part in ("params", "opt_state", "router_bias"):
        pairs = zip(*(jax.tree.leaves(getattr(s, part)) for s in (before, after)))
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def test_state_is_fully_sharded():
    """Experts and dense matrices are sharded over expert and data, moments likewise."""
    mesh = make_mesh(SMALL.mesh)
    optimizer = make_optimizer(SMALL.optimizer, 10)
    wide_model = dataclasses.replace(SMALL.model, d_ff=256)
    cfg = dataclasses.replace(SMALL, model=wide_model)
    state = abstract_state(resolve(cfg, mesh), optimizer)
    block = state.params["cycles"]["blocks"][0]
    assert block["moe"]["gate_edf"].sharding.spec == P(None, "expert", None, "data")
    assert block["moe"]["down_efd"].sharding.spec == P(None, "expert", "data", None)
    wide = state.params["prefix"]["dense"]["gate_df"]
    assert wide.sharding.spec == P(None, None, ("data", "expert"))
    small = state.params["norm"]["scale_d"]
    assert small.sharding.spec == P(), "small parameters are replicated"
    moments = jax.tree.leaves(state.opt_state[1].mu)
    master_params = jax.tree.leaves(state.params)
    assert [m.sharding for m in moments] == [p.sharding for p in master_params]


@pytest.mark.slow
def test_decay_acts_on_matrices_only():
    decayed = is_decayed(init_state(resolve(SMALL, make_mesh(SMALL.mesh)),
                                    keep_gradients()).params)  # fmt: skip
    block = decayed["cycles"]["blocks"][0]
    assert block["attention"]["q_dhi"]
    assert block["moe"]["gate_edf"]
    assert not block["ff_norm"]["scale_d"]
    assert not decayed["embed_vd"]


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_learning_rate_rises_and_falls(decay):
    cfg = Optimizer(learning_rate=1.0, warmup_steps=10, decay=decay, final_lr_ratio=0.1)
    rate = learning_rate(cfg, 100)
    assert np.isclose(rate(0), 0.1)
    assert np.isclose(rate(9), 1.0)
    assert np.isclose(rate(10), 1.0)
    assert np.isclose(rate(100), 1.0 if decay == "constant" else 0.1)
    assert all(rate(i) <= rate(i - 1) + 1e-6 for i in range(11, 100))


def test_a_bfloat16_moment_is_rounded_once_an_update():
    """The moment rests in bfloat16; its average and the update are in float32. optax's
    mu_dtype would multiply by b1 = 0.8984, which is 0.9 in bfloat16."""
    cfg = Optimizer(mu_dtype="bfloat16", weight_decay=0.0, clip_norm=0.0)
    optimizer = make_optimizer(cfg, 10)
    rng = np.random.default_rng(0)
    params = {"w": jnp.zeros(64)}
    state, mu, nu = optimizer.init(params), jnp.zeros(64, jnp.bfloat16), 0.0
    for count in range(1, 4):
        grad = jnp.asarray(rng.standard_normal(64), jnp.float32)
        updates, state = optimizer.update({"w": grad}, state, params)
        mean = 0.9 * mu.astype(jnp.float32) + (1 - 0.9) * grad
        mu, nu = mean.astype(jnp.bfloat16), 0.95 * nu + (1 - 0.95) * grad**2
        root = jnp.sqrt(nu / (1 - 0.95**count)) + cfg.eps
        rate = learning_rate(cfg, 10)(count - 1)
        assert_close(updates["w"], -rate * mean / (1 - 0.9**count) / root)
        assert state[1].mu["w"].dtype == jnp.bfloat16
        assert_close(state[1].mu["w"], mu)
        assert state[1].nu["w"].dtype == jnp.float32
