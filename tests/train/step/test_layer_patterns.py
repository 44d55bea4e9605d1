"""A cycle with several MoE layers computes the step of as many cycles with one."""

import dataclasses
import operator

import jax
import numpy as np
import pytest

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.random_plans import random_plan
from tests.support.steps import (
    SMALL,
    E,
    L,
    case_maker,
    check_step,
    home,
    make_case,
    model_from,
    one_step,
    run,
    warm_state,
    warm_state_of,
)
from train.step.state import with_new_tracked

pytestmark = pytest.mark.long  # test_transformer.py has formulas of patterns
LAYERS = ("moe",) * L


def in_one_cycle(state):
    """Return a state of L cycles of one MoE layer as that of one cycle of L layers."""

    def is_params(tree):
        return isinstance(tree, dict) and "cycles" in tree

    def convert(tree):
        if not is_params(tree):
            return tree
        block = dict(tree["cycles"]["blocks"][0])
        moe = block.pop("moe")
        blocks = {i: jax.tree.map(operator.itemgetter([i]), block) for i in range(L)}
        blocks[L - 1]["moe"] = moe
        blocks = {i: block for i, block in blocks.items() if block}
        return tree | {"cycles": {"blocks": blocks}}

    return jax.tree.map(convert, state, is_leaf=is_params)


@pytest.mark.parametrize(
    ("store", "remat"),
    [
        ("prefetched", "full"),
        ("resident", "dispatch"),
        ("prefetched", "none"),
        ("sharded", "full"),
        ("dynamic", "none"),
    ],
)
def test_one_cycle_of_two_layers_is_two_cycles(store, remat):
    """Loss, gradients, moments, parameters and loads are the same, with the home plan
    and with replicas."""
    case = make_case(store, "float32", layers=LAYERS, remat=remat)
    expected_case = make_case("owned", "float32")
    start = warm_state("float32")
    state, metrics = one_step(expected_case, start, ExpertPlan.home(L, E))
    expected = in_one_cycle(state), metrics
    random = np.random.default_rng(0)
    for plan in home(case), random_plan(random, case.model.layout, L):
        actual = one_step(case, in_one_cycle(start), plan)
        check_step(actual, expected, "float32")


def compressed_step(layers, start=None):
    """Return a step whose experts and gradients travel compressed in a domain, and the
    state before it, both in NumPy."""
    dispatch = {
        "group": "dc_expert", "domain": (2, 2), "compression": "delta",
        "compression_ratio": 4.0, "gradient_compression": 8.0, "prefetch": True,
    }  # fmt: skip
    cfg = dataclasses.replace(
        SMALL,
        mesh=Topology(dc=2, expert=4),
        model=dataclasses.replace(SMALL.model, layers=layers, remat="full"),
        dispatch=dataclasses.replace(SMALL.dispatch, **dispatch),
    )
    case = case_maker(model_from(cfg, "float32"))
    start = warm_state_of(case.model) if start is None else start
    state = with_new_tracked(jax.device_put(start, case.shardings), case.model.run)
    return start, jax.device_get(run(case, state, home(case), 0))


def test_compressed_experts_in_a_cycle_of_two_layers():
    """The estimates, residuals and gradients of all layers are the same."""
    start, (state, metrics) = compressed_step(None)
    assert np.abs(state.gradient_residual).max() > 0
    _, actual = compressed_step(LAYERS, in_one_cycle(start))
    check_step(actual, (in_one_cycle(state), metrics), "float32")
