"""Steps in which only some tokens are targets: the loss is the mean over all targets of
the global batch, however it is cut."""

import functools

import jax
import numpy as np
import pytest

from moejax.axes import make_mesh
from moejax.moe.types import Windows
from moejax.plan.layout import Topology
from moejax.resolve.resolved import resolve
from tests.support.close import assert_close
from tests.support.steps import BATCH, SEQ, configure
from train.step.compiled import make_model, on_devices
from train.step.state import init_state
from train.step.step import make_eval_step, make_train_step, window_sharding

pytestmark = pytest.mark.slow
ONE, EIGHT = Topology(), Topology(data=2, expert=4)


def make_windows(model, is_target_bt) -> Windows:
    """Return windows of random tokens with these targets, in micro-batches."""
    rng, shape = np.random.default_rng(0), (BATCH, SEQ + 1)
    arrays = rng.integers(0, 16, shape), np.broadcast_to(np.arange(SEQ + 1), shape)
    count = model.cfg.train.accumulate_steps
    windows = Windows(*(x.astype(np.int32) for x in arrays), is_target_bt)
    windows = jax.tree.map(lambda x: x.reshape(count, -1, SEQ + 1), windows)
    return jax.device_put(windows, window_sharding(model.mesh))


@functools.cache
def make_step(mesh: Topology, accumulate_steps: int):
    """Return a run's context, its first state and its step. Without auxiliary losses,
    whose means over micro-batches depend on how a batch is cut."""
    cfg = configure(
        mesh=mesh, train={"accumulate_steps": accumulate_steps},
        router={"sequence_balance_loss": 0.0, "z_loss": 0.0},
        optimizer={"clip_norm": 0.0, "eps": 1.0},
    )  # fmt: skip
    devices = jax.devices()[: mesh.num_devices]
    run = resolve(cfg, make_mesh(mesh, devices))
    model = make_model(run)._replace(has_targets=True)
    return model, make_train_step(model)


def stepped(mesh: Topology, accumulate_steps: int, is_target_bt):
    """Return the loss of a step, its gradient's norm and the parameters after it."""
    model, step = make_step(mesh, accumulate_steps)
    state = init_state(model.run, model.optimizer, model.layout.store)
    place = on_devices(model.run.home_plan(), model.layout, model.mesh)
    state, metrics = step(state, place, make_windows(model, is_target_bt))
    return jax.device_get((metrics.loss, metrics.grad_norm, state.params))


@pytest.mark.parametrize(("mesh", "accumulate"), [(EIGHT, 1), (EIGHT, 2), (ONE, 4)])
def test_the_mean_is_over_the_targets_of_the_whole_batch(mesh, accumulate):
    """Micro-batches and devices have unequal numbers of targets, and one window has
    none. Beside it stands one micro-batch on one device, whose loss is compared with
    the nats that each window has by itself, as the only one with targets."""
    rng = np.random.default_rng(1)
    is_target_bt = (
        rng.uniform(size=(BATCH, SEQ + 1)) < np.linspace(0, 0.9, BATCH)[:, None]
    )
    is_target_bt[3] = False
    expected = stepped(ONE, 1, is_target_bt)
    assert_close(stepped(mesh, accumulate, is_target_bt), expected)
    if (mesh, accumulate) != (EIGHT, 1):
        return
    model, _ = make_step(ONE, 1)
    evaluate = make_eval_step(model)
    state = init_state(model.run, model.optimizer, model.layout.store)
    place = on_devices(model.run.home_plan(), model.layout, model.mesh)
    nats, number = [], is_target_bt[:, 1:].sum(axis=1)
    for row in range(BATCH):
        alone = is_target_bt & (np.arange(BATCH) == row)[:, None]
        args = state.params, state.router_bias, place, make_windows(model, alone)
        nats.append(float(evaluate(*args)[0]))
    assert nats[3] == 0.0
    assert_close(np.sum(number * nats) / number.sum(), expected[0], dtype=np.float32)


def test_a_batch_without_targets_changes_nothing():
    """Its loss is 0, and no parameter moves but by weight decay."""
    loss, grad_norm, _ = stepped(EIGHT, 1, np.zeros((BATCH, SEQ + 1), bool))
    assert loss == grad_norm == 0.0
