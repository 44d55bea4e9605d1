"""Test which keys the tokens of windows and caches read, and that a layer of attention
makes no array of all pairs of tokens."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax import axes
from moejax.config import Model, Network
from moejax.kernels.attention.choose import FEW_QUERIES
from moejax.model.attention import Attention, AttentionContext
from moejax.model.cache import Cache, KvCacheView
from moejax.plan.layout import Topology
from tests.support.close import assert_close

CFG = Network(
    Model(
        d_model=8, num_heads=2, num_kv_heads=1, head_dim=4, num_layers=1,
        compute_dtype="float32",
    )
)  # fmt: skip
PADDING = -1
"""Position of a padding token."""


def is_read(first_bt, num_keys: int, start: int = 0):
    """Return whether each token reads each key, as causal attention from `first_bt` on
    has it [b, t, u]."""
    first_bt = np.asarray(first_bt)
    place_t1 = start + np.arange(first_bt.shape[1])[:, None]
    key_u = np.arange(num_keys)
    return (key_u >= first_bt[..., None]) & (key_u <= place_t1)


def is_read_by_definition(position_bu):
    """Return, token by token, whether it reads each key [b, u, u]: walk back from a
    token to the first of its document, which is at position 0 or begins the row."""
    b, u = position_bu.shape
    is_read_buu = np.zeros((b, u, u), bool)
    for row in range(b):
        for token in range(u):
            for key in range(token, -1, -1):
                is_read_buu[row, token, key] = True
                if position_bu[row, key] == 0:
                    break
    return is_read_buu


def random_positions(seed: int, b: int, u: int, is_begun: bool):
    """Return positions of random documents [b, u]. With `is_begun`, rows continue a
    document."""
    random = np.random.default_rng(seed)
    position_bu = np.zeros((b, u), np.int32)
    for row in range(b):
        position = 7 if is_begun else 0
        for token in range(u):
            position_bu[row, token] = position
            position = 0 if random.random() < 0.3 else position + 1
    return position_bu


@pytest.mark.parametrize("is_begun", [True, False])
def test_documents_and_chunks_of_windows(is_begun):
    """A token reads the keys of its document up to its own; in a chunked layer those of
    them whose position has the same chunk. Joined documents are one."""
    position_bt = random_positions(0, 6, 24, is_begun)
    context = AttentionContext.from_windows(jnp.asarray(position_bt), CFG)
    chunk_bt = position_bt // 3
    of_document_btu = is_read_by_definition(position_bt)
    of_chunk_btu = of_document_btu & (chunk_bt[:, :, None] == chunk_bt[:, None])
    for first_bt, expected_btu in (
        (context.first_bt, of_document_btu),
        (context.first_of_chunk(3), of_chunk_btu),
    ):
        np.testing.assert_array_equal(is_read(first_bt, 24), expected_btu)
        assert (np.diff(first_bt, axis=1) >= 0).all()
    cfg = dataclasses.replace(CFG, documents="joined")
    joined = AttentionContext.from_windows(jnp.asarray(position_bt), cfg)
    np.testing.assert_array_equal(joined.first_bt, np.zeros((6, 24)))


def test_documents_of_a_cache():
    """Rows are padded to the longest prompt, and grow by 5, 1 and 3 tokens, among them
    new documents. A real token reads no padding."""
    num_padding_b, chunks, capacity = np.array([0, 3, 6, 7]), (8, 5, 1, 3), 20
    total = sum(chunks)
    position_bu = random_positions(1, 4, total, is_begun=False)
    for row, num_padding in enumerate(num_padding_b):
        real_u = position_bu[row, : total - num_padding].copy()
        position_bu[row] = np.r_[np.full(num_padding, PADDING), real_u]
    assert (position_bu[:, chunks[0] :] == 0).any(), (
        "a document begins after the prompt"
    )
    expected_buu = is_read_by_definition(position_bu)
    is_real_bu = position_bu != PADDING
    cache, start = Cache.empty(CFG, 4, capacity), 0
    from_cache = jax.jit(
        lambda position_bt, cache: AttentionContext.from_cache(position_bt, CFG, cache)
    )
    for size in chunks:
        new = slice(start, start + size)
        context, document_bu = from_cache(position_bu[:, new], cache)
        actual_btu = is_read(context.first_bt, capacity, int(context.start))
        is_real_bt = is_real_bu[:, new]
        np.testing.assert_array_equal(
            actual_btu[is_real_bt][:, :total], expected_buu[:, new][is_real_bt]
        )
        assert not actual_btu[..., total:].any()
        assert (np.diff(context.first_bt, axis=1) >= 0).all()
        start += size
        cache = cache.replace(document_bu=document_bu, num_tokens=jnp.int32(start))


def extend(chunks: tuple[int, ...], position_bu, x_bud):
    """Return the layer's output for tokens that come in chunks of these sizes."""
    layer = Attention(
        CFG, "full", axes.make_mesh(Topology(), jax.devices()[:1]), nnx.Rngs(0)
    )
    graph, params = nnx.split(layer)

    def run(params, position_bu, x_bud):
        cache, outs = Cache.empty(CFG, len(position_bu), capacity=24), []
        edges = np.cumsum((0, *chunks))
        for start, end in itertools.pairwise(edges):
            context, document_bu = AttentionContext.from_cache(
                position_bu[:, start:end], CFG, cache
            )
            view = KvCacheView(cache.key_lbugi, cache.value_lbugi, jnp.int32(0))
            x_btd = x_bud[:, start:end]
            (out_btd,), view = nnx.merge(graph, params)((x_btd,), (context,), view)
            outs.append(out_btd)
            cache = Cache(view.key_lbugi, view.value_lbugi, document_bu, jnp.int32(end))
        return jnp.concatenate(outs, axis=1)

    return jax.jit(run)(params, position_bu, x_bud)


