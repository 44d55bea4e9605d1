"""Dense training of an MoE layer (DS-MoE): every expert computes every token.

    tokens of a group, gathered   [n w, d]    on each of its w devices
    own experts, one by one       [n w, d]    times their gates, added up
    sums, scattered               [n, d]      home again

The router gets the gradient of every expert's gate, and evaluation goes the usual way,
through the best top_k experts (Pan et al. 2024, arXiv 2404.05567). No row is chosen, so
none is sorted, and no expert moves: owners compute, as in a wide dense layer that is
split over the group.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moejax.kernels import varying_alike, zeros_varying_as
from moejax.moe import route as routing
from moejax.moe.layer import SUMS, MoeLayer
from moejax.moe.mesh_roles import MeshLayout, index_along
from moejax.moe.setup import LayerSetup
from moejax.moe.types import LayerSums, Placement
from moejax.moe.weights import stores
from moejax.moe.weights.slots import own_experts, whole


def dense(
    layer: MoeLayer,
    x_btd: Float[Array, "b t d"],
    placement: Placement,
    setup: LayerSetup,
    jitter_btd: Float[Array, "b t d"] | None = None,
) -> tuple[Float[Array, "b t d"], LayerSums]:
    """Return the sum over all experts of gate times output, and sums of each device, as
    `moe_layer` does with top_k = num_experts. tokens_e counts the top_k experts that
    evaluation would choose. `placement` is of one layer, without replicas.

    Tokens travel, experts do not: n w d elements in each direction, whatever the width
    of experts. A device holds the activations of the group's tokens for one expert at a
    time, and computes them again in the backward pass.
    """
    setup.check(x_btd, placement, jitter_btd=jitter_btd)
    mesh_layout, router = setup.mesh_layout, setup.router
    reduce_dtype = setup.gradient_reduce_dtype
    experts = own_experts(layer.master_params(), x_btd.dtype)

    def on_device(x_btd, router_de, biases, owned_e, weights, jitter_btd):
        """Compute the layer for x_btd, the sequences of one device. Devices along the
        tensor axis have the same sequences."""
        b, t, d = x_btd.shape
        x_nd = x_btd.reshape(b * t, d)
        routed_nd = x_nd
        if jitter_btd is not None:
            routed_nd = x_nd * jitter_btd.reshape(b * t, d)
        routes, score_ne, logit_ne = routing.route(
            routed_nd,
            setup.whole_router(router_de, x_nd),
            cfg=router,
            top_k=setup.moe.top_k,
            **biases,
        )
        gate_ne = routing.gates(score_ne, router)
        owned_we = owned_e.reshape(-1, len(weights["down"]))
        own_e = owned_we[index_along(mesh_layout.owner_axes)]
        weights = whole(weights, x_nd, mesh_layout, reduce_dtype)
        y_nd = everywhere(x_nd, gate_ne, own_e, weights, mesh_layout)

        added = routing.balance_sums(score_ne, logit_ne, routes.expert_nk, t)
        axes = _source_axes(mesh_layout)
        num_sources = jax.lax.axis_size(axes) if axes else 1
        rows = jnp.int32(b * t * num_sources * len(own_e))
        sums = LayerSums(
            **added,
            rows_h=rows[None], rounds=jnp.int32(1), dropped=jnp.int32(0),
            fullest_pair=jnp.int32(b * t), bound_h=rows[None],
        )  # fmt: skip
        sums = jax.tree.map(lambda leaf: varying_alike(leaf, x_btd)[0][None], sums)
        return y_nd.reshape(b, t, d).astype(x_btd.dtype), sums

    batch = P(mesh_layout.batch_axes)
    router_specs = setup.router_spec, P()
    return jax.shard_map(
        on_device,
        mesh=mesh_layout.mesh,
        in_specs=(batch, *router_specs, P(), experts.specs(mesh_layout), batch),
        out_specs=(batch, jax.tree.map(lambda _: batch, SUMS)),
    )(
        x_btd,
        layer.router_de[...],
        layer.biases(),
        placement.owned_le,
        experts.weights,
        jitter_btd,
    )


@jax.named_scope("experts")
def everywhere(
    x_nd: Float[Array, "n d"],
    gate_ne: Float[Array, "n e"],
    own_e: Array,
    weights: stores.ExpertWeights,
    mesh_layout: MeshLayout,
) -> Float[Array, "n d"]:
    """Return the sum over all experts of gate times output, for this device's tokens.

    `own_e` are the experts of this device, and `weights` theirs: into_sdh, down_sfd.
    """
    axes, parts = _source_axes(mesh_layout), mesh_layout.tensor_axes
    if parts:  # before tokens travel: gradients are summed over tensor at home
        x_nd, gate_ne = (jax.lax.pcast(v, parts, to="varying") for v in (x_nd, gate_ne))
    x_md, gate_me = x_nd, gate_ne
    if axes:
        x_md, gate_me = (
            jax.lax.all_gather(v, axes, tiled=True) for v in (x_nd, gate_ne)
        )

    @jax.checkpoint
    def one(x_md, gate_m, into_dh, down_fd):
        gate_mf, up_mf = jnp.split(x_md @ into_dh, 2, axis=-1)
        y_md = (jax.nn.silu(gate_mf) * up_mf) @ down_fd
        return gate_m[:, None] * y_md.astype(gate_m.dtype)

    def add(y_md, expert):
        return y_md + one(x_md, *expert), None

    operands = (gate_me.T[own_e], weights["into_sdh"], weights["down_sfd"])
    x_md, *operands = varying_alike(x_md, *operands)
    zeros_md = zeros_varying_as(x_md, x_md.shape, gate_ne.dtype)
    y_md, _ = jax.lax.scan(add, zeros_md, tuple(operands))
    y_nd = y_md.astype(x_nd.dtype)
    if axes:
        y_nd = jax.lax.psum_scatter(y_nd, axes, scatter_dimension=0, tiled=True)
    return jax.lax.psum(y_nd, parts) if parts else y_nd


def _source_axes(mesh_layout: MeshLayout) -> tuple[str, ...]:
    """Return the mesh axes along which both experts and tokens differ."""
    expert_axes = mesh_layout.owner_axes + mesh_layout.shard_axes
    return tuple(axis for axis in expert_axes if axis not in mesh_layout.tensor_axes)
