"""One layer, standard or shortcut-connected, and the cycle of layers that a scan
repeats.

    standard    x -> + attention(x) -> + moe(x) + shared(x)
    shortcut    x -> + attention(x) -> + shared(x) ------> +
                |                                          |
                +----> moe(x) -----------------------------+

Every arrow into a part passes an RMSNorm of its own.
"""

from collections.abc import Callable

from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from moejax.config import Network
from moejax.model.attention import Attention, AttentionContext
from moejax.model.cache import KvCacheView
from moejax.model.layers import RmsNorm, SwiGlu
from moejax.model.sharding import batch_sharded
from moejax.moe.layer import MoeLayer
from moejax.moe.types import LayerSums

Routed = Callable[[MoeLayer, Array], tuple[Array, LayerSums]]
"""routed(layer, x_btd) -> y_btd, sums: how an MoE layer is called in this pass."""


def check_block(cfg: Network) -> None:
    """ValueError where the routed experts are all that follows attention, and are to
    read what comes before it."""
    if cfg.model.block == "shortcut" and cfg.moe.num_shared_experts < 1:
        raise ValueError(
            "Model.block='shortcut' has shared experts read what attention made, and "
            "Moe.num_shared_experts=0: use 1 or more"
        )


class Block(nnx.Module):
    """Attention and a feed-forward part: MoE (with shared experts) or dense.

    A shortcut block (ScMoE, arXiv 2404.05019) routes the input of its attention, which
    is the preceding layer's output, while shared experts read what attention made of
    it: neither of the exchanges of rows waits for this layer's attention.
    """

    def __init__(self, cfg: Network, is_moe: bool, mesh: Mesh, rngs: nnx.Rngs):
        check_block(cfg)
        model, moe = cfg.model, cfg.moe
        self.attention_norm = RmsNorm(model.d_model, model.norm_eps)
        self.attention = Attention(model, mesh, rngs)
        self.ff_norm = RmsNorm(model.d_model, model.norm_eps)
        self.mesh = mesh
        width = moe.num_shared_experts * moe.d_expert if is_moe else model.d_ff
        self.dense = SwiGlu(model.d_model, width, mesh, rngs) if width else None
        self.moe = MoeLayer(moe, model.d_model, rngs) if is_moe else None
        has_shortcut = is_moe and model.block == "shortcut"
        self.routed_norm = (
            RmsNorm(model.d_model, model.norm_eps) if has_shortcut else None
        )

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        context: AttentionContext,
        routed: Routed,
        cache_view: KvCacheView | None,
    ):
        """The block's output, the MoE layer's sums (None when dense), the memory."""
        sums, y_btd = None, 0.0
        if self.routed_norm is not None:  # ahead of attention in program order
            y_btd, sums = routed(self.moe, self.routed_norm(x_btd))
        seen_btd, cache_view = self.attention(
            self.attention_norm(x_btd), context, cache_view
        )
        x_btd = batch_sharded(x_btd + seen_btd, self.mesh)
        normed_btd = self.ff_norm(x_btd)
        if self.moe is not None and self.routed_norm is None:
            y_btd, sums = routed(self.moe, normed_btd)
        if self.dense is not None:
            y_btd = y_btd + self.dense(normed_btd)
        return batch_sharded(x_btd + y_btd, self.mesh), sums, cache_view


class Cycle(nnx.Module):
    """moe_every - 1 dense blocks, then one MoE block: what the scan repeats."""

    def __init__(self, cfg: Network, mesh: Mesh, rngs: nnx.Rngs):
        last = cfg.model.moe_every - 1
        self.blocks = nnx.List(
            [Block(cfg, i == last, mesh, rngs) for i in range(cfg.model.moe_every)]
        )

    def __call__(self, x_btd, context, routed, cache_view):
        for block in self.blocks:
            x_btd, sums, cache_view = block(x_btd, context, routed, cache_view)
        return x_btd, sums, cache_view
