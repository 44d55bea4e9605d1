"""The functions that compute the rows of a device's slots: fused kernels, or grouped
products with an activation between them."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.config import Moe
from moejax.kernels.grouped_dot import grouped_dot, grouped_swiglu
from moejax.moe.exchange.dispatch import Experts
from moejax.moe.mesh_roles import Axes, MeshLayout, index_along
from moejax.plan.layout import Fp8


@jax.named_scope("experts")
def swiglu(
    x_md: Float[Array, "m d"],
    rows_s: Int[Array, " s"],
    weights: dict[str, Array],
    implementation: str = "auto",
    fp8: Fp8 = "none",
    align_rows: int = 1,
) -> Float[Array, "m d"]:
    """Return (silu(x gate) * (x up)) down for each row x, with the weights of its slot.

    Rows are sorted by slot; slot s has rows_s[s] of them, a multiple of `align_rows`.
    Rows past sum(rows_s) are padding and come out as zeros. weights: into_sdh
    [s, d, 2f], gate and up side by side so that one product reads the rows once, and
    down_sfd, both in the dtype of x.
    """
    into_sdh, down_sfd = weights["into_sdh"], weights["down_sfd"]
    options = {"implementation": implementation, "fp8": fp8, "align_rows": align_rows}
    return grouped_swiglu(x_md, into_sdh, down_sfd, rows_s, **options)


@jax.named_scope("experts")
def unfused(
    x_md: Float[Array, "m d"],
    rows_s: Int[Array, " s"],
    weights: dict[str, Array],
    moe: Moe,
    shard_axes: Axes,
    implementation: str = "auto",
    fp8: Fp8 = "none",
    align_rows: int = 1,
) -> Float[Array, "m d"]:
    """Return down(activation(x gate + b, x up + b)) + b for each row x, as `swiglu`
    does, with the activation and the biases of `moe`.

    The products are grouped products; no kernel fuses the activation with them. Biases
    are into_bias_sh [s, 2f] and down_bias_sw [s, w], this shard's part of the output's
    width d.
    """
    options = {"implementation": implementation, "fp8": fp8, "align_rows": align_rows}
    dot = partial(grouped_dot, rows_g=rows_s, **options)
    into_mh = dot(x_md, weights["into_sdh"])
    if moe.expert_bias:
        end_s, row_m = jnp.cumsum(rows_s), jnp.arange(len(x_md))
        slot_m = jnp.searchsorted(end_s, row_m, side="right")
        # Rows past the last slot have none, and get no bias. A product has a gradient
        # that is no scatter.
        is_slot_ms = (slot_m[:, None] == jnp.arange(len(end_s))).astype(x_md.dtype)
        exact = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        into_mh += exact(is_slot_ms, weights["into_bias_sh"])
    y_md = dot(activate(*jnp.split(into_mh, 2, axis=-1), moe), weights["down_sfd"])
    if moe.expert_bias:
        part_sw = weights["down_bias_sw"]
        missing = x_md.shape[1] - part_sw.shape[1]
        # The shards' results are summed: each adds its own part of the bias.
        before = index_along(shard_axes) * part_sw.shape[1]
        bias_sd = jnp.pad(part_sw, ((0, 0), (0, missing)))
        y_md += exact(is_slot_ms, jnp.roll(bias_sd, before, axis=1))
    return y_md


def activate(gate_mf: Array, up_mf: Array, moe: Moe) -> Float[Array, "m f"]:
    """Return the hidden values of an expert from its two products."""
    if moe.activation == "swiglu":
        return jax.nn.silu(gate_mf) * up_mf
    gate_mf = jnp.minimum(gate_mf, moe.swiglu_limit)
    up_mf = jnp.clip(up_mf, -moe.swiglu_limit, moe.swiglu_limit)
    return gate_mf * jax.nn.sigmoid(moe.swiglu_alpha * gate_mf) * (up_mf + 1)


def make_experts(moe: Moe, mesh_layout: MeshLayout) -> Experts:
    """Return the function that computes the rows of a device's slots: `swiglu` with
    the layout's kernels, or `unfused` for what it lacks."""
    layout = mesh_layout.layout
    grouped = "blocked" if layout.kernels == "plain" else "auto"
    options = {
        "implementation": grouped,
        "fp8": layout.fp8,
        "align_rows": layout.align_rows,
    }
    if moe.why_unfused is None:
        return partial(swiglu, **options)
    return partial(unfused, moe=moe, shard_axes=mesh_layout.shard_axes, **options)
