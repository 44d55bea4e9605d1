"""The optimizer and the state: what is decayed, the learning rate, a moment in
bfloat16, and how the state lies on devices."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from moejax.axes import make_mesh
from moejax.config import Optimizer
from moejax.plan.layout import Topology
from moejax.resolve.resolved import resolve
from tests.support.close import assert_close
from tests.support.steps import WIDTH, configure
from train.step.optimizer import is_decayed, learning_rate, make_optimizer
from train.step.state import abstract_state, init_state
from train.step.step import _num_updates

CFG = configure(
    model={"num_layers": 3, "first_k_dense": 1, "d_ff": 256, "qk_norm": "head"},
    router={"balance_loss": 0.02, "jitter": 0.01},
    train={"logit_z_loss": 1e-4},
)
ADAMW = make_optimizer(CFG.optimizer, 10)


def make_abstract():
    """Return the abstract state of CFG under AdamW."""
    return abstract_state(resolve(CFG, make_mesh(CFG.mesh)), ADAMW)


@pytest.mark.long
def test_a_run_starts_with_the_same_bits_on_any_mesh():
    states = (
        init_state(resolve(dataclasses.replace(CFG, mesh=mesh), make_mesh(mesh)), ADAMW)
        for mesh in (CFG.mesh, Topology(dc=2, data=2, expert=2))
    )
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, states))


def test_state_is_fully_sharded():
    """Experts and dense matrices are sharded over expert and data, moments likewise."""
    state = make_abstract()
    block = state.params["cycles"]["blocks"][0]
    assert block["moe"]["gate_edf"].sharding.spec == P(None, "expert", None, "data")
    assert block["moe"]["down_efd"].sharding.spec == P(None, "expert", "data", None)
    wide = state.params["prefix"]["dense"]["gate_df"]
    assert wide.shape == (1, WIDTH, 256)
    assert wide.sharding.spec == P(None, None, ("data", "expert"))
    small = state.params["norm"]["scale_d"]
    assert small.sharding.spec == P(), "small parameters are replicated"
    moments = jax.tree.leaves(state.opt_state[1].mu)
    master_params = jax.tree.leaves(state.params)
    assert [m.sharding for m in moments] == [p.sharding for p in master_params]


def test_decay_acts_on_matrices_only():
    decayed = is_decayed(make_abstract().params)
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


def test_wsd_is_constant_and_then_falls_with_a_root():
    """Until the decay begins the rate is that of 'constant', so that one constant run
    can end in decays of several lengths."""
    fields = {"learning_rate": 1.0, "warmup_steps": 10, "final_lr_ratio": 0.1}
    stable = learning_rate(Optimizer(decay="constant", **fields), 60)
    for num_steps, share in ((100, 0.4), (80, 0.25), (61, 1 / 61)):
        rate = learning_rate(
            Optimizer(decay="wsd", decay_share=share, **fields), num_steps
        )
        begin, length = 60, num_steps - 60
        assert [float(rate(i)) for i in range(61)] == [
            float(stable(i)) for i in range(61)
        ]
        for step in range(begin, num_steps + 5):
            done = min((step - begin) / length, 1.0)
            expected = 1.0 - 0.9 * np.sqrt(done)
            np.testing.assert_allclose(rate(step), expected, rtol=1e-5)


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


def test_the_rate_that_is_logged_is_that_of_the_update():
    """A skipped update leaves the optimizer's count, and so its schedule, where it was.
    The size of an update of Adam's first step is the rate."""
    cfg = Optimizer(warmup_steps=4, weight_decay=0.0, clip_norm=0.0)
    optimizer, params = make_optimizer(cfg, 10), {"w": jnp.zeros(3)}
    opt_state, logged = optimizer.init(params), []
    for step in range(5):
        state = SimpleNamespace(step=step, opt_state=opt_state)
        logged.append(float(learning_rate(cfg, 10)(_num_updates(state))))
        updates, after = optimizer.update({"w": jnp.ones(3)}, opt_state, params)
        np.testing.assert_allclose(-updates["w"], logged[-1], rtol=1e-4)
        opt_state = opt_state if step == 1 else after
    assert logged[1] == logged[2] < logged[3] < logged[4]
    plain = SimpleNamespace(step=7, opt_state=optax.sgd(0.1).init(params))
    assert _num_updates(plain) == 7
