"""Causal grouped-query attention with RoPE and optional QK-norm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from moejax.config import Model
from moejax.model.layers import RmsNorm, rope, weight
from moejax.model.sharding import gathered


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

    def __call__(self, x_btd: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        b, t, _ = x_btd.shape
        q_bthi = self._project(x_btd, self.q_dhi, self.q_norm)
        k_btgi = self._project(x_btd, self.k_dgi, self.k_norm)
        v_btgi = self._project(x_btd, self.v_dgi, None)
        position_t = jnp.arange(t)
        out_bthi = jax.nn.dot_product_attention(
            rope(q_bthi, position_t, self.cfg.rope_theta),
            rope(k_btgi, position_t, self.cfg.rope_theta),
            v_btgi,
            is_causal=True,
            implementation=self.cfg.attention,
        )
        return out_bthi.reshape(b, t, -1) @ gathered(
            self.out_hid, self.mesh, x_btd.dtype
        )

    def _project(self, x_btd, weight: nnx.Param, norm: RmsNorm | None) -> Array:
        """Heads [b, t, heads, i], normalised per head or over all of them."""
        y = x_btd @ gathered(weight, self.mesh, x_btd.dtype)
        heads = (*x_btd.shape[:2], -1, self.cfg.head_dim)
        if norm is None:
            return y.reshape(heads)
        if self.cfg.qk_norm == "full":
            return norm(y).reshape(heads)
        return norm(y.reshape(heads))
