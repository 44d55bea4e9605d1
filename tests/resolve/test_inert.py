"""Parts of a configuration that can have no effect are told of, and no others."""

import dataclasses

import pytest

from moejax.config import Balance, Config, Dispatch, Moe, Optimizer, Router, Train
from moejax.plan.layout import Topology
from moejax.resolve.inert import inert_parts
from tests.support.run_main import ROOT
from train.config import gin_reader

ONE = Moe(num_experts=8, top_k=1)
EPLB = Config(
    balance=Balance(policy="eplb"), optimizer=Optimizer(warmup_steps=2)
)  # fmt: skip
TWO_DCS = Config(
    mesh=Topology(dc=2, expert=2), dispatch=Dispatch(group="dc_expert"),
    router=Router(num_groups=4, top_groups=2),
)  # fmt: skip
THREE_DCS = dataclasses.replace(
    TWO_DCS, mesh=Topology(dc=3, expert=2), moe=Moe(num_experts=24, top_k=2),
    train=Train(batch_size=12),
)  # fmt: skip
UNBALANCED = {"balance_loss": 0.0, "sequence_balance_loss": 0.0}


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (Config(moe=ONE), "Router.normalise_gates"),
        (Config(moe=ONE, router=Router(kind="sigmoid")), "Router.normalise_gates"),
        (Config(moe=ONE, router=Router(normalise_gates=False)), None),
        (Config(moe=ONE, router=Router(training="dense")), None),
        (Config(router=Router(**UNBALANCED)), "Router.bias_rate"),
        (TWO_DCS, None),
        (THREE_DCS, "Router.top_groups=2"),
        (Config(router=Router(**UNBALANCED, bias_rate=0.001)), None),
        (Config(router=Router(**UNBALANCED, mutual_information_loss=0.1)), None),
        (Config(train=Train(num_steps=50)), "Optimizer.warmup_steps=50"),
        (Config(train=Train(num_steps=51)), None),
        (dataclasses.replace(EPLB, train=Train(num_steps=13)), "Balance.policy='eplb'"),
        (
            dataclasses.replace(EPLB, train=Train(num_steps=14)),
            None,
        ),
    ],
)
def test_a_part_without_effect_is_named(cfg, named):
    lines = inert_parts(cfg)
    assert len(lines) == (named is not None)
    assert named is None or named in lines[0]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.gin")), ids=str)
def test_shipped_configurations_have_none(path):
    assert inert_parts(gin_reader.load([path])) == []
