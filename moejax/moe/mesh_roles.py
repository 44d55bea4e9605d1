"""Mesh axes along which each part of an MoE layer communicates.

    batch_axes     tokens are split over these, and whole over all others
    owner_axes     experts are split over these: peers and domain together
    peer_axes      rows travel along these
    domain_axes    experts are gathered along these, slow ones first
                   (moejax.moe.weights.domains)
    shard_axes     hidden width of an expert, as it is computed
    tensor_axes    the tensor axis: attention and dense parts are split over it
    master_axes    hidden width of an expert where it rests, beside shards; gathered
                   for use
    fsdp_axes      dense matrices and the router's where they rest; gathered for use

Where a layout cuts an axis in two, `mesh` is a reshape of the run's mesh, and has both
parts as axes. Axes of one device are in `batch_axes` alone: nothing is sent along them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from moejax import axes
from moejax.plan.layout import Layout

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """A layout, the mesh that its layers run on, and the roles of the mesh axes."""

    layout: Layout
    mesh: Mesh
    batch_axes: Axes
    owner_axes: Axes
    peer_axes: Axes
    domain_axes: Axes
    shard_axes: Axes
    tensor_axes: Axes
    master_axes: Axes
    fsdp_axes: Axes

    @property
    def width_axes(self) -> Axes:
        """Axes over which the hidden width of expert parameters is split."""
        return self.shard_axes + self.master_axes

    @property
    def replica_axes(self) -> Axes:
        """Axes along which devices compute the same experts for other tokens."""
        differ = self.owner_axes + self.shard_axes
        return tuple(axis for axis in self.batch_axes if axis not in differ)

    @property
    def copy_axes(self) -> tuple[Axes, Axes]:
        """Axes of the owners between nodes and inside them, if copies travel in two
        levels (Layout.num_copy_nodes); else none, and all."""
        num_outer, size = 0, 1
        while size < self.layout.num_copy_nodes:
            size *= self.mesh.shape[self.owner_axes[num_outer]]
            num_outer += 1
        return self.owner_axes[:num_outer], self.owner_axes[num_outer:]

    @property
    def exchanged(self) -> "MeshLayout":
        """The mesh layout with each domain as one device (Layout.exchanged): peers own
        the experts of their domains. Its slots include those of split 'top_up'."""
        return dataclasses.replace(
            self,
            layout=self.layout.exchanged.topped_up,
            owner_axes=self.peer_axes,
            domain_axes=(),
        )


def on_mesh(
    mesh: Mesh | AbstractMesh, layout: Layout, names: axes.MeshAxes = axes.OWN_NAMES
) -> MeshLayout:
    """Return the layout with the mesh axes along which its layers communicate.

    `names` says which axis of `mesh` has which role. A role without an axis has one
    device. Raises ValueError where an axis is missing, has no role, or is too short
    for what the layout cuts out of it.
    """
    sizes = dataclasses.asdict(names.topology(mesh))
    tensor, inner = layout.tensor, {}
    if layout.domain is not None:
        inner = dict(zip(layout.axes, layout.domain.shared))
    if tensor is not None:
        inner |= tensor.inner
    cut = {role: n for role, n in inner.items() if 1 < n < sizes[role]}
    if len(layout.axes) > 1:
        _check_order(mesh, layout, names)
    refined = axes.split(mesh, {names.axis(role): n for role, n in cut.items()})

    def within(*roles: str) -> tuple[Axes, Axes]:
        """Outer and inner parts of the axes with these roles."""
        outer, inside = [], []
        for role in roles:
            axis = names.axis(role)
            if role in cut:
                outer.append(f"{axis}_outer")
                inside.append(f"{axis}_inner")
            elif sizes[role] > 1:
                (inside if inner.get(role, 1) > 1 else outer).append(axis)
        return tuple(outer), tuple(inside)

    def order(*found: str) -> Axes:
        return tuple(axis for axis in refined.axis_names if axis in found)

    tensor_outer, tensor_inner = within(axes.TENSOR)
    tensor_axes = order(*tensor_outer, *tensor_inner)
    batch = (names.axis(role) for role in axes.BATCH_AXES if names.axis(role))
    batch_axes = order(
        *(f"{a}{end}" for a in batch for end in ("", "_outer", "_inner"))
    )
    whole = (layout, refined, batch_axes)
    fsdp = order(*sum(within(*axes.FSDP_AXES), ()))
    if layout.is_local:
        return MeshLayout(
            *whole, tensor_axes, tensor_axes, (), (), tensor_axes, fsdp, fsdp
        )
    resting = () if axes.DATA in layout.axes else sum(within(axes.DATA), ())
    peers, domain = within(*layout.axes)
    shards: Axes = ()
    if layout.domain is None:
        shards, domain = domain, ()
    if tensor is not None and tensor.expert_shards < tensor.size:
        peers, shards = peers + tensor_outer, tensor_inner
    else:
        shards = shards + tensor_axes
    owners = order(*peers, *domain)
    return MeshLayout(*whole, owners, peers, domain, shards, tensor_axes, resting, fsdp)


def _check_order(mesh, layout: Layout, names: axes.MeshAxes) -> None:
    """Raise ValueError unless the mesh has its axes in the order of their roles."""
    roles = [role for axis in mesh.axis_names if (role := names.role(axis))]
    in_order = [role for role in axes.AXES if role in roles]
    if roles != in_order:
        raise ValueError(
            f"a group of {' x '.join(layout.axes)} needs the mesh axes in the order "
            f"{', '.join(map(names.axis, in_order))}, and the mesh has "
            f"{mesh.axis_names}"
        )


def spec(*dims: Axes) -> P:
    """Return the PartitionSpec of dims that are split over these axes; () is whole."""
    return P(*(dim or None for dim in dims))


def index_along(names: Axes) -> Int[Array, ""]:
    """Return the index of this device along axes, the last one innermost; 0 along
    none."""
    return jax.lax.axis_index(names) if names else jnp.int32(0)
