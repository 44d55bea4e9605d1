"""Loop-free steps: they compute what exact ones do, or leave the state as it was."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moejax.plan.layout import Layout
from tests.support.close import assert_close
from tests.support.primitives import equations, primitives
from tests.support.steps import (
    SMALL,
    StepCase,
    case_maker,
    home,
    make_windows,
    model_from,
    warm_state,
)
from train.step.compiled import on_devices, trace_train_step
from train.step.step import StepContext

ROWS = 12
"""Rows per peer of round 0. The fullest pair of a step has 12 to 16."""
STEPS = range(8)
UPDATES = 5
"""Updates that the state has had before each step."""
EXACT = ("exact", "rounds")


def make_model(name: str, dtype: str) -> StepContext:
    """Return the context of the loop-free step ('loop_free'), of the one in which it
    runs again ('exact'), or of a run whose steps never do ('rounds')."""
    overflow = "rounds" if name == "rounds" else "redo"
    dispatch = dataclasses.replace(
        SMALL.dispatch, rows_per_peer=ROWS, overflow=overflow
    )
    train = dataclasses.replace(SMALL.train, accumulate_steps=2)
    cfg = dataclasses.replace(SMALL, dispatch=dispatch, train=train)
    return model_from(cfg, dtype)._replace(is_exact=name in EXACT)


@functools.cache
def make_case(name: str, dtype: str) -> StepCase:
    """Return the compiled step of `make_model`."""
    return case_maker(make_model(name, dtype))


def make_start(dtype: str):
    """Return the state before each step, as NumPy arrays."""
    return warm_state(dtype).replace(step=np.int32(UPDATES))


def run(name: str, start, step: int, num_updates: int = UPDATES):
    """Return the state and the metrics of a step, as NumPy arrays."""
    case = make_case(name, jax.tree.leaves(start.params)[0].dtype.name)
    state = jax.device_put(start, case.shardings)
    placement = on_devices(home(case), case.model.layout, case.model.mesh)
    args = [state, placement, make_windows(case, step)]
    if name != "rounds":
        args.append(jax.device_put(np.int32(num_updates), case.shardings.step))
    return jax.device_get(case.step(*args))


def assert_is(actual, expected) -> None:
    """Assert that two states have the same bits."""
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def check_behind(name: str, start, num_updates: int) -> None:
    """Check that a step behind one that overflowed changes nothing."""
    for step in STEPS[:2]:
        state, metrics = run(name, start, step, num_updates)
        assert metrics.is_redo_needed
        assert_is(state, start)


@pytest.mark.slow
def test_a_step_that_overflows_changes_nothing(doubles):
    """The loss and all gradients are not finite in half of the runs: an overflow counts
    before that."""
    start, overflows = make_start(doubles), []
    params = jax.tree.map(lambda leaf: leaf * np.nan, start.params)
    params |= {"cycles": start.params["cycles"]}
    for step in STEPS:
        state, metrics = run("loop_free", start, step)
        overflows.append(metrics.routing.rounds_l.max() > 1)
        assert metrics.is_redo_needed == overflows[-1]
        broken = start.replace(params=params)
        skipped, metrics = run("loop_free", broken, step)
        if metrics.is_redo_needed:
            assert_is(skipped, broken)
        else:
            assert skipped.skipped_in_a_row == 1
            assert skipped.step == UPDATES + 1
        if overflows[-1]:
            assert_is(state, start)
        else:
            assert state.step == UPDATES + 1
            assert state.skipped_in_a_row == 0
    assert {True, False} == set(overflows)


@pytest.mark.slow
@pytest.mark.parametrize("num_updates", [UPDATES - 1, UPDATES + 1])
def test_a_step_behind_one_that_overflowed_changes_nothing(doubles, num_updates):
    check_behind("loop_free", make_start(doubles), num_updates)


@pytest.mark.slow
@pytest.mark.long
def test_an_exact_step_behind_one_that_overflowed_changes_nothing(doubles):
    check_behind("exact", make_start(doubles), UPDATES + 1)


@pytest.mark.slow
@pytest.mark.long
def test_redone_steps_are_those_of_a_run_that_never_redoes(doubles):
    start, num_redone = make_start(doubles), 0
    for step in STEPS:
        expected, seen = run("rounds", start, step)
        assert seen.is_redo_needed is None
        state, metrics = run("loop_free", start, step)
        assert metrics.is_redo_needed == (seen.routing.rounds_l.max() > 1)
        exact, exact_metrics = run("exact", start, step)
        assert not exact_metrics.is_redo_needed
        assert_close(exact, expected)
        if metrics.is_redo_needed:
            num_redone += 1
        else:
            assert_close(state, expected)
            assert_close(metrics.loss, seen.loss)
    assert 0 < num_redone < len(STEPS)


def test_loop_free_steps_have_no_loops_of_unknown_length():
    """The exact step has two in each layer, forward and backward. Layers are a scan, so
    that each is traced once."""
    assert num_loops(make_model("exact", "float32")) == 2
    assert num_loops(make_model("loop_free", "float32")) == 0


def num_loops(model: StepContext) -> int:
    """Return the number of while loops around an exchange in a traced step."""
    return sum(
        eqn.primitive.name == "while"
        and primitives(eqn.params["body_jaxpr"])["all_to_all"] > 0
        for eqn, _ in equations(trace_train_step(model).jaxpr)
    )


def test_capacity_mode_runs_nothing_again():
    with pytest.raises(ValueError, match="use overflow='rounds' or 'exact'"):
        Layout(8, 4, 2, 64, exchange="capacity", overflow="redo")
