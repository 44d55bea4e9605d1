"""Baselines of the MoE layer's benchmark, in shard_map on the same mesh as the layer.

    dense    one SwiGLU of equal FLOPs (width k*f), data parallel: the speed of light
    einsum   GShard (Lepikhin et al. 2020, algorithm 1): one-hot masks, capacity per
             expert, one group per device

In array names the letter c is the capacity: rows that one device may send to one
expert.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from moejax import axes
from moejax.moe.layer import MoeLayer
from moejax.moe.types import Routes

BATCH = P(axes.BATCH_AXES)


def dense(
    weights: dict[str, Array], x_btd: Float[Array, "b t d"], mesh: Mesh
) -> Float[Array, "b t d"]:
    """Compute a SwiGLU whose weights gate_df, up_df and down_fd are whole on every
    device."""

    def body(weights, x_btd):
        weights = {name: leaf.astype(x_btd.dtype) for name, leaf in weights.items()}
        x_nd = x_btd.reshape(-1, x_btd.shape[-1])  # XLA:CPU is slower with three dims
        hidden_nf = jax.nn.silu(x_nd @ weights["gate_df"])
        hidden_nf = hidden_nf * (x_nd @ weights["up_df"])
        return (hidden_nf @ weights["down_fd"]).reshape(x_btd.shape)

    whole = dict.fromkeys(weights, P())
    return jax.shard_map(body, mesh=mesh, in_specs=(whole, BATCH), out_specs=BATCH)(
        weights, x_btd
    )


def einsum_layer(
    layer: MoeLayer,
    x_btd: Float[Array, "b t d"],
    route: Callable,
    mesh: Mesh,
    capacity: int,
) -> Float[Array, "b t d"]:
    """Compute an MoE layer by dispatch with einsum. Choices beyond the capacity of an
    expert are dropped."""
    weights = {
        "gate_sdf": layer.gate_edf[...],
        "up_sdf": layer.up_edf[...],
        "down_sfd": layer.down_efd[...],
    }
    split = dict.fromkeys(weights, P(axes.EXPERT))
    body = jax.shard_map(
        partial(_einsum_body, route=route, capacity=capacity),
        mesh=mesh,
        in_specs=(BATCH, P(), P(), split),
        out_specs=BATCH,
    )
    return body(x_btd, layer.router_de[...], layer.bias_e[...], weights)


def _einsum_body(x_btd, router_de, bias_e, weights, *, route, capacity):
    x_nd = x_btd.reshape(-1, x_btd.shape[-1])
    routes, _, _ = route(x_nd, router_de, bias_e)
    mask_nec, gate_nec = masks(routes, router_de.shape[1], capacity)
    mask_nec, gate_nec = mask_nec.astype(x_nd.dtype), gate_nec.astype(x_nd.dtype)
    weights = {name: leaf.astype(x_nd.dtype) for name, leaf in weights.items()}

    x_ecd = jnp.einsum("nec,nd->ecd", mask_nec, x_nd)
    x_smd = jax.lax.all_to_all(x_ecd, axes.EXPERT, 0, 1, tiled=True)
    hidden_smf = jax.nn.silu(jnp.einsum("smd,sdf->smf", x_smd, weights["gate_sdf"]))
    hidden_smf = hidden_smf * jnp.einsum("smd,sdf->smf", x_smd, weights["up_sdf"])
    y_smd = jnp.einsum("smf,sfd->smd", hidden_smf, weights["down_sfd"])
    y_ecd = jax.lax.all_to_all(y_smd, axes.EXPERT, 1, 0, tiled=True)
    return jnp.einsum("nec,ecd->nd", gate_nec, y_ecd).reshape(x_btd.shape)


def masks(
    routes: Routes, num_experts: int, capacity: int
) -> tuple[Bool[Array, "n e c"], Float[Array, "n e c"]]:
    """Return which position of which expert's buffer each token takes, and its gate
    there.

    Positions go to first choices first, then by token. Choices after the last position
    are dropped.
    """
    n, k = routes.expert_nk.shape
    chosen_ae = jax.nn.one_hot(routes.expert_nk.T.reshape(-1), num_experts, dtype=int)
    position_a = jnp.sum(jnp.cumsum(chosen_ae, axis=0) * chosen_ae, axis=1) - 1
    position_nk = position_a.reshape(k, n).T
    mask_nec, gate_nec = False, 0.0
    for choice in range(k):  # k fused passes; an array of n * k * e * c is never made
        is_expert_ne = routes.expert_nk[:, choice, None] == jnp.arange(num_experts)
        is_position_nc = position_nk[:, choice, None] == jnp.arange(capacity)
        here_nec = is_expert_ne[:, :, None] & is_position_nc[:, None, :]
        mask_nec = mask_nec | here_nec
        gate_nec += jnp.where(here_nec, routes.gate_nk[:, choice, None, None], 0.0)
    return mask_nec, gate_nec
