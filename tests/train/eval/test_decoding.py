"""Test that decoding gathers dense parameters once, and no step gathers them again."""

import math
import re

import jax
import jax.numpy as jnp
import optax

from moejax.axes import BATCH_AXES, make_mesh, sharding
from moejax.config import Config, Data, Dispatch, Model, Moe, Train
from moejax.model.cache import Cache
from moejax.moe.weights.gather import MIN_SHARDED_SIZE
from moejax.plan.layout import Topology
from moejax.resolve.resolved import resolve
from train.checkpoint.load import LoadedModel
from train.eval.decoding import Sampling, make_decoder
from train.step import expert_params
from train.step.compiled import home_placement
from train.step.state import abstract_state

B, D, V = 8, 64, 64
CFG = Config(
    model=Model(
        vocab_size=V, d_model=D, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=16,
        d_ff=72, first_k_dense=1, compute_dtype="float32",
    ),
    moe=Moe(num_experts=64, top_k=2, d_expert=16, num_shared_experts=4),
    mesh=Topology(data=2, expert=4),
    dispatch=Dispatch(group="data_expert"),
    data=Data(seq_len=16),
    train=Train(batch_size=B, loss_chunk=16),
)  # fmt: skip
"""Its matrices, the router's among them, rest split: they are no smaller than
MIN_SHARDED_SIZE."""


def test_a_step_gathers_no_dense_parameter():
    """The compiled step of a decoder has no all-gather of matrices of dense parts, of
    routers or of tables. Experts stay with their owners."""
    mesh = make_mesh(CFG.mesh)
    run = resolve(CFG, mesh)
    state = abstract_state(run, optax.identity())
    params, bias = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
        (state.params, state.router_bias),
    )
    loaded = LoadedModel(run, params, bias, home_placement(run), 0, {})
    router_de = params["cycles"]["blocks"][0]["moe"]["router_de"]
    assert router_de[0].size >= MIN_SHARDED_SIZE
    assert not router_de.sharding.is_fully_replicated, "the test has something to see"

    decoder = make_decoder(loaded, V, 0)
    given, kept = (expert_params.take(each)[0] for each in (params, decoder.weights[0]))
    for before, after in zip(jax.tree.leaves(given), jax.tree.leaves(kept)):
        assert before.sharding == after.sharding
    rows = jax.device_put(jnp.zeros(B, jnp.int32), sharding(mesh, BATCH_AXES))
    cache = jax.eval_shape(lambda: Cache.empty(CFG.network, B, 32))
    sampling = Sampling(jnp.float32(0), jnp.float32(1), jnp.uint32(0))
    args = *decoder.weights, rows, rows, sampling, cache
    text = decoder.step.lower(*args).compile().as_text()
    gathers = re.findall(r' all-gather(?:-start)?\(.*?op_name="(.*?)"', text)
    assert not [name for name in gathers if "/gathered/" in name]
    large = [
        name
        for sizes, name in re.findall(
            r'= \S*?\[([0-9,]+)\]\S* all-gather(?:-start)?\(.*?op_name="(.*?)"', text
        )
        if "/slots/" not in name
        and math.prod(map(int, sizes.split(","))) >= MIN_SHARDED_SIZE
    ]
    assert not large
