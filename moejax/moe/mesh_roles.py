"""A layout on a mesh, and the mesh axes that each part of an MoE layer talks along.

    batch_axes     tokens are split over these, and whole over all others
    owner_axes     experts are split over these: peers and domain together
    peer_axes      rows travel along these
    domain_axes    experts are gathered along these, slow ones first
                   (moejax.moe.weights.domains)
    shard_axes     hidden width of an expert, as it is computed
    tensor_axes    the tensor axis: attention and dense parts are split over it
    master_axes    hidden width of an expert where it rests, beside shards; gathered
                   for use

Axes that are cut in two are those of `mesh`, a reshape of the run's. Axes of one device
are in none of the tuples but `batch_axes`: nothing is sent along them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from moejax import axes
from moejax.plan.layout import Layout

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """A layout and the axes of its layers, on the mesh that the layers run on."""

    layout: Layout
    mesh: Mesh
    batch_axes: Axes
    owner_axes: Axes
    peer_axes: Axes
    domain_axes: Axes
    shard_axes: Axes
    tensor_axes: Axes
    master_axes: Axes

    @property
    def width_axes(self) -> Axes:
        """Axes over which the hidden width of masters lies."""
        return self.shard_axes + self.master_axes

    @property
    def exchanged(self) -> "MeshLayout":
        """The same as rows see it: each domain is one device (Layout.exchanged)."""
        return dataclasses.replace(self, layout=self.layout.exchanged)


def on_mesh(mesh: Mesh, layout: Layout) -> MeshLayout:
    """Return the layout on the run's mesh, whose axes are those of moejax.axes."""
    tensor, inner = layout.tensor, {}
    if layout.domain is not None:
        inner = dict(zip(layout.axes, layout.domain.shared))
    if tensor is not None:
        inner |= tensor.inner
    cut = {axis: n for axis, n in inner.items() if 1 < n < mesh.shape[axis]}
    refined = axes.split(mesh, cut)

    def within(*names: str) -> tuple[Axes, Axes]:
        """Outer and inner parts of these axes."""
        outer, inside = [], []
        for axis in names:
            if axis in cut:
                outer.append(f"{axis}_outer")
                inside.append(f"{axis}_inner")
            elif mesh.shape[axis] > 1:
                (inside if inner.get(axis, 1) > 1 else outer).append(axis)
        return tuple(outer), tuple(inside)

    def order(*names: str) -> Axes:
        return tuple(axis for axis in refined.axis_names if axis in names)

    tensor_outer, tensor_inner = within(axes.TENSOR)
    tensor_axes = order(*tensor_outer, *tensor_inner)
    batch_axes = order(
        *(f"{a}{end}" for a in axes.BATCH_AXES for end in ("", "_outer", "_inner"))
    )
    whole = (layout, refined, batch_axes)
    if layout.is_local:
        resting = tuple(a for a in axes.FSDP_AXES if mesh.shape[a] > 1)
        return MeshLayout(
            *whole, tensor_axes, tensor_axes, (), (), tensor_axes, resting
        )
    resting = tuple(
        a for a in (axes.DATA,) if a not in layout.axes and mesh.shape[a] > 1
    )
    peers, domain = within(*layout.axes)
    shards: Axes = ()
    if layout.domain is None:
        shards, domain = domain, ()
    if tensor is not None and tensor.expert_shards < tensor.size:
        peers, shards = peers + tensor_outer, tensor_inner
    else:
        shards = shards + tensor_axes
    owners = order(*peers, *domain)
    return MeshLayout(*whole, owners, peers, domain, shards, tensor_axes, resting)


def spec(*dims: Axes) -> P:
    """PartitionSpec of these dims; () is whole."""
    return P(*(dim or None for dim in dims))


def index_along(names: Axes) -> Int[Array, ""]:
    """Number of this device along these axes, the last one innermost; 0 along none."""
    return jax.lax.axis_index(names) if names else jnp.int32(0)
