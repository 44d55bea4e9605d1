"""Test attention and dense parts that are split over the tensor axis.

Their values are those of one device. Each part needs one sum over the tensor axis in
the forward pass and one in the backward pass.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax import axes, config
from moejax.config import Model, Network
from moejax.model.attention import Attention, AttentionContext
from moejax.model.cache import Cache, KvCacheView
from moejax.model.layers import SwiGlu
from moejax.model.mla import LatentAttention
from moejax.model.sharding import param_sharding
from moejax.moe.mesh_roles import on_mesh
from moejax.plan.layout import Layout, Topology
from tests.support.close import assert_close

B, T, D, F = 4, 16, 64, 128
POSITION_BT = np.tile(np.r_[0:6, 0:10], (B, 1)).astype(np.int32)
"""Positions of two documents in each row."""
CFG = Model(
    d_model=D, num_heads=8, num_kv_heads=4, head_dim=16, compute_dtype="float32",
    attention="blocked",
)  # fmt: skip
SPLITS = (
    Topology(expert=2, tensor=4),
    Topology(data=2, expert=2, tensor=2),
)
TENSOR_ALONE = Topology(tensor=4)
"""A mesh on which every collective runs over the tensor axis."""


class Part(NamedTuple):
    """Functions that make and call one part of a block."""

    make: Callable
    """make(mesh) -> module"""
    call: Callable
    """call(module, x_btd) -> y_btd"""


def attention(qk_norm: str, options=config.Attention()) -> Part:  # noqa: B008
    """Return the attention part with this kind of norm of queries and keys, and these
    options."""
    cfg = Network(dataclasses.replace(CFG, qk_norm=qk_norm), attention=options)

    def call(module, x_btd):
        context = AttentionContext.from_windows(jnp.asarray(POSITION_BT), cfg)
        return module((x_btd,), (context,))[0][0]

    return Part(lambda mesh: Attention(cfg, "full", mesh, nnx.Rngs(0)), call)


PARTS = {
    "attention": attention("none"),
    "norms over all heads": attention("full"),
    "swiglu": Part(
        lambda mesh: SwiGlu(CFG, F, mesh, nnx.Rngs(0)),
        lambda module, x: module((x,))[0],
    ),
}


def latent_attention() -> Part:
    """Return latent attention, with queries that are latent too."""
    mla = config.Mla(
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    )
    model = dataclasses.replace(CFG, num_kv_heads=CFG.num_heads)
    cfg = Network(model, mla=mla)

    def call(module, x_btd):
        context = AttentionContext.from_windows(jnp.asarray(POSITION_BT), cfg)
        return module((x_btd,), (context,))[0][0]

    return Part(lambda mesh: LatentAttention(cfg, "full", mesh, nnx.Rngs(0)), call)


OTHERS = {
    "biases and sinks": attention("full", config.Attention(bias="all", sinks=True)),
    "latent queries": latent_attention(),
}
"""Parts that are compared with those of one device alone."""


def build_mesh(topology: Topology) -> jax.sharding.Mesh:
    return axes.make_mesh(topology, jax.devices()[: topology.num_devices])


def rows(mesh) -> NamedSharding:
    return axes.sharding(mesh, axes.BATCH_AXES)


def split_part(part: Part, mesh):
    """Return the graph of a part, and the shapes and shardings of its parameters."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: part.make(mesh)))
    mesh_layout = on_mesh(mesh, Layout.home(1, 1, 1))

    def add_sharding(_, variable):
        sharding = param_sharding(
            variable, mesh, mesh_layout, stacked=False, store="owned"
        )
        return jax.ShapeDtypeStruct(variable.shape, jnp.float32, sharding=sharding)

    return graph, nnx.to_pure_dict(nnx.map_state(add_sharding, shapes))


def program(part: Part, mesh):
    """Return a compiled program for the output and all gradients of a loss that is not
    linear in the output."""
    graph, shapes = split_part(part, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)

    def loss(params, x_btd):
        y_btd = part.call(nnx.merge(graph, params), x_btd)
        return jnp.sum(jnp.sin(y_btd)), y_btd

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    x_btd = jax.ShapeDtypeStruct((B, T, D), jnp.float32, sharding=rows(mesh))
    outs = ((axes.sharding(mesh), rows(mesh)), (shardings, rows(mesh)))
    return jax.jit(both, out_shardings=outs).lower(shapes, x_btd).compile()


@functools.cache
def run_part(name: str, topology: Topology):
    """Return the output, and the gradients of parameters and input."""
    mesh = build_mesh(topology)
    part = (PARTS | OTHERS)[name]
    _, shapes = split_part(part, mesh)
    random = np.random.default_rng(0)

    def draw(leaf):
        values = random.standard_normal(leaf.shape) / 8
        is_scale = len(leaf.shape) == 1
        return jax.device_put((values + is_scale).astype(np.float32), leaf.sharding)

    x_btd = random.standard_normal((B, T, D)).astype(np.float32)
    args = jax.tree.map(draw, shapes), jax.device_put(x_btd, rows(mesh))
    (_, y_btd), grads = program(part, mesh)(*args)
    return jax.device_get((y_btd, grads))


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("biases and sinks", SPLITS[0]),
        ("latent queries", SPLITS[1]),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_one_device(name, topology):
    """Values and gradients of a split part are those of one device, with grouped
    queries and separate documents too. tests/train/step/test_dense_weights.py compares
    other parts with formulas."""
    assert_close(run_part(name, topology), run_part(name, Topology()))


