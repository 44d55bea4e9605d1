"""Grouped SwiGLU over the slots of this device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.kernels.grouped_dot import grouped_dot


@jax.named_scope("experts")
def swiglu(
    x_md: Float[Array, "m d"],
    rows_s: Int[Array, " s"],
    weights: dict[str, Array],
    implementation: str = "blocked",
) -> Float[Array, "m d"]:
    """Rows sorted by slot through their slot's silu(x gate) * (x up) down.

    weights: into_sdh [s, d, 2f], gate and up side by side so that one product reads the
    rows once, and down_sfd, in the dtype of x. Rows past sum(rows_s) are padding and
    come out as zeros.
    """

    def dot(rows, weight):
        return grouped_dot(rows, weight, rows_s, implementation=implementation)

    gate_mf, up_mf = jnp.split(dot(x_md, weights["into_sdh"]), 2, axis=-1)
    return dot(jax.nn.silu(gate_mf) * up_mf, weights["down_sfd"])
