"""The four mesh axes, and the letters that array names end in.

    axis     what it splits
    dc       batch, over slow links: replicas of the parameters, or experts too
    data     batch; float32 master parameters and moments of all parameters (FSDP)
    expert   batch and experts (all_to_all moves rows along it); master parameters too
    tensor   hidden widths; a batch is whole on all of its devices

Letters: b batch, t time, u positions of a cache, d model width, v vocabulary, l layers,
h query heads, g kv heads, i head width, j its pairs, n local tokens, k choices, a
assignments n*k, e experts, f expert hidden width, p all slots, s slots of one device, r
replicas, w devices of a group, c rows per peer, m rows received, u sources and v
senders of an exchange, x weights of one expert, flat.

A *group* is the devices between which rows travel: along expert, or along data or dc
and expert merged, the expert axis innermost (Layout.axes).
"""

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from moejax.plan.layout import Topology

AxisNames = str | tuple[str, ...]
DC, DATA, EXPERT, TENSOR = AXES = ("dc", "data", "expert", "tensor")
BATCH_AXES = (DC, DATA, EXPERT)
"""A batch is split over all three: experts share data parallelism's devices."""
FSDP_AXES = (DATA, EXPERT)
"""Dense parameters and their moments are split over these: they exist once per dc."""
VOCAB_AXES = (DATA, EXPERT, TENSOR)
"""The rows of embedding and head are split over these (moejax.model.vocabulary)."""
AUTO = (AxisType.Auto,)


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Name of the mesh axis that has each role. None means that the mesh has no such
    axis, which is as if it had one device along it."""

    dc: str | None = None
    data: str | None = None
    expert: str | None = None
    tensor: str | None = None

    @classmethod
    def by_role(cls, mesh: Mesh | AbstractMesh) -> "MeshAxes":
        """Return the axes of a mesh that are named as their roles."""
        return cls(**{role: role for role in AXES if role in mesh.axis_names})

    def axis(self, role: str) -> str | None:
        """Return the name of the axis that has a role."""
        return getattr(self, role)

    def role(self, axis: str) -> str | None:
        """Return the role of the axis with a name."""
        return next((role for role in AXES if self.axis(role) == axis), None)

    def topology(self, mesh: Mesh | AbstractMesh) -> Topology:
        """Return the number of devices along each role's axis.

        Raises ValueError where a named axis is not in the mesh, where one axis has two
        roles, and where an axis of several devices has none.
        """
        names = [name for name in map(self.axis, AXES) if name is not None]
        has = f"the mesh has axes {mesh.axis_names}"
        for role in AXES:
            name = self.axis(role)
            if name is not None and name not in mesh.axis_names:
                rest = dataclasses.replace(self, **{role: None})
                raise ValueError(
                    f"{has} and none named {name!r}: say which one has the role "
                    f"{role}, as {rest._completed(mesh)}"
                )
            if name is not None and names.count(name) > 1:
                raise ValueError(f"{has}, and {name!r} has two roles in {self}")
        for name, size in mesh.shape.items():
            if size > 1 and name not in names:
                raise ValueError(
                    f"{has}, and {name!r} ({size} devices) has no role among "
                    f"{', '.join(AXES)}: give it one, as {self._completed(mesh)}"
                )
        sizes = (mesh.shape[n] if n else 1 for n in map(self.axis, AXES))
        return Topology(*sizes)

    def _completed(self, mesh: Mesh | AbstractMesh) -> str:
        """Return the call that gives the mesh's other axes the roles that are free."""
        roles = {r: self.axis(r) for r in AXES if self.axis(r) in mesh.axis_names}
        free = [r for r in (EXPERT, DATA, TENSOR, DC) if r not in roles]
        others = [name for name in mesh.axis_names if name not in roles.values()]
        roles |= zip(free, reversed(others))
        named = ", ".join(f"{r}={roles[r]!r}" for r in AXES if r in roles)
        return f"MeshAxes({named})"


OWN_NAMES = MeshAxes(*AXES)
"""The names that `make_mesh` gives."""


def make_mesh(topology: Topology, devices: list[jax.Device] | None = None) -> Mesh:
    """Return a mesh with all four axes, in Auto mode, over `devices` (default: all).

    Raises ValueError when the sizes do not multiply to the number of devices.
    Auto, because the model is written for one device and the partitioner splits it;
    every collective of the MoE layer is written by hand in shard_map (decision 0001).
    """
    devices = jax.devices() if devices is None else devices
    sizes = topology.sizes
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh {topology} needs {math.prod(sizes)} devices, and {len(devices)} are "
            f"here: change Mesh.{'/'.join(AXES)} (train/main.py --gin_file=... "
            f"--dry_run --num_devices={len(devices)} proposes meshes), or simulate "
            "with Train.num_simulated_devices on the CPU"
        )
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=AUTO * 4)


def split(mesh: Mesh | AbstractMesh, inner: dict[str, int]):
    """Return a mesh of the same devices in the same order with axes cut in two.

    `inner` has the size of the inner part of each such axis. The names of the parts are
    axis_outer and axis_inner. Raises ValueError where a size does not divide its axis.
    """
    if not inner:
        return mesh
    if is_explicit(mesh):
        raise ValueError(
            f"the layout cuts mesh axes {', '.join(inner)} in two, and the mesh has "
            "Explicit axes: make it with axis_types=(AxisType.Auto,) * "
            f"{len(mesh.axis_names)}"
        )
    sizes: dict[str, int] = {}
    for axis, size in mesh.shape.items():
        if axis not in inner:
            sizes[axis] = size
            continue
        if size % inner[axis]:
            raise ValueError(
                f"the {axis} axis ({size}) is not divisible in parts of {inner[axis]}"
            )
        sizes |= {f"{axis}_outer": size // inner[axis], f"{axis}_inner": inner[axis]}
    names, shape = tuple(sizes), tuple(sizes.values())
    types = {"axis_types": AUTO * len(sizes)}
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
        return AbstractMesh(shape, names, **types, abstract_device=device)
    return Mesh(mesh.devices.reshape(shape), names, **types)


def sharding(mesh: Mesh, *dims: str | tuple[str, ...] | None) -> NamedSharding:
    """Return the NamedSharding of an array whose dims are split over these axes."""
    return NamedSharding(mesh, PartitionSpec(*dims))


def devices_of(mesh: Mesh | AbstractMesh):
    """Return a context in which programs, and choices for them, are for the devices of
    a mesh. An abstract mesh without a device stands for those of this machine."""
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    device = abstract.abstract_device
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether the types of arrays carry their sharding on this mesh (JAX's
    explicit mode, the default of `jax.make_mesh`)."""
    return AxisType.Explicit in mesh.axis_types


def put(value: jax.Array, where: NamedSharding) -> jax.Array:
    """Return the array with a sharding, inside a jitted function or outside."""
    if is_explicit(where.mesh) and isinstance(value, jax.core.Tracer):
        return jax.sharding.reshard(value, where)
    return jax.device_put(value, where)


def everywhere(tree, mesh: Mesh):
    """Put NumPy arrays, equal in all processes, whole on every device of a mesh. Unlike
    device_put, this does not compare the arrays of different processes."""
    whole = sharding(mesh)
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(
            np.shape(leaf), whole, lambda index: np.asarray(leaf)[index]
        ),
        tree,
    )


def axis_size(mesh: Mesh, axes: AxisNames) -> int:
    """Return the number of devices along one axis or a tuple of axes."""
    axes = (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[a] for a in axes)
