"""Define the whole decoder by its formulas, without scan, exchange or kernels.

Everything is a loop over layers, positions or choices, so that the jaxpr holds exactly
the multiplications that a causal, dropless model needs. `network` builds the
Transformer that tests compare with these formulas.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax import axes
from moejax.config import Config, Model
from moejax.model.transformer import Transformer
from moejax.moe import route as routing
from moejax.moe.layer import RouterBias
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from tests.support.resolved import make_layout


class Network(NamedTuple):
    """Functions of a Transformer on the first devices, with random parameters."""

    apply: Callable
    """apply(params, tokens_bt, position_bt=None, step_inputs=None, bias=zeros,
    plan=home) -> hidden_btd, sums, head_vd; not jitted. Without positions each row is
    one document from its start. `bias` is the tree of the router's biases."""
    jit: Callable
    extend: Callable
    """extend(params, tokens_bt, position_bt, cache, layout, bias=zeros) -> hidden_btd,
    cache."""
    params: dict
    """float32 NumPy arrays; norms' scales, biases and router are random too."""
    bias: dict
    """The router's biases, which are zeros."""


@functools.cache
def network(cfg: Config) -> Network:
    """Return the Transformer of a configuration, under the home plan by default."""
    devices = jax.devices()[: cfg.mesh.num_devices]
    mesh = axes.make_mesh(cfg.mesh, devices)
    model = nnx.eval_shape(lambda: Transformer(cfg.network, mesh, nnx.Rngs(0)))
    graph, shapes, bias = nnx.split(model, nnx.Param, RouterBias)
    bias = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), nnx.to_pure_dict(bias))
    layout = make_layout(cfg)
    plan = ExpertPlan.home_in(layout, cfg.model.num_moe_layers)
    placement = Placement.from_plan(plan, layout)

    def apply(
        params, tokens_bt, position_bt=None, step_inputs=None, bias=bias, plan=plan
    ):
        model = nnx.merge(graph, params, bias)
        position_bt = one_document(tokens_bt) if position_bt is None else position_bt
        placement = Placement.from_plan(plan, layout)
        hidden_btd, sums = model(tokens_bt, position_bt, placement, layout, step_inputs)
        return hidden_btd, sums, model.whole_head()

    def extend(params, tokens_bt, position_bt, cache, layout, bias=bias):
        model = nnx.merge(graph, params, bias)
        return model.extend(tokens_bt, position_bt, placement, layout, cache)

    random = np.random.default_rng(0)

    def draw(path, leaf):
        values = random.standard_normal(leaf.shape).astype(np.float32)
        is_scale = path[-1].key == "scale_d"
        if "bias" in path[-1].key or path[-1].key == "sinks_h":
            return values
        return 1 + values / 5 if is_scale else values * leaf.shape[-2] ** -0.5

    params = jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(shapes))
    return Network(apply, jax.jit(apply), extend, params, bias)


def one_document(tokens_bt):
    """Return positions 0, 1, 2 .. for every row, which make it one document."""
    return jnp.broadcast_to(jnp.arange(tokens_bt.shape[1]), tokens_bt.shape)


def hidden_states(cfg: Config, params: dict, tokens_bt, position_bt=None):
    """Return the final hidden states [b, t, d] in float32.

    `params` are a Transformer's parameters as nested dicts, with stacked layers. Routed
    experts of a shortcut layer read the input of attention.
    """
    model = cfg.model
    position_bt = one_document(tokens_bt) if position_bt is None else position_bt
    x_btd = params["embed_vd"][tokens_bt]
    for layer in range(model.num_layers):
        block, kind = _find_block(cfg, params, layer)
        input_btd = x_btd
        normed_btd = norm(x_btd, block["attention_norm"], model)
        args = normed_btd, position_bt, kind.attention
        x_btd = x_btd + attention(cfg, block["attention"], *args)
        normed_btd = norm(x_btd, block["ff_norm"], model)
        if kind.is_moe:
            routed_btd = normed_btd
            if model.block == "shortcut":
                routed_btd = norm(input_btd, block["routed_norm"], model)
            x_btd = x_btd + moe(cfg, block["moe"], routed_btd)
        if "dense" in block:
            x_btd = x_btd + swiglu(block["dense"], normed_btd)
    return norm(x_btd, params["norm"], model)


def logits(cfg: Config, params: dict, tokens_bt, position_bt=None):
    """Return the logits [b, t, v] of every token."""
    head = "embed_vd" if cfg.model.tie_embeddings else "head_vd"
    return hidden_states(cfg, params, tokens_bt, position_bt) @ params[head].T


def _find_block(cfg: Config, params: dict, layer: int):
    """Return the parameters of one layer, and its kind.

    The dense prefix comes first, then cycles. The parameters of the MoE layers of all
    cycles are in one block of the cycle, in the order of layers.
    """
    kinds, start = cfg.network.cycle, cfg.model.first_k_dense
    if layer < start:
        block = jax.tree.map(lambda leaf: leaf[layer], params["prefix"])
        return block, cfg.network.prefix_kind
    cycle, index = divmod(layer - start, len(kinds))
    block = dict(params["cycles"]["blocks"][index])
    block.pop("moe", None)
    block = jax.tree.map(lambda leaf: leaf[cycle], block)
    if kinds[index].is_moe:
        all_blocks = params["cycles"]["blocks"].values()
        (layers,) = (block["moe"] for block in all_blocks if "moe" in block)
        num_before = sum(kind.is_moe for kind in kinds[:index])
        row = cycle * cfg.network.num_moe_in_cycle + num_before
        block["moe"] = jax.tree.map(lambda leaf: leaf[row], layers)
    return block, kinds[index]


