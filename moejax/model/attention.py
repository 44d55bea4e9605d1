"""Causal grouped-query attention with RoPE and optional QK-norm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from moejax.config import Model
from moejax.model.cache import Cache, Memory
from moejax.model.layers import RmsNorm, Rotation, rope, rotation, weight
from moejax.model.sharding import gathered


class Sight(NamedTuple):
    """Where tokens stand and what they see: one for all layers."""

    rotation: Rotation
    mask_bhtu: Bool[Array, "b 1 t u"] | None
    """Which keys a query may see; None: all."""
    is_causal: bool
    """Whether keys after the query are hidden beside those that the mask hides."""
    start: Int[Array, ""] | None = None
    """Place of the first token in a cache."""

    @classmethod
    def of_windows(
        cls, position_bt: Int[Array, "b t"], cfg: Model, is_separate: bool
    ) -> "Sight":
        """Separate documents begin where a position is 0."""
        turn = rotation(position_bt, cfg.head_dim, cfg.rope_theta)
        if not is_separate:
            return cls(turn, None, is_causal=True)
        document_bt = jnp.cumsum(position_bt == 0, axis=1)
        same_btt = document_bt[:, :, None] == document_bt[:, None, :]
        return cls(turn, same_btt[:, None], is_causal=True)

    @classmethod
    def of_cache(
        cls, position_bt: Int[Array, "b t"], cfg: Model, cache: Cache
    ) -> tuple["Sight", Int[Array, "b u"]]:
        """Of tokens that follow those in the cache, and the documents of them all."""
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
        turn = rotation(position_bt, cfg.head_dim, cfg.rope_theta)
        return cls(turn, mask_btu[:, None], is_causal=False, start=start), document_bu


class Attention(nnx.Module):
    def __init__(self, cfg: Model, mesh: Mesh, rngs: nnx.Rngs):
        d, h, g, i = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.cfg, self.mesh = cfg, mesh
        self.q_dhi = weight(rngs, (d, h * i), d)
        self.k_dgi = weight(rngs, (d, g * i), d)
        self.v_dgi = weight(rngs, (d, g * i), d)
        self.out_hid = weight(rngs, (h * i, d), h * i)
        widths = {"none": (None, None), "head": (i, i), "full": (h * i, g * i)}
        self.q_norm, self.k_norm = (
            width and RmsNorm(width, cfg.norm_eps) for width in widths[cfg.qk_norm]
        )

    @jax.named_scope("attention")
    def __call__(
        self, x_btd: Float[Array, "b t d"], sight: Sight, memory: Memory | None = None
    ) -> tuple[Float[Array, "b t d"], Memory | None]:
        """The output, and the memory with these tokens in it."""
        b, t, _ = x_btd.shape
        q_bthi = rope(self._project(x_btd, self.q_dhi, self.q_norm), sight.rotation)
        k_bugi = rope(self._project(x_btd, self.k_dgi, self.k_norm), sight.rotation)
        v_bugi = self._project(x_btd, self.v_dgi, None)
        implementation = self.cfg.attention
        if memory is not None:
            memory, k_bugi, v_bugi = memory.extended(sight.start, k_bugi, v_bugi)
            implementation = "xla"  # fused kernels want many queries
        out_bthi = jax.nn.dot_product_attention(
            q_bthi,
            k_bugi,
            v_bugi,
            mask=sight.mask_bhtu,
            is_causal=sight.is_causal,
            implementation=implementation,
        )
        out_btd = out_bthi.reshape(b, t, -1) @ gathered(
            self.out_hid, self.mesh, x_btd.dtype
        )
        return out_btd, memory

    def _project(self, x_btd, weight: nnx.Param, norm: RmsNorm | None) -> Array:
        """Heads [b, t, heads, i], normalised per head or over all of them."""
        y = x_btd @ gathered(weight, self.mesh, x_btd.dtype)
        heads = (*x_btd.shape[:2], -1, self.cfg.head_dim)
        if norm is None:
            return y.reshape(heads)
        if self.cfg.qk_norm == "full":
            return norm(y).reshape(heads)
        return norm(y.reshape(heads))
