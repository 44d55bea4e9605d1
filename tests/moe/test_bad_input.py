"""Configurations and layers refuse what does not fit a mesh, in one line that names the
field, its value and what to do. tests/plan/test_layout.py has the rules of a layout
alone."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from moejax.config import Balance, Config, Dispatch, Model, Moe, Router
from moejax.plan.layout import Layout, Topology
from moejax.plan.parallel import Domain, Tensor
from moejax.resolve.layer import set_up
from moejax.resolve.resolved import resolve
from tests.support.layers import EXPERTS, MERGED, TOP_K, WIDTH, build_mesh, config
from tests.support.resolved import make_layout, make_run
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state

PLAIN = Topology(dc=2, expert=4)
TENSOR = Topology(dc=2, expert=2, tensor=2)
ALL_SHARED = {"group": "dc_expert", "domain": (2, 2), "buffer_factor": 0.4}


def densely(**parts):
    """Resolve a run with dense training."""
    cfg = config(Topology(), router=Router(training="dense"))
    return make_run(dataclasses.replace(cfg, **parts))


def start(cfg: Config) -> None:
    """Make the abstract state of a run, which checks its configuration."""
    optimizer = make_optimizer(cfg.optimizer, cfg.train.num_steps)
    abstract_state(resolve(cfg, build_mesh(cfg.mesh)), optimizer)


def set_up_halves(num_tokens: int):
    """Set up a layer in halves for this number of tokens on each device."""
    mesh = jax.make_mesh((8,), ("expert",))
    moe = Moe(num_experts=EXPERTS, top_k=TOP_K, d_expert=8, halves=True)
    return set_up(moe, mesh, (8, num_tokens, WIDTH))


def call_halves(num_tokens: int) -> None:
    """Give other tokens to a layer in halves that was set up for 4 of them."""
    setup = set_up_halves(4)
    x_btd = jax.ShapeDtypeStruct((8, num_tokens, WIDTH), jnp.float32)
    setup.check(x_btd, setup.place().layer(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # Groups
        (lambda: Config(mesh=Topology(data=4, expert=4), moe=Moe(num_experts=24),
             dispatch=Dispatch(group="data_expert")),
         ["Moe.num_experts=24", "group data x expert (16)", "16 or 32"]),
        (lambda: Layout.home(12, 8, 64, axes=MERGED),
         ["num_experts=12", "group data x expert (8)", "another Dispatch.group"]),
        # Domains
        (lambda: config(PLAIN, **ALL_SHARED | {"domain": (2, 3)}),
         ["(2, 3)", "divisor", "use (2, 1)"]),
        (lambda: config(PLAIN, **ALL_SHARED | {"domain": (0, 1)}),
         ["(0, 1)", "divisor"]),
        (lambda: config(PLAIN, domain=(2, 1)),
         ["(2, 1)", "dc axis", "dc_expert", "(1, 1)"]),
        (lambda: config(Topology(data=2, expert=4), group="data_expert",
             domain=(1, 2)),
         ["domain=(1, 2)", "use Dispatch.group", "not 'data_expert'"]),
        (lambda: Layout(8, 8, 1, 8, axes=("dc", "expert"),
             domain=Domain((2, 4), (2, 1)), tensor=Tensor("s1", 2, 1)),
         ["domain=(2, 1)", "(2)", "expert_shards=1: use 2"]),
        (lambda: config(PLAIN, compression=8.0),
         ["Dispatch.compression=8.0", "domain is (1, 1)", "compression=None"]),
        (lambda: config(PLAIN, **ALL_SHARED, compression=0.5),
         ["Dispatch.compression=0.5", "at least 1"]),
        (lambda: start(config(PLAIN, **ALL_SHARED, compression=5000.0)),
         ["one entry in each", "use at most ratio="]),
        (lambda: Domain((2, 4), (2, 1), compression=0.0),
         ["compression=0.0", "at least 1"]),
        # Schedules
        (lambda: config(PLAIN, schedule="s1"), ["'s1'", "leave Dispatch.schedule out"]),
        (lambda: config(Topology(expert=4), schedule="local", expert_shards=2),
         ["'local'", "use 's1h', or Mesh.tensor = 2"]),
        (lambda: config(Topology(expert=4, tensor=2), expert_shards=3),
         ["expert_shards=3", "tensor axis (2)", "use 2"]),
        (lambda: config(Topology(expert=2, tensor=2), expert_shards=8),
         ["expert_shards=8", "expert axis (2)", "times a divisor of 2"]),
        (lambda: config(Topology(expert=4, tensor=2), d_expert=15),
         ["d_expert=15", "divisible by expert_shards=2"]),
        (lambda: config(TENSOR, group="dc_expert", schedule="local"),
         ["'local'", "use Dispatch.group='expert'", "not 'dc_expert'"]),
        (lambda: make_layout(
             config(Topology(expert=4, tensor=2), schedule="local", store="sharded")),
         ["'local'", "store='owned'", "'sharded'"]),
        (lambda: Tensor("s3", 2, 2), ["'s3' is none of s1h, s1, s2, base, local"]),
        (lambda: make_layout(dataclasses.replace(
             config(Topology(expert=8, tensor=4), 8, schedule="s1h"),
             mesh=Topology(expert=8, tensor=16),
             model=Model(num_heads=16, num_kv_heads=16),
         )),
         ["8 tokens", "Mesh.tensor=16", "use a batch"]),
        # Halves
        (lambda: set_up_halves(3), ["cuts the 3 tokens", "Moe.halves = False"]),
        (lambda: call_halves(3), ["cuts the 3 tokens", "Moe.halves = False"]),
        # Dense training
        (lambda: Router(kind="recorded", training="dense"),
         ["Router.training='dense'", "kind is 'recorded'", "'softmax' or 'sigmoid'"]),
        (lambda: densely(balance=Balance(policy="eplb")),
         ["Router.training='dense'", "Balance.policy='eplb'", "use 'home'"]),
        (lambda: densely(dispatch=Dispatch(store="resident")),
         ["Router.training='dense'", "Dispatch.store='resident'", "use 'home'"]),
        (lambda: densely(dispatch=Dispatch(fp8="e5m2")),
         ["Router.training='dense'", "Dispatch.fp8='e5m2': use 'none'"]),
    ],
)  # fmt: skip
def test_is_refused_in_one_line(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert "\n" not in str(error.value)
    assert [word for word in words if word not in str(error.value)] == []
