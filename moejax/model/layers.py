"""Dense building blocks: RMSNorm, SwiGLU, matrices and biases.

Parameters are float32 master parameters. Products are computed in the input's dtype.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from moejax.config import Model
from moejax.model.sharding import on_rows, sum_parts


def input_matrix(rngs: nnx.Rngs, d_model: int, width: int) -> nnx.Param:
    """Return a new matrix that reads x. Its columns are split over the tensor axis."""
    return _weight(rngs, (d_model, width), tensor_dim=1)


def latent_matrix(rngs: nnx.Rngs, d_model: int, width: int) -> nnx.Param:
    """Return a new matrix that reads x, and is whole over the tensor axis: all heads
    read its output."""
    return _weight(rngs, (d_model, width), tensor_dim=None)


def output_matrix(rngs: nnx.Rngs, width: int, d_model: int) -> nnx.Param:
    """Return a new matrix whose output is added to x. Its rows are split over the
    tensor axis."""
    return _weight(rngs, (width, d_model), tensor_dim=0)


def _weight(
    rngs: nnx.Rngs, shape: tuple[int, int], tensor_dim: int | None
) -> nnx.Param:
    """Return a parameter drawn from a truncated normal of variance 1 / rows."""
    init = jax.nn.initializers.truncated_normal(shape[0] ** -0.5)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), tensor_dim=tensor_dim)


def bias(width: int, tensor_dim: int | None) -> nnx.Param:
    """Return a new bias of zeros. It is split over the tensor axis as the output is to
    which it is added: in dim 0, or not at all (None)."""
    return nnx.Param(jnp.zeros(width, jnp.float32), tensor_dim=tensor_dim)


def vector(rngs: nnx.Rngs, width: int) -> nnx.Param:
    """Return a new vector that multiplies x to a number."""
    init = jax.nn.initializers.truncated_normal(width**-0.5)
    return nnx.Param(init(rngs.params(), (width,), jnp.float32))


class RmsNorm(nnx.Module):
    """RMS normalization with a learned scale per channel, and a constant divisor."""

    def __init__(self, width: int, eps: float, divisor: float = 1.0):
        self.scale_d = nnx.Param(jnp.ones(width, jnp.float32))
        self.eps, self.divisor = eps, divisor

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Return x / rms(x) * scale / divisor over the last dim.

        The computation is in float32; the result has the dtype of x.
        """
        scale_d = self.scale_d[...]
        if self.divisor != 1:
            scale_d = scale_d / self.divisor
        return (unit_rms(x, self.eps) * scale_d).astype(x.dtype)


def unit_rms(x: Float[Array, "*b d"], eps: float) -> Float[Array, "*b d"]:
    """Return x / rms(x) over the last dim, in float32."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    return x32 * jax.lax.rsqrt(variance + eps)


class SwiGlu(nnx.Module):
    """A dense feed-forward part: (silu(x gate) * (x up)) down."""

    def __init__(self, cfg: Model, d_ff: int, mesh: Mesh, rngs: nnx.Rngs):
        self.cfg, self.mesh = cfg, mesh
        self.gate_df = input_matrix(rngs, cfg.d_model, d_ff)
        self.up_df = input_matrix(rngs, cfg.d_model, d_ff)
        self.down_fd = output_matrix(rngs, d_ff, cfg.d_model)

    @jax.named_scope("dense")
    def __call__(
        self, parts: tuple[Float[Array, "b t d"], ...]
    ) -> tuple[Float[Array, "b t d"], ...]:
        """Return the feed-forward output of each part of a batch.

        Gate and up are one product. Two products would sum the gradient of x over the
        tensor axis twice.
        """

        def body(x_btd, gate_df, up_df, down_fd):
            into_d2f = jnp.stack([gate_df, up_df], axis=1)
            y_bt2f = jnp.einsum("btd,dcf->btcf", x_btd, into_d2f)
            hidden_btf = jax.nn.silu(y_bt2f[:, :, 0]) * y_bt2f[:, :, 1]
            return sum_parts(hidden_btf @ down_fd, self.mesh)

        params = (self.gate_df, self.up_df, self.down_fd)
        return on_rows(body, parts, params, self.mesh, self.cfg.gradient_reduce_dtype)
