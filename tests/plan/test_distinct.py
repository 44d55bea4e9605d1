"""Test the expected number of rows against routing that is drawn at random."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Router
from moejax.moe.route import choose_experts
from moejax.plan.distinct import Choosing, distinct_share

TOKENS = 4096


@pytest.mark.parametrize("num_destinations", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("choosing", "error"),
    [
        (Choosing(8, 64), 0.02),  # exact: what is left is chance
        (Choosing(2, 16), 0.02),
        (Choosing(8, 64, 4, 2), 0.05),
        (Choosing(4, 32, 8, 3), 0.05),
    ],
)  # fmt: skip
def test_expected_share_is_that_of_even_routing(choosing, error, num_destinations):
    """`choose_experts` chooses, by scores that are drawn alike for all experts. With
    groups the estimate is too high where a group that is chosen gets no choice."""
    k, e, num_groups, top_groups = choosing
    score_ne = np.random.default_rng(0).random((TOKENS, e))
    router = Router(num_groups=num_groups, top_groups=top_groups)
    expert_nk = np.asarray(choose_experts(jnp.asarray(score_ne), k, router))
    at_nk = expert_nk // (e // num_destinations)
    drawn = (at_nk[..., None] == np.arange(num_destinations)).any(axis=1).mean()
    expected = float(distinct_share(1 / num_destinations, choosing))
    assert abs(expected - drawn) <= error
    if num_groups % num_destinations == 0:
        assert (at_nk[..., None] == np.arange(num_destinations)).any(1).sum(
            1
        ).max() <= top_groups
