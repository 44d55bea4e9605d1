"""Test the loss and all gradients of a model whose matrices rest split, on meshes of
eight devices, against plain formulas on one device."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax.axes import make_mesh
from moejax.config import Config, Data, Model, Moe, Router, Train
from moejax.moe.types import Placement, Windows
from moejax.moe.weights.gather import MIN_SHARDED_SIZE
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from moejax.resolve.resolved import resolve
from tests.support import plain_model
from tests.support.close import assert_close
from train.step.state import abstract_state
from train.step.step import LossInputs, StepContext, micro_batch_loss

B, T, D, E = 8, 4, 64, 64
MODEL = Model(
    vocab_size=16, d_model=D, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=16,
    d_ff=72, first_k_dense=1, qk_norm="full", compute_dtype="float32",
)  # fmt: skip
"""Its matrices rest split, being no smaller than MIN_SHARDED_SIZE; the embedding is
whole."""
CFG = Config(
    model=MODEL,
    moe=Moe(num_experts=E, top_k=2, d_expert=16, num_shared_experts=4),
    router=Router(balance_loss=0.0, z_loss=0.0),
    data=Data(seq_len=T),
    train=Train(batch_size=B, loss_chunk=T),
)
MESHES = [
    Topology(data=2, expert=2, tensor=2),
    pytest.param(Topology(dc=2, data=2, expert=2), marks=pytest.mark.long),
]


def make_windows() -> Windows:
    token_bt = np.random.default_rng(0).integers(0, MODEL.vocab_size, (B, T + 1))
    position_bt = np.tile(np.r_[0:3, 0 : T - 2], (B, 1))
    return Windows(token_bt.astype(np.int32), position_bt.astype(np.int32))


@functools.cache
def plain():
    """Return loss and gradients by the formulas of plain_model."""
    windows = make_windows()
    token_bt, position_bt = windows.token_bt[:, :-1], windows.position_bt[:, :-1]

    def loss(params):
        logit_btv = plain_model.logits(CFG, params, token_bt, position_bt)
        log_btv = jax.nn.log_softmax(logit_btv)
        target_bt1 = windows.token_bt[:, 1:, None]
        return -jnp.mean(jnp.take_along_axis(log_btv, target_bt1, axis=2))

    params = plain_model.network(CFG).params
    return params, jax.device_get(jax.jit(jax.value_and_grad(loss))(params))


def compile_loss(topology: Topology):
    """Return the compiled loss and gradients of the model on a mesh, and a function
    that runs them with parameters."""
    cfg = dataclasses.replace(CFG, mesh=topology)
    mesh = make_mesh(topology)
    context = StepContext(resolve(cfg, mesh), optax.identity())
    state = abstract_state(context.run, context.optimizer)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    layers = cfg.model.num_moe_layers
    plan = ExpertPlan.home_in(context.layout, layers)
    inputs = LossInputs(
        Placement.from_plan(plan, context.layout),
        make_windows(),
        jax.random.key(0),
        jnp.int32(0),
        is_training=True,
    )
    bias = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), state.router_bias)

    def loss(params):
        return micro_batch_loss(context, params, bias, inputs)[0]

    both = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
    compiled = both.lower(state.params).compile()
    return compiled, lambda params: compiled(jax.device_put(params, shardings))


@pytest.mark.parametrize("topology", MESHES, ids=str)
def test_loss_and_gradients_are_those_of_plain_formulas(topology):
    """Both agree on every mesh, and XLA's partitioner moves no large array: matrices
    are gathered in shard_map, and their gradients are reduce-scattered there. Only over
    dc is the sum an all-reduce, of parts."""
    params, expected = plain()
    compiled, run = compile_loss(topology)
    assert_close(
        jax.device_get(run(params)),
        expected,
        factor=3,
        reason="three layers, each summed in another order",
    )
    scattered = 0
    for line in compiled.as_text().splitlines():
        found = re.search(r"= (.*?) (all-[a-z]*|reduce-scatter|coll[a-z-]*)\(", line)
        if found is None:
            continue
        sizes = [
            math.prod(map(int, dims.split(",")))
            for dims in re.findall(r"\[([0-9,]+)\]", found[1])
        ]
        is_sum = found[2] == "all-reduce" and "{'dc'}" not in line
        if is_sum or "shard_map" not in line:
            assert max(sizes, default=0) < MIN_SHARDED_SIZE // 2, line
        scattered += found[2] == "reduce-scatter"
    assert scattered
