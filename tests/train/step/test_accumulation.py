"""Gradients that are added up in place over micro-batches: equal to those of a plain
sum, in numbers and in the memory of one copy."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support.close import are_same_bits, assert_close
from tests.support.primitives import equations
from tests.support.steps import (
    BATCH,
    HIDDEN,
    SLOTS,
    SMALL,
    STORES,
    WIDTH,
    E,
    L,
    StepCase,
    case_maker,
    home,
    make_windows,
    model_from,
    one_step,
    warm_state,
)
from train.step.compiled import on_devices, trace_train_step
from train.step.expert_params import take
from train.step.step import LossInputs, StepContext, make_loss

MICRO_BATCHES = 2


def make_context(store: str, dtype: str, remat: str = "none", **train) -> StepContext:
    """Return the context of the small model with a store and these fields of Train."""
    fields = {"slots_per_device": SLOTS} | STORES[store]
    cfg = dataclasses.replace(
        SMALL,
        model=dataclasses.replace(SMALL.model, remat=remat),
        dispatch=dataclasses.replace(SMALL.dispatch, **fields),
        train=dataclasses.replace(SMALL.train, **train),
    )
    return model_from(cfg, dtype)


def mean_of_gradients(case: StepCase, state):
    """Return the mean loss and the mean gradient of the parameters, from one call of
    jax.value_and_grad for each micro-batch."""
    model, windows = case.model, make_windows(case, 0)
    loss_fn = make_loss(model)
    placement = on_devices(home(case), model.layout, model.mesh)
    state = jax.device_put(state, case.shardings)

    @jax.jit
    def value_and_grad(params, windows):
        inputs = LossInputs(placement, windows, jax.random.key(0), 0, True)
        loss = jax.value_and_grad(loss_fn, has_aux=True)
        (total, _), grads = loss(params, state.router_bias, inputs)
        return total, grads

    batches = [jax.tree.map(lambda x, i=i: x[i], windows) for i in range(MICRO_BATCHES)]
    parts = [jax.device_get(value_and_grad(state.params, batch)) for batch in batches]
    return jax.tree.map(lambda *leaves: sum(leaves) / MICRO_BATCHES, *parts)


@pytest.mark.parametrize(
    ("store", "remat"),
    [
        ("owned", "full"),
        pytest.param("resident", "full", marks=pytest.mark.long),
        pytest.param("prefetched", "none", marks=pytest.mark.long),
        pytest.param("sharded", "full", marks=pytest.mark.long),
    ],
)
def test_the_sum_in_place_equals_the_sum_of_gradients(doubles, store, remat):
    model = make_context(store, doubles, remat, accumulate_steps=MICRO_BATCHES)
    case = case_maker(model)
    start = warm_state(doubles)
    state, metrics = one_step(case, start, home(case))
    total, grads = mean_of_gradients(case, start)
    assert_close(metrics.total_loss, total)
    assert_close(state.opt_state[0], grads)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


@pytest.mark.long
def test_gradients_of_bfloat16_slots_are_summed_in_float32():
    """Experts' gradients of eight equal micro-batches are those of one, bit for bit: a
    sum of equal bfloat16 numbers is exact in float32, and is rounded in bfloat16."""
    start = warm_state("bfloat16")
    one = case_maker(make_context("resident", "bfloat16"))
    copies = {"batch_size": 8 * BATCH, "accumulate_steps": 8}
    eight = case_maker(make_context("resident", "bfloat16", **copies))
    windows = make_windows(one, 0)
    again = jax.tree.map(lambda leaf: np.tile(leaf, (8, 1, 1)), windows)
    states = []
    for case, batch in ((one, windows), (eight, again)):
        state = jax.device_put(start, case.shardings)
        placement = on_devices(home(case), case.model.layout, case.model.mesh)
        grads = case.step(state, placement, batch)[0].opt_state[0]
        states.append(take(grads)[0])
    assert are_same_bits(*map(jax.tree.leaves, states))


@pytest.mark.parametrize("store", ["owned", "resident", "sharded"])
def test_loops_over_layers_return_no_gradients_of_experts(store):
    """Gradients of all layers' experts exist once, where they are summed: the loops
    over layers add to them there."""
    model = make_context(store, "float32", "full", accumulate_steps=MICRO_BATCHES)
    slots = model.layout.num_slots
    shapes = {
        (L, E, WIDTH, HIDDEN), (L, E, HIDDEN, WIDTH),
        (L, slots, WIDTH, 2, HIDDEN), (L, slots, HIDDEN, WIDTH),
    }  # fmt: skip
    loops = [
        eqn
        for eqn, times in equations(trace_train_step(model).jaxpr)
        if eqn.primitive.name == "scan"
        and eqn.params["length"] == L
        and times == MICRO_BATCHES
    ]
    read, returned = (
        [var.aval.shape for eqn in loops for var in getattr(eqn, name)]
        for name in ("invars", "outvars")
    )
    assert shapes & set(read)
    assert not shapes & set(returned)