def test_parameters_are_drawn_alike_on_any_mesh():
    drawn = []
    for topology in (Topology(), SPLITS[1]):
        part, mesh = PARTS["attention"], build_mesh(topology)
        _, shapes = split_part(part, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)

        def new(part=part, mesh=mesh):
            return nnx.to_pure_dict(nnx.split(part.make(mesh))[1])

        drawn.append(jax.device_get(jax.jit(new, out_shardings=shardings)()))
    jax.tree.map(np.testing.assert_array_equal, *drawn)


ARRAY = re.compile(r"[a-z]+\d+\[([\d,]*)\]")
COLLECTIVE = re.compile(
    r"= (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)


def collectives(compiled) -> Counter:
    """Return how often a collective has a result of each size, by (kind, elements)."""
    counts = Counter()
    for arrays, kind in COLLECTIVE.findall(compiled.as_text()):
        for dims in ARRAY.findall(arrays):
            counts[kind, math.prod(int(n) for n in dims.split(",") if n)] += 1
    return counts


@pytest.mark.slow
def test_one_sum_for_each_part_and_one_for_its_gradient():
    """Each part has one sum forward and one backward; norms over all heads add sums of
    two numbers per token in each direction, and gathers of their scales."""
    for name in ("norms over all heads", "swiglu"):
        expected = Counter({("all-reduce", B * T * D): 2})
        if name == "norms over all heads":
            expected["all-reduce", B * T] = 4
            expected["all-gather", 8 * 16] = expected["all-gather", 4 * 16] = 1
        run = program(PARTS[name], build_mesh(TENSOR_ALONE))
        assert collectives(run) == expected, name


@pytest.mark.parametrize("name", PARTS)
def test_matrices_are_split_over_tensor_and_fsdp(name):
    """A matrix is split over the tensor axis along one dim and over the batch axes
    along the other; only the latter gather it."""
    sizes = {"data": 2, "expert": 2}
    whole, split = (
        split_part(PARTS[name], build_mesh(Topology(**sizes, tensor=tensor)))[1]
        for tensor in (1, 2)
    )
    for key in whole:
        if not key.endswith("_norm"):
            shard_sizes = [
                math.prod(leaf[key].sharding.shard_shape(leaf[key].shape))
                for leaf in (whole, split)
            ]
            assert shard_sizes[0] == 2 * shard_sizes[1] == whole[key].size // 4
            dims = (axes.FSDP_AXES, "tensor")
            is_out = key in ("out_hid", "down_fd")
            assert split[key].sharding.spec == P(*(dims[::-1] if is_out else dims))


def test_small_matrices_are_split_over_tensor_alone():
    """Small matrices are split over the tensor axis, which splits the computation, and
    are not gathered."""
    small = dataclasses.replace(CFG, d_model=8)
    part = Part(lambda mesh: SwiGlu(small, 16, mesh, nnx.Rngs(0)), None)
    _, shapes = split_part(part, build_mesh(SPLITS[1]))
    assert shapes["up_df"].sharding.spec == P(None, "tensor")
    assert shapes["down_fd"].sharding.spec == P("tensor", None)


def decode_token(topology: Topology):
    """Return the output of a token that follows three in a cache, the new cache, and
    the compiled program."""
    mesh = build_mesh(topology)
    cfg = Network(dataclasses.replace(CFG, num_layers=1))
    graph, shapes = split_part(PARTS["attention"], mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    random = np.random.default_rng(0)

    def draw(shape):
        return random.standard_normal(shape).astype(np.float32)

    params = {name: draw(leaf.shape) / 8 for name, leaf in shapes.items()}

    def step(params, cache, x_b1d, position_b1):
        context, document_bu = AttentionContext.from_cache(position_b1, cfg, cache)
        view = KvCacheView(cache.key_lbugi, cache.value_lbugi, jnp.int32(0))
        (y_b1d,), view = nnx.merge(graph, params)((x_b1d,), (context,), view)
        after = Cache(view.key_lbugi, view.value_lbugi, document_bu, cache.num_tokens)
        return y_b1d, after

    empty = Cache.empty(cfg, B, capacity=8)
    cached_lbugi = draw(empty.key_lbugi.shape)
    documents_bu = np.tile(np.r_[[1] * 3, [0] * 5], (B, 1)).astype(np.int32)
    cache = Cache(cached_lbugi, cached_lbugi, documents_bu, np.int32(3))
    args = (params, cache, draw((B, 1, D)), np.full((B, 1), 3, np.int32))
    cache_shardings = Cache.shardings(cfg, mesh)
    args = jax.tree.map(
        jax.device_put, args, (shardings, cache_shardings, rows(mesh), rows(mesh))
    )
    outs = (rows(mesh), cache_shardings)
    run = jax.jit(step, out_shardings=outs).lower(*args).compile()
    return *run(*args), run


def test_a_cache_stays_split_by_head():
    """One device has a quarter of the cache, and a token needs one collective, the sum
    of its output."""
    y_b1d, cache, run = decode_token(TENSOR_ALONE)
    expected = decode_token(Topology())
    assert_close((y_b1d, cache), expected[:2])
    value_lbugi = cache.value_lbugi
    shard = value_lbugi.sharding.shard_shape(value_lbugi.shape)
    assert shard == (1, B, 8, 1, 16)
    assert collectives(run) == Counter({("all-reduce", B * D): 1})
