"""The small train step under schedules, domains and compression."""

import dataclasses
import functools

import jax
import numpy as np

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.expert_fields import parts_with
from tests.support.steps import SMALL, Case, make_case_of, model_from
from train.step.step import Model

TENSOR = Topology(data=2, expert=2, tensor=2)
TWO_DCS = Topology(dc=2, expert=4)
WIRES = {
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


def model_of(name: str, dtype: str) -> Model:
    mesh, fields = WIRES[name]
    cfg = dataclasses.replace(
        SMALL,
        mesh=mesh,
        **parts_with(fields, SMALL),
    )
    return model_from(cfg, dtype)


@functools.cache
def wire_case(name: str, dtype: str) -> Case:
    return make_case_of(model_of(name, dtype))


def home_plan_of(case: Case) -> ExpertPlan:
    return case.model.run.home_plan()


def whole(array) -> np.ndarray:
    return np.asarray(jax.device_get(array))
