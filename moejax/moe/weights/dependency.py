"""The dependency by which the rows of a layer wait for copies of the next layer.

Copies that travel a layer ahead depend on nothing that the layer at work computes, and
XLA's scheduler leaves them at the layer's end, where they hide under nothing. Rows that
wait for them give them the time of attention, in which no row travels. Copies travel in
two parts, the offers of their owners and then what each device wants of these
(moejax.moe.weights.stores). After Pro-Prophet's block-wise schedule (arXiv 2411.10003,
Alg. 2), attention is filled first:

    both fit in attention    rows wait for the copies
    else                     rows wait for the offers; the rest travels under experts

XLA drops optimization barriers before it schedules. What it keeps is data: here a zero
that is computed from what arrives and is added to integers.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from moejax.moe.mesh_roles import MeshLayout, spec

FLOP_PER_BYTE = 1700
"""FLOPs of dense products that a device computes while it sends a byte to others of its
node: 600 TF/s and 350 GB/s, the stated rates of an H100 (moejax/perf/targets)."""
COUNT_BITS = 6
"""Bits that hold the number of ones among the 32 bits of a word."""


def fits_in_attention(
    own: list[Array], mesh_layout: MeshLayout, attention_flops: float
) -> bool:
    """Return whether offers and copies travel within the time of `attention_flops`,
    those of a device in one layer's forward pass. `own` are its experts' weights, [e,
    ..] each."""
    layout = mesh_layout.layout
    expert_bytes = sum(weight[0].size * weight.dtype.itemsize for weight in own)
    num_sent = layout.offers_per_device + layout.copies_per_device
    between_nodes = layout.offers_per_node + layout.copies_per_node
    num_sent += between_nodes * layout.num_copy_nodes / layout.num_devices
    return num_sent * expert_bytes * FLOP_PER_BYTE <= attention_flops


def is_awaited(mesh_layout: MeshLayout) -> bool:
    """Return whether rows wait for copies: where copies travel in each layer, and
    nothing is gathered after them, for which they leave at once."""
    layout = mesh_layout.layout
    has_copies = layout.copies_per_device and layout.offers_per_device
    is_transient = layout.prefetch and layout.store == "transient"
    is_transient = is_transient and not layout.makes_replicas
    is_gathered = mesh_layout.master_axes or mesh_layout.domain_axes
    return bool(is_transient and has_copies and not is_gathered)


def zero_of(arrived: Array) -> Int[Array, " 1"]:
    """Return a zero that is known when this device's part of an array is. For use
    inside shard_map."""
    arrived = jax.lax.stop_gradient(arrived)
    first = jax.lax.slice(arrived, (0,) * arrived.ndim, (1,) * arrived.ndim)
    word = jax.lax.bitcast_convert_type(first.astype(jnp.float32), jnp.uint32)
    # The number of ones is at most 32, which XLA's simplifier does not know.
    zero = jax.lax.population_count(word) >> COUNT_BITS
    return zero.reshape(1).astype(jnp.int32)


def dependency_spec(mesh_layout: MeshLayout) -> P:
    """Return the PartitionSpec of the zeros of all devices, [w]."""
    return spec(mesh_layout.owner_axes + mesh_layout.width_axes)


def wait_for(dependency: Int[Array, " 1"] | None, values: Array) -> Array:
    """Return integers as they are, but not before what this device waits for has
    arrived. For use inside shard_map.

    Devices that have equal integers, but wait for arrays of their own, do not wait:
    their integers would count as different. None: there is nothing to wait for.
    """
    if dependency is None:
        return values
    varying = (jax.typeof(x).manual_axis_type.varying for x in (dependency, values))
    here, there = map(set, varying)
    return values + dependency[0] if here <= there else values
