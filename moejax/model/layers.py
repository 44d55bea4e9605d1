"""Dense parts: RMSNorm, RoPE, SwiGLU. Masters are float32, compute is as the input."""

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

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        hidden = jax.nn.silu(x @ gathered(self.gate_df, self.mesh, x.dtype))
        hidden = hidden * (x @ gathered(self.up_df, self.mesh, x.dtype))
        return hidden @ gathered(self.down_fd, self.mesh, x.dtype)


def rope(
    x_bthi: Float[Array, "b t h i"], position_t: Int[Array, " t"], theta: float
) -> Float[Array, "b t h i"]:
    """Rotate the two halves of each head by position * theta**(-2j/i) (RoFormer, eq.
    34, in the half-split order of Llama)."""
    half = x_bthi.shape[-1] // 2
    frequency_j = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_tj = position_t.astype(jnp.float32)[:, None] * frequency_j
    cos, sin = jnp.cos(angle_tj)[:, None], jnp.sin(angle_tj)[:, None]
    first, second = jnp.split(x_bthi.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_bthi.dtype)
