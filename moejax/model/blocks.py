"""One transformer layer, standard or shortcut-connected, and the scanned layer cycle.

    standard    x -> + attention(x) -> + moe(x) + shared(x)
    shortcut    x -> + attention(x) -> + shared(x) ------> +
                |                                          |
                +----> moe(x) -----------------------------+

Each part (attention, moe, shared) reads its input through an RMSNorm of its own,
except that moe and shared share one in the standard block.
"""

import operator
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from moejax.config import LayerKind, Network
from moejax.model.attention import Attention, AttentionContext
from moejax.model.cache import KvCacheView
from moejax.model.layers import RmsNorm, SwiGlu, vector
from moejax.model.mla import LatentAttention
from moejax.model.routed import MoeInputs, MoeOptions, Parts, routed_experts
from moejax.model.sharding import shard_batch
from moejax.moe.layer import MoeLayer
from moejax.moe.types import LayerSums


class Block(nnx.Module):
    """Attention and a feed-forward part: MoE (with shared experts) or dense.

    A shortcut block (ScMoE, arXiv 2404.05019) routes the input of its attention, which
    is the preceding layer's output. Its shared experts read the output of attention. So
    the exchanges of rows do not wait for this layer's attention.
    """

    def __init__(
        self,
        cfg: Network,
        kind: LayerKind,
        mesh: Mesh,
        rngs: nnx.Rngs,
        num_moe_layers: int = 1,
    ):
        """Make a block of this kind; with the parameters of `num_moe_layers` MoE layers
        if it has any."""
        model, moe, is_moe = cfg.model, cfg.moe, kind.is_moe
        self.is_moe = is_moe
        self.attention_norm = RmsNorm(model.d_model, model.norm_eps)
        make_attention = LatentAttention if cfg.is_latent else Attention
        self.attention = make_attention(cfg, kind.attention, mesh, rngs)
        self.ff_norm = RmsNorm(model.d_model, model.norm_eps)
        self.mesh, self.multiplier = mesh, model.residual_multiplier
        width = moe.shared_width if is_moe else model.d_ff
        self.dense = SwiGlu(model, width, mesh, rngs) if width else None
        has_gate = is_moe and moe.shared_gate
        self.shared_gate_d = vector(rngs, model.d_model) if has_gate else None
        self.moe = _moe_layers(cfg, num_moe_layers if is_moe else 0, rngs)
        has_shortcut = is_moe and model.block == "shortcut"
        self.routed_norm = (
            RmsNorm(model.d_model, model.norm_eps) if has_shortcut else None
        )

    def __call__(
        self,
        parts: Parts,
        contexts: tuple[AttentionContext, ...],
        moe: tuple[MoeLayer, MoeInputs] | None,
        options: MoeOptions | None,
        cache_view: KvCacheView | None,
    ) -> tuple[Parts, LayerSums | None, KvCacheView | None]:
        """Return the block's output for each part, the MoE layer's sums (None for a
        dense block) and the cache view of the next layer. `moe` is the MoE layer with
        its inputs; None for a dense block."""
        sums, added = None, ()
        if self.routed_norm is not None:  # before attention in program order
            routed = _each(self.routed_norm, parts)
            added, sums = routed_experts(*moe, routed, options)
        attended, cache_view = self.attention(
            _each(self.attention_norm, parts), contexts, cache_view
        )
        parts = self._sum(parts, attended)
        normed = _each(self.ff_norm, parts)
        if self.is_moe and self.routed_norm is None:
            added, sums = routed_experts(*moe, normed, options)
        if self.dense is not None:
            dense = self.dense(normed)
            if self.shared_gate_d is not None:
                dense = _each(self._gated, dense, normed)
            added = _each(jnp.add, added, dense) if added else dense
        return self._sum(parts, added), sums, cache_view

    def _gated(self, y_btd: Array, x_btd: Array) -> Float[Array, "b t d"]:
        """Return the output of the shared experts, times the gate of their input."""
        logit_bt = x_btd.astype(jnp.float32) @ self.shared_gate_d[...]
        return (y_btd * jax.nn.sigmoid(logit_bt)[..., None]).astype(y_btd.dtype)

    def _sum(self, parts: Parts, added: Parts) -> Parts:
        """Return the residual stream with the output of a part added to it, split as
        batches are."""
        if self.multiplier != 1:
            added = _each(lambda y: self.multiplier * y, added)
        return _each(lambda x, y: shard_batch(x + y, self.mesh), parts, added)


