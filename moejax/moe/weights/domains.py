"""Domains: devices that gather one another's experts; rows travel between domains only.

A domain has a size along each mesh axis of the group (Layout.domain). Each such axis is
cut in two. Devices that differ only in the inner parts share a domain. Rows go to the
device of another domain that has the same coordinates inside its domain (HybridEP,
arXiv 2510.19470, section 4.1).

    4 data centres x 2 devices, domain (2, 1): data centres 0 1 | 2 3 share experts

    device    0.0  0.1 | 1.0  1.1 || 2.0  2.1 | 3.0  3.1
    experts   a A  b B | a A  b B || c C  d D | c C  d D      own a, b, A, B, ..
    rows      0.0 <-> 2.0, 0.1 <-> 0.0, 1.0 <-> 3.0, ..       never 0.0 <-> 1.0

Owners and their float32 master parameters stay where they are, whatever the domain.
Gradients are summed on their way back to them (moejax.moe.weights.gather), over the
fast axis first.

With compression (Domain.compression) the other members hold an estimate of each expert
(`tracked`). Estimates are part of the run's state. After each optimizer step they are
updated by k entries per expert. A device's own experts are exact, and gradients reach
the owners as if the estimates were exact too.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.moe.mesh_roles import Axes, MeshLayout, index_along, spec
from moejax.moe.weights import compression
from moejax.moe.weights.compression import ExpertWeights
from moejax.moe.weights.gather import Fsdp, gather
from moejax.moe.weights.over_layers import over_layers

VALUE_DTYPE, VALUE_BYTES = "float8_e5m2", 1
"""Dtype of an entry's value as it is sent, and its size in bytes.

Rounding errors are sent again later, and an entry of half the bytes allows twice the
number of entries.
"""


@jax.named_scope("domain")
def gather_in_domain(
    slots: ExpertWeights,
    mesh_layout: MeshLayout,
    gradient_reduce_dtype: str,
    tracked_sx: Float[Array, "s x"] | None = None,
) -> ExpertWeights:
    """Gather the expert weights of all devices of a domain: slots [s, ..] become
    [S * s, ..], device after device.

    The slow axis is gathered first, so that each expert crosses it once for each other
    data centre of the domain. Gradients travel in `gradient_reduce_dtype`
    (Model.gradient_reduce_dtype). If `tracked_sx` is given, no weight travels: other
    devices' experts are taken from these estimates, and gradients travel in the compute
    dtype by reduce-scatter.
    """
    if not mesh_layout.domain_axes:
        return slots
    if tracked_sx is not None:
        own_ex = compression.flatten(slots)
        every_sx = compression.insert_own(own_ex, tracked_sx, mesh_layout.domain_axes)
        return compression.unflatten(every_sx, slots["down"].shape[2])

    num_axes = len(mesh_layout.domain_axes)

    def gather_leaf(leaf: Array) -> Array:
        leaf = leaf.reshape(*(1,) * num_axes, *leaf.shape)
        for dim, axis in enumerate(mesh_layout.domain_axes):
            fsdp = Fsdp((axis,), None, gradient_reduce_dtype)
            (leaf,) = gather((leaf,), (dim,), leaf, fsdp)
        return leaf.reshape(-1, *leaf.shape[num_axes + 1 :])

    return jax.tree.map(gather_leaf, slots)


def tracked_axes(mesh_layout: MeshLayout) -> tuple[Axes, ...]:
    """Return the mesh axes over which each dim of the estimates tracked_lsx is split.

    The devices of a domain hold equal estimates.
    """
    return (), mesh_layout.peer_axes, mesh_layout.width_axes


def track(
    joined: ExpertWeights,
    tracked_lsx: Float[Array, "l s x"] | None,
    mesh_layout: MeshLayout,
    joined_specs: dict,
) -> Float[Array, "l s x"]:
    """Return the estimates of a domain's experts, updated for the current parameters.

    Entries of all owners are sent to the domain's other members. `joined` has the form
    of slots, [l, e, ..]. `tracked_lsx` are the last step's estimates. None at the
    beginning: the experts are then gathered uncompressed.
    """
    tracked_spec = spec(*tracked_axes(mesh_layout))

    def one_layer(layer):
        joined, tracked_sx = layer
        return _track_layer(compression.flatten(joined), tracked_sx, mesh_layout)

    def body(joined, tracked_lsx):
        return over_layers(one_layer, (joined, tracked_lsx), mesh_layout.mesh)

    return jax.shard_map(
        body,
        mesh=mesh_layout.mesh,
        in_specs=(joined_specs, None if tracked_lsx is None else tracked_spec),
        out_specs=tracked_spec,
    )(joined, tracked_lsx)


def _track_layer(own_ex, tracked_sx, mesh_layout: MeshLayout):
    """Return the estimates of one layer's experts, [s, x], updated for the owners'
    current parameters."""
    e, size = own_ex.shape
    k, blocks = entries(size, own_ex.dtype, mesh_layout.layout.domain.compression)
    if tracked_sx is None:
        for dim, axis in enumerate(mesh_layout.domain_axes):
            own_ex = jax.lax.all_gather(own_ex, axis, axis=dim, to="invarying")
        return own_ex.reshape(-1, size)
    first = index_along(mesh_layout.domain_axes) * e
    base_ex = jax.lax.dynamic_slice_in_dim(tracked_sx, first, e)
    packed = compression.encode(own_ex, base_ex, k, VALUE_DTYPE, blocks)
    return compression.receive(packed, tracked_sx, mesh_layout.domain_axes)


def achieved_ratio(size: int, dtype, ratio: float) -> float:
    """Return the compression ratio that `entries` reaches when asked for `ratio`: the
    bytes of an uncompressed expert of `dtype` over those of its entries."""
    k, blocks = entries(size, dtype, ratio)
    index_bytes = compression.index_bytes(size, blocks)
    sent = compression.wire_bytes(1, k, VALUE_BYTES, index_bytes)
    return size * jnp.dtype(dtype).itemsize / sent


def entries(size: int, dtype, ratio: float) -> tuple[int, int]:
    """Return how many entries of an expert of `size` weights are sent, and how many
    blocks it is cut into."""
    blocks = compression.num_blocks(size)
    index_bytes = compression.index_bytes(size, blocks)
    weight_bytes = jnp.dtype(dtype).itemsize
    sizes = (VALUE_BYTES, index_bytes, weight_bytes, blocks)
    return compression.num_entries(size, ratio, *sizes), blocks
