"""Grouped SwiGLU over the slots of this device."""

import jax
from jaxtyping import Array, Float, Int

from moejax.kernels.grouped_dot import grouped_swiglu
from moejax.plan.layout import Fp8


@jax.named_scope("experts")
def swiglu(
    x_md: Float[Array, "m d"],
    rows_s: Int[Array, " s"],
    weights: dict[str, Array],
    implementation: str = "auto",
    fp8: Fp8 = "none",
) -> Float[Array, "m d"]:
    """Rows sorted by slot through their slot's silu(x gate) * (x up) down.

    weights: into_sdh [s, d, 2f], gate and up side by side so that one product reads the
    rows once, and down_sfd, in the dtype of x. Rows past sum(rows_s) are padding and
    come out as zeros.
    """
    into_sdh, down_sfd = weights["into_sdh"], weights["down_sfd"]
    return grouped_swiglu(
        x_md, into_sdh, down_sfd, rows_s, implementation=implementation, fp8=fp8
    )
