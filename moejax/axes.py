"""The four mesh axes, and the letters that array names end in.

    axis     what it splits
    dc       batch, over slow links: replicas of the parameters, or experts too
    data     batch; masters and moments of all parameters (FSDP)
    expert   batch and experts: where all_to_all moves rows; masters too
    tensor   hidden widths; a batch is whole on all of its devices

Letters: b batch, t time, u places of a cache, d model width, v vocabulary, l layers,
h query heads, g kv heads, i head width, j its pairs, n local tokens, k choices, a
assignments n*k, e experts, f expert hidden width, p all slots, s slots of one device,
r replicas, w devices of a group, c rows per peer, m rows received. Of an exchange u are
sources and v senders; x are the weights of one expert, flat.

A *group* is the devices between which rows travel: along expert, or along data or dc
and expert merged, the expert axis innermost (Layout.axes).
"""

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
"""Dense parameters and their moments exist once per dc, split over these."""
AUTO = (AxisType.Auto,)


def make_mesh(topology: Topology, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with all four axes, in Auto mode, over `devices` (default: all).

    Raises ValueError when the sizes do not multiply to the number of devices.
    Auto, because the model is written for one device and the partitioner splits it;
    every collective of the MoE layer is written by hand in shard_map (decision 0001).
    """
    devices = jax.devices() if devices is None else devices
    sizes = topology.sizes
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh {topology} needs {math.prod(sizes)} devices, and {len(devices)} are "
            f"here: change Mesh.{'/'.join(AXES)}, or simulate with "
            "Train.num_simulated_devices on the CPU"
        )
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=AUTO * 4)


def split(mesh: Mesh | AbstractMesh, inner: dict[str, int]):
    """The same devices in the same order, with axes cut in two: `inner` has the size of
    an axis's inner part, and the names become axis_outer and axis_inner.

    ValueError where an inner size does not divide its axis.
    """
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
    """NamedSharding of an array whose dims are split over these axes."""
    return NamedSharding(mesh, PartitionSpec(*dims))


def everywhere(tree, mesh: Mesh):
    """NumPy arrays, equal in all processes, whole on every device; unlike device_put,
    no process asks another whether they are."""
    whole = sharding(mesh)
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(
            np.shape(leaf), whole, lambda index: np.asarray(leaf)[index]
        ),
        tree,
    )


def axis_size(mesh: Mesh, axes: AxisNames) -> int:
    """Number of devices along one axis or a tuple of axes."""
    axes = (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[a] for a in axes)
