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
from moejax.kernels.attention import attention
from moejax.model.cache import Cache, KvCacheView
from moejax.model.layers import (
    RmsNorm,
    Rotation,
    input_matrix,
    output_matrix,
    rope,
    rotation,
)
from moejax.model.sharding import check_tensor, on_own_rows, on_rows, sum_parts


class AttentionContext(NamedTuple):
    """Positions and documents of a batch's tokens, shared by all layers."""

    rotation: Rotation
    """RoPE angles of the tokens, by their positions in their documents."""
    first_bt: Int[Array, "b t"]
    """Key at which each token's document begins. It never falls along a row."""
    start: Int[Array, ""] | int = 0
    """Key at whose place the batch's first token stands: the number of tokens in the KV
    cache, or 0 without one."""

    @classmethod
    def from_windows(
        cls, position_bt: Int[Array, "b t"], cfg: Model, is_separate: bool
    ) -> "AttentionContext":
        """Return the context of whole windows, as in training and evaluation.

        A document begins where a position is 0, and at the start of a window, which may
        continue one. With `is_separate`, tokens attend only to tokens of their own
        document.
        """
        angles = rotation(position_bt, cfg.head_dim, cfg.rope_theta)
        if not is_separate:
            return cls(angles, jnp.zeros(position_bt.shape, jnp.int32))
        return cls(angles, _last_begin(position_bt == 0))

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
        start, num_new = cache.num_tokens, position_bt.shape[1]
        document_bu = jax.lax.dynamic_update_slice(
            cache.document_bu, document_bt, (0, start)
        )
        # Padding is document 0, so the first real token of a row begins another one.
        is_begin_bu = jnp.diff(document_bu, axis=1, prepend=0) != 0
        first_bt = jax.lax.dynamic_slice_in_dim(
            _last_begin(is_begin_bu), start, num_new, axis=1
        )
        angles = rotation(position_bt, cfg.head_dim, cfg.rope_theta)
        return cls(angles, first_bt, start), document_bu


def _last_begin(is_begin_bt: Bool[Array, "b t"]) -> Int[Array, "b t"]:
    """Return the last place up to each token where a document begins, or 0."""
    place_t = jnp.arange(is_begin_bt.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(is_begin_bt, place_t, 0), axis=1)


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
        parts: tuple[Float[Array, "b t d"], ...],
        contexts: tuple[AttentionContext, ...],
        cache_view: KvCacheView | None = None,
    ) -> tuple[tuple[Float[Array, "b t d"], ...], KvCacheView | None]:
        """Return the output for each part of a batch, and the cache view with these
        tokens appended. Each part has its context.

        Without a view the tokens attend to one another only, and None is returned in
        its place. A view is that of a batch in one part.
        """
        heads = []
        for projected, context in zip(self._project(parts), contexts, strict=True):
            out_bthi, cache_view = self._attend(*projected, context, cache_view)
            heads.append(out_bthi)
        outputs = on_rows(
            self._sum_heads,
            tuple(heads),
            (self.out_hid,),
            self.mesh,
            self.cfg.gradient_reduce_dtype,
            tensor_dim=2,
        )
        return outputs, cache_view

    def _attend(
        self, q_bthi, k_bugi, v_bugi, context: AttentionContext, cache_view
    ) -> tuple[Float[Array, "b t h i"], KvCacheView | None]:
        """Return the output of each head, and the cache view with these keys and values
        appended."""
        q_bthi = rope(self._normalize(q_bthi, self.q_norm), context.rotation)
        k_bugi = rope(self._normalize(k_bugi, self.k_norm), context.rotation)
        implementation = self.cfg.attention
        if cache_view is not None:
            cache_view, k_bugi, v_bugi = cache_view.append(
                context.start, k_bugi, v_bugi
            )
            implementation = "auto"  # the one that was named is for windows
        arrays = (q_bthi, k_bugi, v_bugi, context.first_bt, jnp.int32(context.start))
        out_bthi = on_own_rows(
            lambda q, k, v, first_bt, start: attention(
                q, k, v, first_bt, start=start, implementation=implementation
            ),
            arrays,
            (2, 2, 2, None, None),
            self.mesh,
            out_tensor_dim=2,
        )
        return out_bthi, cache_view

    def _project(
        self, parts: tuple[Float[Array, "b t d"], ...]
    ) -> tuple[list[Array], ...]:
        """Return queries, keys and values [b, t, heads, i] of each part, made by one
        product.

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
        return on_rows(body, parts, params, self.mesh, reduce_dtype, out_tensor_dim=2)

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
