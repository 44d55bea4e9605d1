"""One transformer layer, standard or shortcut-connected, and the scanned layer cycle.

    standard    x -> + attention(x) -> + moe(x) + shared(x)
    shortcut    x -> + attention(x) -> + shared(x) ------> +
                |                                          |
                +----> moe(x) -----------------------------+

Each part (attention, moe, shared) reads its input through an RMSNorm of its own,
except that moe and shared share one in the standard block.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from moejax.config import Network
from moejax.model.attention import Attention, AttentionContext
from moejax.model.cache import KvCacheView
from moejax.model.layers import RmsNorm, SwiGlu
from moejax.model.sharding import shard_batch
from moejax.moe.layer import MoeLayer
from moejax.moe.types import LayerSums

Parts = tuple[Float[Array, "b t d"], ...]
"""Activations of a batch: one array, or two halves of each device's sequences that have
nothing in common but the weights (Moe.halves)."""

RunMoe = Callable[[MoeLayer, Parts], tuple[Parts, LayerSums]]
"""Signature of run_moe(layer, parts) -> (parts, sums), which calls an MoE layer with
everything else that it needs in this pass (placement, slots, jitter)."""


def check_block(cfg: Network) -> None:
    """Raise ValueError for a shortcut block without shared experts.

    In such a block no feed-forward part would read the output of attention.
    """
    if cfg.model.block == "shortcut" and cfg.moe.num_shared_experts < 1:
        raise ValueError(
            "Model.block='shortcut' needs shared experts to read the output of "
            "attention, but Moe.num_shared_experts=0: use 1 or more"
        )


class Block(nnx.Module):
    """Attention and a feed-forward part: MoE (with shared experts) or dense.

    A shortcut block (ScMoE, arXiv 2404.05019) routes the input of its attention, which
    is the preceding layer's output. Its shared experts read the output of attention. So
    the exchanges of rows do not wait for this layer's attention.
    """

    def __init__(self, cfg: Network, is_moe: bool, mesh: Mesh, rngs: nnx.Rngs):
        check_block(cfg)
        model, moe = cfg.model, cfg.moe
        self.attention_norm = RmsNorm(model.d_model, model.norm_eps)
        self.attention = Attention(cfg, mesh, rngs)
        self.ff_norm = RmsNorm(model.d_model, model.norm_eps)
        self.mesh, self.multiplier = mesh, model.residual_multiplier
        width = moe.num_shared_experts * moe.d_expert if is_moe else model.d_ff
        self.dense = SwiGlu(model, width, mesh, rngs) if width else None
        self.moe = MoeLayer(moe, model.d_model, rngs) if is_moe else None
        has_shortcut = is_moe and model.block == "shortcut"
        self.routed_norm = (
            RmsNorm(model.d_model, model.norm_eps) if has_shortcut else None
        )

    def __call__(
        self,
        parts: Parts,
        contexts: tuple[AttentionContext, ...],
        run_moe: RunMoe,
        cache_view: KvCacheView | None,
    ):
        """Return the block's output for each part, the MoE layer's sums (None for a
        dense block) and the cache view of the next layer."""
        sums, added = None, ()
        if self.routed_norm is not None:  # before attention in program order
            added, sums = run_moe(self.moe, _each(self.routed_norm, parts))
        attended, cache_view = self.attention(
            _each(self.attention_norm, parts), contexts, cache_view
        )
        parts = self._sum(parts, attended)
        normed = _each(self.ff_norm, parts)
        if self.moe is not None and self.routed_norm is None:
            added, sums = run_moe(self.moe, normed)
        if self.dense is not None:
            dense = self.dense(normed)
            added = _each(jnp.add, added, dense) if added else dense
        return self._sum(parts, added), sums, cache_view

    def _sum(self, parts: Parts, added: Parts) -> Parts:
        """Return the residual stream with the output of a part added to it, split as
        batches are."""
        if self.multiplier != 1:
            added = _each(lambda y: self.multiplier * y, added)
        return _each(lambda x, y: shard_batch(x + y, self.mesh), parts, added)


class Cycle(nnx.Module):
    """The blocks that a scan repeats: moe_every - 1 dense ones, then one MoE block."""

    def __init__(self, cfg: Network, mesh: Mesh, rngs: nnx.Rngs):
        last = cfg.model.moe_every - 1
        self.blocks = nnx.List(
            [Block(cfg, i == last, mesh, rngs) for i in range(cfg.model.moe_every)]
        )

    def __call__(self, parts, contexts, run_moe, cache_view):
        """Return the output, the MoE layer's sums and the next layer's cache view."""
        for block in self.blocks:
            parts, sums, cache_view = block(parts, contexts, run_moe, cache_view)
        return parts, sums, cache_view


def _each(function: Callable[..., Array], *activations: Parts) -> Parts:
    """Return the function's results for each part of activations."""
    return tuple(map(function, *activations))
