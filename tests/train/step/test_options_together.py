"""Options of published families with options of computation: a train step is that of
the plain path, with experts at home, whole batches and no replicas."""

import functools

import jax
import numpy as np
import pytest

from moejax.config import Balance
from moejax.plan.layout import Topology
from tests.support.families import (
    FAMILIES,
    configure,
    make_case,
    make_plan,
    one_step,
)
from tests.support.resolved import aligned_slots
from tests.support.steps import (
    STORES,
    case_maker,
    check_step,
    home,
    model_from,
    warm_state_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]  # a step compiles in 15 s
SLOTS = {"slots_per_device": 3}
TENSOR = Topology(data=2, expert=2, tensor=2)
WAYS = {
    "aligned, in halves": {"align_rows": 64, "moe": {"halves": True}},
    "aligned, later rounds": {
        "align_rows": 64, "dispatch": {"rows_per_peer": 4, "overflow": "rounds"},
    },
    "sharded, prefetched": {
        "dispatch": STORES["sharded"] | SLOTS
        | {"prefetch": True, "split": "local_first"},
        "align_rows": 64, "model": {"remat": "full"},
    },
    "resident, prefetched": {
        "dispatch": STORES["resident"] | SLOTS | {"prefetch": True},
        "model": {"remat": "dispatch"}, "train": {"accumulate_steps": 2},
    },
    "dynamic": {"dispatch": STORES["dynamic"] | {"split": "dynamic"}},
    "dynamic, in halves": {
        "dispatch": STORES["dynamic"] | {"split": "dynamic"},
        "moe": {"halves": True}, "model": {"remat": "full"},
    },
    "water filling": {
        "dispatch": STORES["filled"] | SLOTS | {"split": "water_filling"},
        "balance": Balance(policy="micromoe"),
    },
    "data x expert": {
        "dispatch": STORES["transient"] | SLOTS
        | {"group": "data_expert", "split": "local_first", "prefetch": True}
        | {"offers_per_device": 1},
    },
    "tensor": {
        "mesh": TENSOR, "align_rows": 64, "moe": {"halves": True},
        "model": {"remat": "dispatch"},
    },
    "tensor, shards over expert": {
        "mesh": TENSOR, "dispatch": {"expert_shards": 4, "schedule": "s1h"},
        "model": {"remat": "full"},
    },
    "tensor, whole experts": {
        "mesh": TENSOR, "dispatch": {"expert_shards": 1, "schedule": "s1"},
    },
    "domain": {
        "mesh": Topology(dc=2, expert=4),
        "dispatch": {"group": "dc_expert", "domain": (2, 2), "prefetch": True},
    },
    "gathered once": {"dispatch": {"gather": "step"}, "moe": {"halves": True}},
    "one device": {
        "mesh": Topology(), "align_rows": 128, "dispatch": {"rows_per_peer": 256},
    },
}  # fmt: skip
"""Ways to compute a step, by parts of the configuration, and Layout.align_rows."""


@functools.cache
def expected_step(family: str):
    """Return a state, and the result of the plain step from it."""
    case = make_case(family)
    start = warm_state_of(case.model)
    return start, one_step(case, start, home(case))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_the_plain_step(family, way):
    """Loss, gradients, moments, parameters and loads agree, for a plan with random
    owners and replicas."""
    parts = dict(WAYS[way])
    with aligned_slots(parts.pop("align_rows", 1)):
        case = make_case(family, **parts)
    start, expected = expected_step(family)
    actual = one_step(case, start, make_plan(case))
    check_step(actual, expected, "float32")
    rounds_l = actual[1].routing.rounds_l
    assert (rounds_l > 1).all() == ("rounds" in way)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_with_rows_left_over_runs_again(family):
    """The loop-free step changes nothing, and the exact step is the plain one."""
    dispatch = {"rows_per_peer": 4, "overflow": "redo"}
    with aligned_slots(64):
        model = model_from(configure(family, dispatch=dispatch), "float32")
    start, expected = expected_step(family)
    for is_exact in (False, True):
        case = case_maker(model._replace(is_exact=is_exact))
        state, metrics = one_step(case, start, home(case), int(start.step))
        assert metrics.is_redo_needed == (not is_exact)
        if is_exact:
            check_step((state, metrics), expected, "float32")
        else:
            jax.tree.map(np.testing.assert_array_equal, state, start)
