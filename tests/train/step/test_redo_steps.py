"""Loop-free steps compute what exact ones do, or leave the state as it was."""

import jax
import numpy as np
import pytest

from tests.support.close import assert_close
from tests.support.steps import StepCase, home, make_case, one_step, warm_state_of

pytestmark = pytest.mark.slow
FACTOR = 2.3
"""Buffers over an even load, that some steps overflow and others do not."""
STEPS = range(8)
UPDATES = 5
"""Updates that the state has had before each step."""


def compiled(overflow: str, is_exact: bool = False) -> StepCase:
    """Return a step that leaves no room for all rows in round 0."""
    dispatch = {"buffer_factor": FACTOR, "overflow": overflow}
    accumulated = {"accumulate_steps": 2}
    return make_case(
        "small", "float32", is_exact=is_exact, dispatch=dispatch, train=accumulated
    )


def make_start(case: StepCase):
    """Return the state before each step, as NumPy arrays."""
    return warm_state_of(case.model).replace(step=np.int32(UPDATES))


def assert_same_bits(actual, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_waits(case: StepCase, start) -> None:
    """Assert that a step behind one that overflowed changes nothing."""
    for num_updates in (UPDATES - 1, UPDATES + 1):
        state, metrics = one_step(case, start, home(case), 0, num_updates)
        assert metrics.is_redo_needed
        assert_same_bits(state, start)


def test_a_step_that_overflows_or_is_behind_one_changes_nothing():
    """The loss and all gradients are not finite in half of the runs: an overflow counts
    before that."""
    case = compiled("redo")
    start, overflows = make_start(case), []
    assert_waits(case, start)
    params = jax.tree.map(lambda leaf: leaf * np.nan, start.params)
    broken = start.replace(params=params | {"cycles": start.params["cycles"]})
    for step in STEPS:
        state, metrics = one_step(case, start, home(case), step, UPDATES)
        skipped, skipped_metrics = one_step(case, broken, home(case), step, UPDATES)
        overflows.append(metrics.routing.rounds_l.max() > 1)
        assert metrics.is_redo_needed == overflows[-1]
        if overflows[-1]:
            assert_same_bits(state, start)
        else:
            assert (state.step, state.skipped_in_a_row) == (UPDATES + 1, 0)
        if skipped_metrics.is_redo_needed:
            assert_same_bits(skipped, broken)
        else:
            assert (skipped.step, skipped.skipped_in_a_row) == (UPDATES + 1, 1)
    assert {True, False} == set(overflows)


@pytest.mark.long
def test_redone_steps_are_those_of_a_run_that_never_redoes():
    rounds, loop_free = compiled("rounds"), compiled("redo")
    exact = compiled("redo", is_exact=True)
    start, num_redone = make_start(rounds), 0
    assert_waits(exact, start)
    for step in STEPS:
        expected, seen = one_step(rounds, start, home(rounds), step)
        assert seen.is_redo_needed is None
        state, metrics = one_step(loop_free, start, home(loop_free), step, UPDATES)
        redone, again = one_step(exact, start, home(exact), step, UPDATES)
        assert not again.is_redo_needed
        assert_close(redone, expected)
        if metrics.is_redo_needed:
            num_redone += 1
        else:
            assert_close(state, expected)
            assert_close(metrics.loss, seen.loss)
    assert 0 < num_redone < len(STEPS)
