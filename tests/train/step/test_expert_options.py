"""Biases of experts move with their experts: under every store, with replicas and with
shards, a train step is that of a model whose experts stay at home."""

import dataclasses
import functools

import numpy as np
import pytest

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.random_plans import random_plan
from tests.support.steps import (
    E,
    L,
    StepCase,
    case_maker,
    check_step,
    home,
    make_model,
    model_from,
    one_step,
    warm_state_of,
)


@functools.cache
def compiled(store: str, gate_input: bool, domain=(1, 1), **changes) -> StepCase:
    """Return the compiled step of SMALL under a store, with the options of experts that
    no fused kernel has, and gates on their output or input."""
    cfg = make_model(store, "float32").cfg
    if changes:
        fields = {"slots_per_device": None, "domain": domain}
        fields["group"] = "expert" if domain == (1, 1) else "dc_expert"
        dispatch = dataclasses.replace(cfg.dispatch, **fields)
        cfg = dataclasses.replace(cfg, dispatch=dispatch, **changes)
    options = {"expert_bias": True, "activation": "clamped_swiglu", "swiglu_limit": 0.5}
    kind = "sigmoid" if gate_input else "softmax"
    router = dataclasses.replace(
        cfg.router, bias=True, gate_input=gate_input, kind=kind, bias_rate=0.01
    )
    cfg = dataclasses.replace(
        cfg, moe=dataclasses.replace(cfg.moe, **options), router=router
    )
    return case_maker(model_from(cfg, "float32"))


pytestmark = pytest.mark.long  # tests/moe/test_expert_biases.py has a layer alone
MESHES = {
    "whole experts": {},
    "shards": {"mesh": Topology(data=2, expert=2, tensor=2)},
    "domain": {"mesh": Topology(dc=2, expert=4), "domain": (2, 1)},
}


@pytest.mark.parametrize(
    ("store", "gate_input", "where"),
    [
        ("resident", True, "whole experts"),
        ("prefetched", False, "whole experts"),
        ("sharded", False, "whole experts"),
        ("owned", True, "shards"),
        ("owned", False, "domain"),
        ("dynamic", True, "whole experts"),
        ("filled", False, "whole experts"),
    ],
)
def test_a_step_under_every_store(store, gate_input, where):
    """Loss, gradients, moments, parameters and loads agree, with replicas where the
    store has them."""
    case = compiled(store, gate_input, **MESHES[where])
    whole = compiled("owned", gate_input)
    start = warm_state_of(whole.model)
    expected = one_step(whole, start, ExpertPlan.home(L, E))
    biases = start.params["cycles"]["blocks"][0]["moe"]["down_bias_ew"]
    assert np.abs(biases).max() > 0.1
    plans = [home(case)]
    if store != "owned":
        plans += [random_plan(np.random.default_rng(0), case.model.layout, L)]
    for plan in plans:
        check_step(one_step(case, start, plan), expected, "float32")
