"""Causal grouped-query attention with RoPE and optional QK-norm.

Heads are split over the tensor axis. Each device has whole groups; a group is one
key-value head and the query heads that read it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from moejax import axes
from moejax.config import Model
from moejax.model.cache import Cache, KvCacheView
from moejax.model.layers import (
    RmsNorm,
    Rotation,
    input_matrix,
    output_matrix,
    rope,
    rotation,
)
from moejax.model.sharding import check_tensor, on_rows, sum_parts


class AttentionContext(NamedTuple):
    """Positions and attention mask of a batch's tokens, shared by all layers."""

    rotation: Rotation
    """RoPE angles of the tokens, by their positions in their documents."""
    mask_bhtu: Bool[Array, "b 1 t u"] | None
    """True where query t may attend to key u. None masks nothing."""
    is_causal: bool
    """Whether keys after the query are hidden as well, beside those that the mask
    hides."""
    start: Int[Array, ""] | None = None
    """Position in the KV cache of the batch's first token. None without a cache."""

    @classmethod
    def from_windows(
        cls, position_bt: Int[Array, "b t"], cfg: Model, is_separate: bool
    ) -> "AttentionContext":
        """Return the context of whole windows, as in training and evaluation.

        A document begins where a position is 0. With `is_separate`, tokens attend only
        to tokens of their own document.
        """
        angles = rotation(position_bt, cfg.head_dim, cfg.rope_theta)
        if not is_separate:
            return cls(angles, None, is_causal=True)
        document_bt = jnp.cumsum(position_bt == 0, axis=1)
        same_btt = document_bt[:, :, None] == document_bt[:, None, :]
        return cls(angles, same_btt[:, None], is_causal=True)

    @classmethod
    def from_cache(
        cls, position_bt: Int[Array, "b t"], cfg: Model, cache: Cache
    ) -> tuple["AttentionContext", Int[Array, "b u"]]:
        """Return the context of t tokens that follow those in the cache.

        Also return the document numbers of all cached tokens, the new ones included
        (Cache.document_bu).
        """
        before_b1 = jnp.max(cache.document_bu, axis=1, keepdims=True)
        document_bt = before_b1 + jnp.cumsum(position_bt == 0, axis=1)
        start, (t, u) = (
            cache.num_tokens,
            (position_bt.shape[1], cache.document_bu.shape[1]),
        )
        document_bu = jax.lax.dynamic_update_slice(
            cache.document_bu, document_bt, (0, start)
        )
        mask_btu = document_bt[:, :, None] == document_bu[:, None, :]
        mask_btu &= jnp.arange(u) <= start + jnp.arange(t)[:, None]
        angles = rotation(position_bt, cfg.head_dim, cfg.rope_theta)
        context = cls(angles, mask_btu[:, None], is_causal=False, start=start)
        return context, document_bu


def check_heads(cfg: Model, tensor: int) -> None:
    """Raise ValueError unless `tensor` devices can split the heads evenly.

    Checking the key-value heads is enough: the number of query heads is a multiple of
    theirs.
    """
    check_tensor("Model.num_kv_heads", cfg.num_kv_heads, tensor)


class Attention(nnx.Module):
    """Projections and optional QK-norms of one attention layer."""

    def __init__(self, cfg: Model, mesh: Mesh, rngs: nnx.Rngs):
        d, h, g, i = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        check_heads(cfg, mesh.shape[axes.TENSOR])
        self.cfg, self.mesh = cfg, mesh
        self.q_dhi = input_matrix(rngs, d, h * i)
        self.k_dgi = input_matrix(rngs, d, g * i)
        self.v_dgi = input_matrix(rngs, d, g * i)
        self.out_hid = output_matrix(rngs, h * i, d)
        widths = {"none": (None, None), "head": (i, i), "full": (h * i, g * i)}
        self.q_norm, self.k_norm = (
            width and RmsNorm(width, cfg.norm_eps) for width in widths[cfg.qk_norm]
        )

    @jax.named_scope("attention")
    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        context: AttentionContext,
        cache_view: KvCacheView | None = None,
    ) -> tuple[Float[Array, "b t d"], KvCacheView | None]:
        """Return the output, and the cache view with these tokens appended.

        Without a view the tokens attend to one another only, and None is returned in
        its place.
        """
        q_bthi, k_bugi, v_bugi = self._project(x_btd)
        q_bthi = rope(self._normalize(q_bthi, self.q_norm), context.rotation)
        k_bugi = rope(self._normalize(k_bugi, self.k_norm), context.rotation)
        implementation = self.cfg.attention
        if cache_view is not None:
            cache_view, k_bugi, v_bugi = cache_view.append(
                context.start, k_bugi, v_bugi
            )
            implementation = "xla"  # fused kernels are made for many queries
        out_bthi = jax.nn.dot_product_attention(
            q_bthi,
            k_bugi,
            v_bugi,
            mask=context.mask_bhtu,
            is_causal=context.is_causal,
            implementation=implementation,
        )
        out_btd = on_rows(
            self._sum_heads,
            out_bthi,
            (self.out_hid,),
            self.mesh,
            self.cfg.gradient_reduce_dtype,
            tensor_dim=2,
        )
        return out_btd, cache_view

    def _project(self, x_btd: Float[Array, "b t d"]) -> list[Array]:
        """Return queries, keys and values [b, t, heads, i], made by one product.

        Three products would sum the gradient of x over the tensor axis three times.
        """

        def body(x_btd, *weights):
            (b, t, d), i = x_btd.shape, self.cfg.head_dim
            g = weights[-1].shape[1] // i  # heads of this device
            parts = [weight.reshape(d, g, -1, i) for weight in weights]
            # c: the query heads of a group, then its key head, then its value head.
            w_dgci = jnp.concatenate(parts, axis=2)
            y_btgci = jnp.einsum("btd,dgci->btgci", x_btd, w_dgci)
            last = y_btgci.shape[3] - 1
            parts = jnp.split(y_btgci, [last - 1, last], axis=3)
            return [part.reshape(b, t, -1, i) for part in parts]

        params = (self.q_dhi, self.k_dgi, self.v_dgi)
        reduce_dtype = self.cfg.gradient_reduce_dtype
        return on_rows(body, x_btd, params, self.mesh, reduce_dtype, out_tensor_dim=2)

    def _sum_heads(self, out_bthi: Array, weight_hid: Array) -> Float[Array, "b t d"]:
        """Return the output of attention from that of this device's heads."""
        out_btd = out_bthi.reshape(*out_bthi.shape[:2], -1) @ weight_hid
        return sum_parts(out_btd, self.mesh)

    def _normalize(self, y_bthi: Array, norm: RmsNorm | None) -> Array:
        """Return the queries or keys, normalised as cfg.qk_norm says: not at all, each
        head by itself, or all heads together."""
        if norm is None:
            return y_bthi
        if self.cfg.qk_norm == "full":
            return norm(y_bthi.reshape(*y_bthi.shape[:2], -1)).reshape(y_bthi.shape)
        return norm(y_bthi)
