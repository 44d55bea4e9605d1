"""Dense parts: RMSNorm, RoPE, SwiGLU. Masters are float32, compute is as the input."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from moejax.model.sharding import gathered


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param:
    """Truncated normal of variance 1 / fan_in; where it is split is decided by size."""
    init = jax.nn.initializers.truncated_normal(fan_in**-0.5)
    return nnx.Param(init(rngs.params(), shape, jnp.float32))


class RmsNorm(nnx.Module):
    def __init__(self, width: int, eps: float):
        self.scale_d = nnx.Param(jnp.ones(width, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """x / rms(x) * scale over the last dim, in float32, back in x's dtype."""
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(variance + self.eps)
        return (normed * self.scale_d[...]).astype(x.dtype)


class SwiGlu(nnx.Module):
    def __init__(self, d_model: int, d_ff: int, mesh: Mesh, rngs: nnx.Rngs):
        self.mesh = mesh
        self.gate_df = weight(rngs, (d_model, d_ff), d_model)
        self.up_df = weight(rngs, (d_model, d_ff), d_model)
        self.down_fd = weight(rngs, (d_ff, d_model), d_ff)

    @jax.named_scope("dense")
    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        hidden = jax.nn.silu(x @ gathered(self.gate_df, self.mesh, x.dtype))
        hidden = hidden * (x @ gathered(self.up_df, self.mesh, x.dtype))
        return hidden @ gathered(self.down_fd, self.mesh, x.dtype)


class Rotation(NamedTuple):
    """By which angle the i/2 pairs of a head are turned at each token."""

    cos_btj: Float[Array, "b t j"]
    sin_btj: Float[Array, "b t j"]


def rotation(position_bt: Int[Array, "b t"], head_dim: int, theta: float) -> Rotation:
    """By position * theta**(-2j/i), in float32 (RoFormer, eq. 34)."""
    half = head_dim // 2
    frequency_j = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_btj = position_bt.astype(jnp.float32)[..., None] * frequency_j
    return Rotation(jnp.cos(angle_btj), jnp.sin(angle_btj))


def rope(x_bthi: Float[Array, "b t h i"], by: Rotation) -> Float[Array, "b t h i"]:
    """Turn the pairs of each head (the half-split order of Llama)."""
    cos, sin = by.cos_btj[:, :, None], by.sin_btj[:, :, None]
    first, second = jnp.split(x_bthi.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_bthi.dtype)
