"""The trainer's step under schedules, domains and compression, from one state, equals
the step with one expert axis."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from moejax.moe.weights.domains import entries
from moejax.plan.expert_plan import ExpertPlan
from tests.support.communication_steps import (
    COMMUNICATION,
    home_plan,
    make_context,
    whole,
    wire_case,
)
from tests.support.steps import E, L, check_step, make_case, one_step, run, warm_state
from train.checkpoint.identity import has_same_sharding
from train.step.expert_params import take
from train.step.state import init_state, with_new_tracked
from train.step.step import StepContext

LONG = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        n if n == "domain" else pytest.param(n, marks=LONG)
        for n in COMMUNICATION
        if n != "delta"
    ],
)
def test_a_step_is_that_of_one_expert_axis(name, doubles):
    """Loss, gradients, moments and parameters agree to 1e-12 in float64."""
    start = warm_state(doubles)
    expected = make_case("owned", doubles)
    expected = one_step(expected, start, ExpertPlan.home(L, E))
    case = wire_case(name, doubles)
    check_step(one_step(case, start, home_plan(case)), expected, doubles)


@pytest.mark.slow
def test_a_tracked_expert_follows_its_masters_by_few_entries():
    """Every device of a domain starts with copies that equal the master parameters. A
    step then changes only as many entries of a copy as the ratio allows, and each of
    them moves to the new master value."""
    case = wire_case("delta", "float32")
    model = case.model
    state = init_state(model.run, model.optimizer)
    before, master_params = whole(state.tracked), master_rows(state)
    # A domain is four devices with two expert indices; slots are by (dc, expert, own).
    assert np.array_equal(np.sort(before, axis=1), np.sort(master_params, axis=1))
    state, _ = run(case, state, home_plan(case), 0)
    after, master_params = whole(state.tracked), master_rows(state)
    k, _ = entries(before.shape[2], np.float32, 8.0)
    is_moved = after != before
    assert (is_moved.sum(axis=2) <= k).all()
    assert is_moved.sum(axis=2).mean() > k / 2
    now = master_params[:, match_experts(before, master_rows(make_state(model)))]
    off = np.abs(after - now)[is_moved]
    # An entry is rounded to two bits after its leading bit.
    assert (off <= np.abs(before - now)[is_moved] / 8 + 1e-7).all()


def make_state(model: StepContext):
    return init_state(model.run, model.optimizer)


def master_rows(state) -> np.ndarray:
    """Return the master parameters as compression sees them, [l, e, x]."""
    master_params, _ = take(jax.device_get(state.params))
    gate, up, down = (master_params[n] for n in ("gate_edf", "up_edf", "down_efd"))
    into = np.stack([gate, up], axis=3)
    return np.concatenate([into.reshape(L, E, -1), down.reshape(L, E, -1)], axis=2)


def match_experts(tracked_lsx: np.ndarray, masters_lex: np.ndarray) -> np.ndarray:
    """Return the expert of each tracked copy, by comparing its weights."""
    same_se = (tracked_lsx[0, :, None] == masters_lex[0][None]).all(axis=-1)
    assert (same_se.sum(axis=1) == 1).all()
    return same_se.argmax(axis=1)


@pytest.mark.slow
def test_tracked_state_starts_over_under_another_sharding():
    """The tracked state is made as at the start of a run, if the sharding differs."""
    model = wire_case("delta", "float32").model
    state = make_state(model)
    lost = state.replace(tracked=jax.numpy.zeros_like(state.tracked))
    again = with_new_tracked(lost, model.run)
    assert np.array_equal(whole(again.tracked), whole(state.tracked))
    meta = {"config": json.loads(json.dumps(model.cfg.to_dict()))}
    assert has_same_sharding(meta, model.cfg)
    other = dataclasses.replace(model.cfg.dispatch, domain=(2, 1))
    assert not has_same_sharding(meta, dataclasses.replace(model.cfg, dispatch=other))


def test_a_batch_of_another_size_is_scored_without_a_domain():
    """The placement is the owners' own (train.step.compiled.home_placement)."""
    run = make_context("domain", "float32").run
    assert run.layout.domain is not None
    assert run.exact_layout(8, 16).domain is run.owning.domain is None


def test_a_token_at_a_time_is_routed_whole():
    run = make_context("s1h", "float32").run
    assert run.exact_layout(4, 1).tensor.schedule == "s2"
    assert run.exact_layout(4, 2).tensor.schedule == "s1h"
