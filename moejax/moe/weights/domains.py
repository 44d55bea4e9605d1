"""Experts gathered inside a domain of devices: rows travel between domains only.

A domain has a size along each mesh axis of the group (Layout.domain). The axis is cut
in two: devices that differ in the inner part alone share a domain, and rows go to the
device of another domain that has the same place in it (HybridEP, arXiv 2510.19470,
section 4.1).

    4 data centres x 2 devices, domain (2, 1): data centres 0 1 | 2 3 share experts

    device    0.0  0.1 | 1.0  1.1 || 2.0  2.1 | 3.0  3.1
    experts   a A  b B | a A  b B || c C  d D | c C  d D      own a, b, A, B, ..
    rows      0.0 <-> 2.0, 0.1 <-> 0.0, 1.0 <-> 3.0, ..       never 0.0 <-> 1.0

Owners and their masters stay where they are, whatever the domain. The gather's
transpose scatters summed gradients back to them.

Compressed (Domain.form), what others hold of an expert is `tracked`: part of the run's
state, moved on by k entries of each expert after each update of the masters. A device's
own experts are exact, and gradients reach the masters as if all were.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.moe.mesh_roles import Axes, MeshLayout, index_along, spec
from moejax.moe.weights import compression

Weights = dict[str, Array]

VALUE_DTYPE, VALUE_BYTES = "float8_e5m2", 1
"""Of an entry on the wire: what rounding leaves is sent again later ('delta'), and half
the bytes an entry are twice the entries."""


@jax.named_scope("domain")
def gathered_in_domain(
    slots: Weights,
    mesh_layout: MeshLayout,
    tracked_sx: Float[Array, "s x"] | None = None,
) -> Weights:
    """Slots [s, ..] of one device -> [S * s, ..], those of its domain, device by
    device. Over the slow axis first, so that each expert crosses it once for each other
    data centre of the domain; nothing travels where others' are `tracked`."""
    if not mesh_layout.domain_axes:
        return slots
    if tracked_sx is not None:
        own_ex = compression.flat(slots)
        whole_sx = compression.with_own(own_ex, tracked_sx, mesh_layout.domain_axes)
        return compression.unflat(whole_sx, slots["down"].shape[2])

    def gathered(leaf: Array) -> Array:
        for dim, axis in enumerate(mesh_layout.domain_axes):
            leaf = jax.lax.all_gather(leaf, axis, axis=dim)
        return leaf.reshape(-1, *leaf.shape[len(mesh_layout.domain_axes) + 1 :])

    return jax.tree.map(gathered, slots)


def tracked_axes(mesh_layout: MeshLayout) -> tuple[Axes, ...]:
    """Mesh axes of tracked_lsx: equal on the devices of a domain."""
    return (), mesh_layout.peer_axes, mesh_layout.width_axes


def track(
    joined: Weights,
    tracked_lsx: Float[Array, "l s x"] | None,
    mesh_layout: MeshLayout,
    joined_specs: dict,
) -> Float[Array, "l s x"]:
    """What a domain's devices hold of its experts, after entries for the masters of now
    have travelled. `joined` is as slots are, [l, e, ..]; without `tracked_lsx` all
    begins: 'delta' with the experts as they are."""
    where = spec(*tracked_axes(mesh_layout))
    is_begin = tracked_lsx is None

    def one_layer(layer):
        joined, tracked_sx = layer
        return _tracked(compression.flat(joined), tracked_sx, mesh_layout)

    def body(joined, tracked_lsx):
        return jax.lax.map(one_layer, (joined, tracked_lsx))

    tracked_spec = None if is_begin else where
    return jax.shard_map(
        body,
        mesh=mesh_layout.mesh,
        in_specs=(joined_specs, tracked_spec),
        out_specs=where,
    )(joined, tracked_lsx)


def _tracked(own_ex, tracked_sx, mesh_layout: MeshLayout):
    e, size = own_ex.shape
    domain = mesh_layout.layout.domain
    form = domain.form
    if form == "delta" and tracked_sx is None:
        for dim, axis in enumerate(mesh_layout.domain_axes):
            own_ex = jax.lax.all_gather(own_ex, axis, axis=dim, to="invarying")
        return own_ex.reshape(-1, size)
    if form == "delta":
        first = index_along(mesh_layout.domain_axes) * e
        held_ex = jax.lax.dynamic_slice_in_dim(tracked_sx, first, e)
        base_sx = tracked_sx
    else:
        held_ex = base_sx = compression.shared_mean(own_ex, mesh_layout.owner_axes)
    k, blocks = entries(size, own_ex.dtype, domain.ratio)
    packed = compression.encode(own_ex, held_ex, k, VALUE_DTYPE, blocks)
    return compression.received(packed, base_sx, mesh_layout.domain_axes)


def achieved_ratio(size: int, dtype, ratio: float, more_bytes: int = 0) -> float:
    """How many times fewer bytes the `entries` of this ratio take, with `more_bytes`
    beside those of each expert."""
    k, blocks = entries(size, dtype, ratio)
    index_bytes = compression.index_bytes(size, blocks)
    sent = compression.wire_bytes(1, k, VALUE_BYTES, index_bytes) + more_bytes
    return size * jnp.dtype(dtype).itemsize / sent


def entries(size: int, dtype, ratio: float) -> tuple[int, int]:
    """How many entries of an expert's `size` weights travel, and in how many blocks."""
    blocks = compression.num_blocks(size)
    index_bytes = compression.index_bytes(size, blocks)
    weight_bytes = jnp.dtype(dtype).itemsize
    sizes = (VALUE_BYTES, index_bytes, weight_bytes, blocks)
    return compression.num_entries(size, ratio, *sizes), blocks