@pytest.mark.slow
def test_a_prompt_in_one_chunk_is_the_prompt_in_several():
    """A long prompt is computed in blocks and few tokens by the definition; both read
    the same keys of a cache that has rows with padding."""
    position_bu = random_positions(2, 2, FEW_QUERIES + 4, is_begun=False)
    position_bu[1] = np.r_[[PADDING] * 3, position_bu[1, :-3]]
    shape = (*position_bu.shape, CFG.model.d_model)
    x_bud = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    whole_bud = extend((FEW_QUERIES + 4,), position_bu, x_bud)
    parts_bud = extend((8, FEW_QUERIES - 4), position_bu, x_bud)
    is_real_bu = position_bu != PADDING
    assert_close(whole_bud[is_real_bu], parts_bud[is_real_bu])


def largest_array(implementation: str, num_tokens: int) -> int:
    """Return the elements of the largest array in a compiled layer of attention with
    its gradients."""
    mesh = axes.make_mesh(Topology(), jax.devices()[:1])
    model = dataclasses.replace(CFG.model, attention=implementation)
    cfg = dataclasses.replace(CFG, model=model)
    layer = Attention(cfg, "full", mesh, nnx.Rngs(0))
    graph, params = nnx.split(layer)
    position_bt = jnp.arange(num_tokens)[None] % 300

    def loss(params, x_btd):
        context = AttentionContext.from_windows(position_bt, cfg)
        return jnp.sum(jnp.sin(nnx.merge(graph, params)((x_btd,), (context,))[0][0]))

    x_btd = jax.ShapeDtypeStruct((1, num_tokens, CFG.model.d_model), jnp.float32)
    run = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x_btd).compile()
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", run.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.slow
def test_a_layer_has_no_array_of_all_pairs_of_tokens():
    assert largest_array("blocked", 1024) < 1024**2 / 4
    assert largest_array("reference", 1024) >= 1024**2
