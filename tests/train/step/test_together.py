"""A step counts the tokens that choose both of two experts, for policy 'hiermoe'."""

import functools

import numpy as np
import pytest

from moejax.config import Balance
from tests.support.steps import (
    TENSOR,
    TWO_DCS,
    E,
    L,
    home,
    make_case,
    one_step,
    other_plan,
    warm_state_of,
)

pytestmark = pytest.mark.slow
PLAIN = {"balance": Balance(policy="hiermoe")}
WAYS = {
    "in two levels, micro-batches and halves": {
        "mesh": TWO_DCS, "moe": {"halves": True}, "train": {"accumulate_steps": 2},
        "dispatch": {"group": "dc_expert", "transport": "hierarchical"},
    },
    "tensor": {
        "mesh": TENSOR, "dispatch": {"schedule": "s1h"}, "model": {"remat": "full"},
    },
}  # fmt: skip


@functools.cache
def plain_counts() -> tuple[np.ndarray, np.ndarray]:
    """Return the loads of the plain step, and its tokens that choose both of two
    experts."""
    case = make_case("small", "float32", **PLAIN)
    _, metrics = one_step(case, warm_state_of(case.model), home(case))
    return metrics.routing.tokens_le, metrics.routing.together_lee


def test_each_token_has_as_many_partners_as_choices():
    tokens_le, together_lee = plain_counts()
    assert together_lee.dtype == np.int32
    assert together_lee.shape == (L, E, E)
    assert np.array_equal(np.diagonal(together_lee, axis1=1, axis2=2), tokens_le)
    assert np.array_equal(together_lee.sum(axis=2), 2 * tokens_le)  # top_k = 2
    assert np.array_equal(together_lee, together_lee.transpose(0, 2, 1))


@pytest.mark.parametrize(
    "way",
    [
        "in two levels, micro-batches and halves",
        pytest.param("tensor", marks=pytest.mark.long),
    ],
)
def test_counts_do_not_depend_on_how_a_step_is_computed(way):
    """Another mesh, other owners, micro-batches and halves count the same tokens."""
    case = make_case("small", "float32", **PLAIN, **WAYS[way])
    plan = other_plan(case, np.random.default_rng(1))
    _, metrics = one_step(case, warm_state_of(case.model), plan)
    assert np.array_equal(metrics.routing.together_lee, plain_counts()[1])
