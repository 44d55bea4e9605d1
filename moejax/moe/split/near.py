"""Rows per replica so that no device pays much for computing and receiving, in int32.

    load of a device + near_weight * rows from its node + far_weight * rows from others

is what a device pays (MicroMoE, arXiv 2511.16947, A.1, with topology). Sweeps
(moejax.kernels.water_fill.near) begin where water-filling ended and even it. Of an
expert's rows a replica gets first those of its own device, then its share of those of
its node's devices that have no replica, then others.

    evened       rows of each slot
    objective    equation 4 of the paper, of what is dealt: the lower one is taken
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.kernels.water_fill.near import even_costs, tier_cost
from moejax.moe.split.deal import active
from moejax.moe.split.water_filling import cells
from moejax.moe.types import Placement
from moejax.plan.layout import Layout


@jax.named_scope("near")
def evened(
    counts_we: Int[Array, "w e"],
    rows_q: Int[Array, " q"],
    placement: Placement,
    layout: Layout,
) -> Int[Array, " q"]:
    """Rows of the q-th slot, beginning with `rows_q`; an expert's sum stays.

    Layout.wire has the weights. All rows of a group must be fewer than
    2 ** 26 / (1 + far_weight).
    """
    expert_q, device_q, is_active_q = active(placement, layout)
    prices = layout.wire.costs
    room_jq = rooms(counts_we, placement, layout)
    cost_q = jnp.where(is_active_q, tier_cost(rows_q, room_jq, prices), 0)
    result = even_costs(
        cells(expert_q, placement, layout, empty=-1),
        cells(rows_q, placement, layout),
        jnp.stack([cells(room_q, placement, layout) for room_q in room_jq]),
        jnp.zeros(layout.num_devices, jnp.int32).at[device_q].add(cost_q),
        prices,
        placement.num_colours_l,
    )
    colour_q = placement.colour_lq
    return jnp.where(colour_q < 0, rows_q, result.amount_cw[colour_q, device_q])


def objective(
    quota_wq: Int[Array, "w q"], placement: Placement, layout: Layout
) -> Int[Array, ""]:
    """Rows of the fullest device and, by their weights, those that cross wires to or
    from the device with most of them; in sixteenths of a row."""
    w, wire = layout.num_devices, layout.wire
    device_q = placement.slot_lq // layout.slots_per_device
    pair_ww = jnp.zeros((w, w), jnp.int32).at[device_q].add(quota_wq.T)
    own, near, far = wire.costs
    device_w = jnp.arange(w)
    node_w = device_w // wire.devices_per_node
    price_ww = jnp.where(node_w[:, None] == node_w, near - own, far - own)
    price_ww = jnp.where(device_w[:, None] == device_w, 0, price_ww)
    paid_ww = pair_ww * price_ww
    received_w, sent_w = jnp.sum(paid_ww, axis=1), jnp.sum(paid_ww, axis=0)
    most = jnp.maximum(jnp.max(received_w), jnp.max(sent_w))
    return own * jnp.max(jnp.sum(pair_ww, axis=1)) + most


def rooms(
    counts_we: Int[Array, "w e"], placement: Placement, layout: Layout
) -> Int[Array, "2 q"]:
    """Rows that a slot can have from its own device, and from others of its node: of
    those without a replica an equal share, the first ones a row more."""
    expert_q, device_q, is_active_q = active(placement, layout)
    per_node, e = layout.wire.devices_per_node, layout.num_experts
    node_q = device_q // per_node
    active_q = is_active_q.astype(jnp.int32)
    held_we = jnp.zeros_like(counts_we).at[device_q, expert_q].add(active_q)
    idle_we = jnp.where(held_we > 0, 0, counts_we)
    idle_ne = jnp.sum(idle_we.reshape(-1, per_node, e), axis=1)
    held_nwe = held_we.reshape(-1, per_node, e)
    before_we = (jnp.cumsum(held_nwe, axis=1) - held_nwe).reshape(held_we.shape)
    idle_q, place_q = idle_ne[node_q, expert_q], before_we[device_q, expert_q]
    replicas_q = jnp.maximum(jnp.sum(held_nwe, axis=1)[node_q, expert_q], 1)
    near_q = idle_q // replicas_q + (place_q < idle_q % replicas_q)
    own_q = counts_we[device_q, expert_q]
    return jnp.where(is_active_q, jnp.stack([own_q, near_q]), 0)
