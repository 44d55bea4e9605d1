"""Test MicroMoE's plans on a recorded trace.

A plan is made from one sample and scored by an exact split of the next, layer by layer.
The tests use tests/golden/routing.npz. docs/log.md has more, with p90 and the worst.
"""

import numpy as np
import pytest

from moejax.balance.policies.micromoe import policy as micromoe
from moejax.balance.policies.micromoe.density import density
from moejax.perf.cost_model import NOTES
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from tests.support import cut_routing

NUM_DEVICES, NUM_EXPERTS = 16, 32


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """Loads as floats [pair, (planned from, scored on), l, w, e]."""
    return cut_routing.pairs()


def ratios(tokens: np.ndarray, slots: int, is_chained: bool) -> np.ndarray:
    """Return max/mean of the devices for the next sample [pair, l].

    With `is_chained` each plan is made from the one before, otherwise from home.
    """
    layout = Layout(
        NUM_EXPERTS, NUM_DEVICES, slots, 8192, "ragged", store="resident",
        offers_per_device=2, copies_per_device=slots,
    )  # fmt: skip
    home = current = ExpertPlan.home_in(layout, tokens.shape[2])
    ratio_nl = []
    for load_lwe, next_lwe in tokens:
        plan = micromoe.plan(load_lwe, layout, NOTES, current).validate(layout)
        next_le = next_lwe.sum(axis=1)
        ratio_nl.append(
            [
                density(row_p, load_e, NUM_DEVICES) / (load_e.sum() / NUM_DEVICES)
                for row_p, load_e in zip(plan.slot_to_expert_lp, next_le)
            ]
        )
        current = plan if is_chained else home
    return np.array(ratio_nl)


@pytest.mark.parametrize("is_chained", [False, True])
def test_four_slots_even_out_every_layer(tokens, is_chained):
    median_l = np.median(ratios(tokens, 4, is_chained), axis=0)
    assert median_l.max() <= 1.005, median_l


@pytest.mark.parametrize("is_chained", [False, True])
def test_three_slots_nearly_even_out_the_layers(tokens, is_chained):
    """The mean over layers of max/mean is at most 1.01; a plain greedy plan gives 1.03
    to 1.20."""
    median_l = np.median(ratios(tokens, 3, is_chained), axis=0)
    assert median_l.mean() <= 1.01, median_l
