"""Parts of a configuration that can have no effect are told of, and no others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Balance, Config, Moe, Optimizer, Router, Train
from moejax.moe.route import route
from moejax.resolve.inert import inert_parts
from tests.support.run_main import ROOT
from train.config import gin_reader

ONE = Moe(num_experts=8, top_k=1)
UNBALANCED = {"balance_loss": 0.0, "sequence_balance_loss": 0.0}


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (Config(moe=ONE), "Router.normalise_gates"),
        (Config(moe=ONE, router=Router(kind="sigmoid")), "Router.normalise_gates"),
        (Config(moe=ONE, router=Router(normalise_gates=False)), None),
        (Config(moe=ONE, router=Router(training="dense")), None),
        (Config(router=Router(**UNBALANCED)), "Router.bias_rate"),
        (Config(router=Router(**UNBALANCED, bias_rate=0.001)), None),
        (Config(router=Router(**UNBALANCED, mutual_information_loss=0.1)), None),
        (Config(train=Train(num_steps=50)), "Optimizer.warmup_steps=50"),
        (Config(train=Train(num_steps=51)), None),
        (
            Config(
                balance=Balance(policy="eplb"),
                optimizer=Optimizer(warmup_steps=2),
                train=Train(num_steps=13),
            ),
            "Balance.policy='eplb'",
        ),
        (
            Config(
                balance=Balance(policy="eplb"),
                optimizer=Optimizer(warmup_steps=2),
                train=Train(num_steps=14),
            ),
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


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_one_normalised_gate_leaves_the_router_without_a_gradient(kind):
    """The gates of two choices, or of one that is not normalised, have one."""
    rng = np.random.default_rng(0)
    x_nd, router_de = rng.normal(size=(16, 4)), rng.normal(size=(4, 8))

    def largest_gradient(top_k: int, cfg: Router) -> float:
        def loss(router_de):
            routes, *_ = route(x_nd, router_de, jnp.zeros(8), cfg=cfg, top_k=top_k)
            return jnp.sum(jnp.arange(16.0)[:, None] * routes.gate_nk[:, :1])

        return float(jnp.max(jnp.abs(jax.grad(loss)(jnp.float32(router_de)))))

    cfg = Router(kind=kind)
    free = dataclasses.replace(cfg, normalise_gates=False)
    assert largest_gradient(1, cfg) < 1e-4 * largest_gradient(1, free)
    assert largest_gradient(2, cfg) > 1e-2 * largest_gradient(2, free)