class Cycle(nnx.Module):
    """The blocks that a scan repeats: one of each kind of Network.cycle.

    The last MoE block has the parameters of all MoE layers of the cycle, so that those
    of all cycles are one array in the order of layers.
    """

    def __init__(self, cfg: Network, mesh: Mesh, rngs: nnx.Rngs):
        self.num_moe = num_moe = cfg.num_moe_in_cycle
        last = max(i for i, kind in enumerate(cfg.cycle) if kind.is_moe)
        self.blocks = nnx.List(
            [
                Block(cfg, kind, mesh, rngs, num_moe if i == last else 0)
                for i, kind in enumerate(cfg.cycle)
            ]
        )

    @property
    def moe(self) -> MoeLayer:
        """The MoE layer; if there are several, with their parameters stacked."""
        return next(block.moe for block in self.blocks if block.moe is not None)

    def __call__(
        self,
        parts: Parts,
        contexts: tuple[AttentionContext, ...],
        inputs: list[MoeInputs],
        options: MoeOptions,
        cache_view: KvCacheView | None,
    ) -> tuple[Parts, LayerSums, KvCacheView | None]:
        """Return the output for each part, the MoE layers' sums, stacked if there are
        several, and the next layer's cache view. `inputs` are those of each MoE
        layer."""
        layers = [self.moe]
        if self.num_moe > 1:
            graph, params = nnx.split(self.moe)
            layers = [nnx.merge(graph, each) for each in unstack(params, self.num_moe)]
        moes, sums = zip(layers, inputs, strict=True), []
        for block in self.blocks:
            moe = next(moes) if block.is_moe else None
            parts, own, cache_view = block(parts, contexts, moe, options, cache_view)
            sums += [own] if block.is_moe else []
        if self.num_moe > 1:
            return parts, jax.tree.map(lambda *of: jnp.stack(of), *sums), cache_view
        return parts, sums[0], cache_view


def stack(make, count: int, rngs: nnx.Rngs) -> nnx.Module | None:
    """Make `count` modules with their parameters stacked on a leading dim.

    Return None if `count` is 0.
    """
    if count == 0:
        return None
    keys = jax.random.split(rngs.params(), count)
    return nnx.vmap(lambda key: make(rngs=nnx.Rngs(params=key)))(keys)


def _moe_layers(cfg: Network, count: int, rngs: nnx.Rngs) -> MoeLayer | None:
    """Make an MoE layer, or several with their parameters stacked, or none."""
    has_bias = cfg.router.bias
    make = partial(MoeLayer, cfg.moe, cfg.model.d_model, router_bias=has_bias)
    return make(rngs) if count == 1 else stack(make, count, rngs)


def unstack(tree, num_moe: int) -> list:
    """Return what each MoE layer of a cycle has of arrays with a leading dim of them,
    or of arrays without one if there is one layer."""
    if num_moe == 1:
        return [tree]
    return [jax.tree.map(operator.itemgetter(i), tree) for i in range(num_moe)]


def by_cycle(tree, num_moe: int):
    """Reshape arrays of all MoE layers [l, ..] to [c, m, ..]: cycles, and the layers of
    each. With one MoE layer a cycle, return them as they are."""
    if num_moe == 1:
        return tree
    return jax.tree.map(
        lambda leaf: leaf.reshape(len(leaf) // num_moe, num_moe, *leaf.shape[1:]), tree
    )


def by_layer(tree, num_moe: int):
    """Reshape arrays [c, m, ..] of cycles to those of all MoE layers [l, ..]: the
    inverse of `by_cycle`."""
    if num_moe == 1:
        return tree
    return jax.tree.map(
        lambda leaf: leaf.reshape(len(leaf) * num_moe, *leaf.shape[2:]), tree
    )


def _each(function: Callable[..., Array], *activations: Parts) -> Parts:
    """Return the function's results for each part of activations."""
    return tuple(map(function, *activations))