def norm(x, params: dict, model: Model):
    """Return the RMS norm of the last dim, times the scale."""
    mean_square = (x * x).mean(axis=-1, keepdims=True)
    return x / jnp.sqrt(mean_square + model.norm_eps) * params["scale_d"]


def swiglu(params: dict, x):
    """Return down(silu(gate(x)) * up(x))."""
    hidden = jax.nn.silu(x @ params["gate_df"]) * (x @ params["up_df"])
    return hidden @ params["down_fd"]


def attention(cfg: Config, params: dict, x_btd, position_bt, kind: str = "full"):
    """Return causal attention, computed token by token.

    Each query sees the keys of its own document up to its own position, or those of
    them that the kind of layer allows. A document begins at position 0. The query heads
    r of group g share one key head.
    """
    model, (b, t, _) = cfg.model, x_btd.shape
    q, k, v = (x_btd @ params[name] for name in ("q_dhi", "k_dgi", "v_dgi"))
    if model.qk_norm == "full":
        q, k = norm(q, params["q_norm"], model), norm(k, params["k_norm"], model)
    q, k, v = (y.reshape(b, t, -1, model.head_dim) for y in (q, k, v))
    if model.qk_norm == "head":
        q, k = norm(q, params["q_norm"], model), norm(k, params["k_norm"], model)
    if kind == "nope":
        steps_bt = (position_bt + 1) // cfg.attention.temperature_floor
        factor_bt = 1 + cfg.attention.temperature_scale * jnp.log1p(steps_bt)
        q = q * factor_bt[..., None, None]
    else:
        q, k = (turn(y, position_bt, model.rope_theta) for y in (q, k))
    q = q.reshape(b, t, model.num_kv_heads, -1, model.head_dim)
    rows = []
    for now in range(t):
        seen = slice(0, now + 1)
        score = jnp.einsum("bgri,bsgi->bgrs", q[:, now], k[:, seen])
        if cfg.data.documents == "separate":
            later_bs = jnp.cumsum(position_bt[:, now::-1] == 0, axis=1)[:, ::-1]
            is_own_bs = jnp.pad(later_bs, ((0, 0), (0, 1)))[:, 1:] == 0
            score = jnp.where(is_own_bs[:, None, None], score, -jnp.inf)
        if kind == "sliding":
            is_far_s = now - np.arange(now + 1) >= cfg.attention.sliding_window
            score = jnp.where(is_far_s, -jnp.inf, score)
        if kind == "chunked":
            chunk_bs = position_bt[:, seen] // cfg.attention.chunk_size
            is_far_bs = chunk_bs != chunk_bs[:, -1:]
            score = jnp.where(is_far_bs[:, None, None], -jnp.inf, score)
        share = jax.nn.softmax(score / model.head_dim**0.5, axis=-1)
        rows.append(jnp.einsum("bgrs,bsgi->bgri", share, v[:, seen]).reshape(b, -1))
    return jnp.stack(rows, axis=1) @ params["out_hid"]


def turn(x_bthi, position_bt, theta: float):
    """Return rotary embeddings (RoFormer eq. 34), computed with complex numbers.

    The j-th pair of values is rotated by t * theta^(-2j/i).
    """
    half = x_bthi.shape[-1] // 2
    angle_btj = position_bt[..., None] * theta ** (-jnp.arange(half) / half)
    pair = jax.lax.complex(x_bthi[..., :half], x_bthi[..., half:])
    pair = pair * jnp.exp(1j * angle_btj)[:, :, None]
    return jnp.concatenate([pair.real, pair.imag], axis=-1)


def moe(cfg: Config, params: dict, x_btd):
    """Return the MoE layer's output, computed choice by choice: for each k, every token
    is multiplied by the weights of its k-th expert."""
    b, t, d = x_btd.shape
    x_nd = x_btd.reshape(b * t, d)
    bias_e = jnp.zeros(cfg.moe.num_experts)
    args = params["router_de"], bias_e, cfg.router, cfg.moe.top_k
    routes, *_ = routing.route(x_nd, *args)
    y_nd = jnp.zeros_like(x_nd)
    for expert_n, gate_n in zip(routes.expert_nk.T, routes.gate_nk.T):
        weights = (params[name][expert_n] for name in ("gate_edf", "up_edf"))
        gate_nf, up_nf = (jnp.einsum("nd,ndf->nf", x_nd, w) for w in weights)
        hidden_nf = jax.nn.silu(gate_nf) * up_nf
        down_nfd = params["down_efd"][expert_n]
        y_nd += gate_n[:, None] * jnp.einsum("nf,nfd->nd", hidden_nf, down_nfd)
    return y_nd.reshape(b, t, d)
