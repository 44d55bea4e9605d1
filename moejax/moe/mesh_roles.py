"""Which mesh axes the parts of an MoE layer talk along: Groups.

    batch    tokens are split over these, and whole over all others
    owners   experts are split over these: peers and domain together
    peers    rows travel along these
    domain   experts are gathered along these, slow ones first
    (moejax.moe.weights.domains)
    shards   hidden width of an expert, as it is computed
    parts    the tensor axis: attention and dense parts are split over it
    masters  hidden width of an expert where it rests, beside shards; gathered for use

Axes that are cut in two are those of `mesh`, a reshape of the run's. Axes of one device
are in none of the tuples but `batch`: nothing is sent along them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from moejax import axes
from moejax.plan.layout import Layout

Axes = tuple[str, ...]


class Groups(NamedTuple):
    mesh: Mesh | None = None
    batch: Axes = ()
    owners: Axes = ()
    peers: Axes = ()
    domain: Axes = ()
    shards: Axes = ()
    parts: Axes = ()
    masters: Axes = ()

    @classmethod
    def along(cls, axis: str) -> "Groups":
        """Experts and rows along one axis, and nothing else."""
        return cls(owners=(axis,), peers=(axis,))


def groups_of(mesh: Mesh, layout: Layout) -> Groups:
    """For layers of this layout on the run's mesh, whose axes are those of
    moejax.axes."""
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
    parts = order(*tensor_outer, *tensor_inner)
    batch = order(
        *(f"{a}{end}" for a in axes.BATCH_AXES for end in ("", "_outer", "_inner"))
    )
    resting = tuple(
        a for a in (axes.DATA,) if a not in layout.axes and mesh.shape[a] > 1
    )
    if layout.is_local:
        resting = tuple(a for a in axes.FSDP_AXES if mesh.shape[a] > 1)
        return Groups(refined, batch, parts, parts, (), (), parts, resting)
    peers, domain = within(*layout.axes)
    shards: Axes = ()
    if layout.domain is None:
        shards, domain = domain, ()
    if tensor is not None and tensor.expert_shards < tensor.size:
        peers, shards = peers + tensor_outer, tensor_inner
    else:
        shards = shards + parts
    owners = order(*peers, *domain)
    return Groups(refined, batch, owners, peers, domain, shards, parts, resting)


def spec(*dims: Axes) -> P:
    """PartitionSpec of these dims; () is whole."""
    return P(*(dim or None for dim in dims))


def index_along(names: Axes) -> Int[Array, ""]:
    """Number of this device along these axes, the last one innermost; 0 along none."""
    return jax.lax.axis_index(names) if names else jnp.int32(0)
