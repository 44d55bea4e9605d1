"""Build the small train step under every schedule, domain and compression."""

import dataclasses
import functools

import jax
import numpy as np

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.expert_fields import parts_with
from tests.support.steps import SMALL, StepCase, case_maker, model_from
from train.step.step import StepContext

TENSOR = Topology(data=2, expert=2, tensor=2)
TWO_DCS = Topology(dc=2, expert=4)
COMMUNICATION = {
    "s1h": (TENSOR, {"schedule": "s1h"}),
    "s1": (TENSOR, {"schedule": "s1"}),
    "s2": (TENSOR, {"schedule": "s2"}),
    "base": (TENSOR, {"schedule": "base"}),
    "local": (TENSOR, {"schedule": "local"}),
    "one_shard": (TENSOR, {"schedule": "s1h", "expert_shards": 1}),
    "domain": (TWO_DCS, {"group": "dc_expert", "domain": (2, 2)}),
    "whole_domain": (TWO_DCS, {"group": "dc_expert", "domain": (2, 4)}),
    "unfetched": (
        TWO_DCS,
        {"group": "dc_expert", "domain": (2, 1), "prefetch": False},
    ),
    "hierarchical": (TWO_DCS, {"group": "dc_expert", "transport": "hierarchical"}),
    "delta": (
        TWO_DCS,
        {
            "group": "dc_expert",
            "domain": (2, 2),
            "compression": "delta",
            "compression_ratio": 8.0,
        },
    ),
}


def make_context(name: str, dtype: str) -> StepContext:
    """Return the context of the small train step with a setting of COMMUNICATION."""
    mesh, fields = COMMUNICATION[name]
    cfg = dataclasses.replace(
        SMALL,
        mesh=mesh,
        **parts_with(fields, SMALL),
    )
    return model_from(cfg, dtype)


@functools.cache
def wire_case(name: str, dtype: str) -> StepCase:
    """Return the compiled train step with a setting of COMMUNICATION."""
    return case_maker(make_context(name, dtype))


def home_plan(case: StepCase) -> ExpertPlan:
    """Return the plan that keeps every expert on the device that owns it at the
    start."""
    return case.model.run.home_plan()


def whole(array) -> np.ndarray:
    """Return a distributed array as one NumPy array."""
    return np.asarray(jax.device_get(array))
