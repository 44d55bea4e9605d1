"""Comparison of the replicas of a state's leaves, by checksums of each device's bits.

A leaf whose sharding does not use all axes of its mesh exists more than once: devices
that differ only along the other axes hold *replicas* of one shard. In an honest run
they have equal bits, because each device computes them from equal values in the same
order. Every device sums its own shards, and the host compares the sums:

    check = ReplicaCheck(abstract_state, mesh)      compiled here
    table_wn = check.sums(state)                    uint32 [device, leaf], everywhere
    check.differences(np.asarray(table_wn))         shards that are not equal

A leaf that exists once has nothing to be compared with (`coverage`).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from moejax.axes import sharding
from train.checkpoint.checksum import as_own, named_leaves, replicated_over, shard_sum


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The leaves of a state that a comparison of replicas covers, and the others."""

    compared: dict[str, int]
    """Bytes on each device of the leaves that exist more than once, by name."""
    single: dict[str, int]
    """Bytes on each device of the leaves that exist once, by name."""

    def __str__(self) -> str:
        return (
            f"{_count(self.compared)} on several devices; {_count(self.single)} exist "
            "once, where a flipped bit is not found"
        )


@dataclasses.dataclass(frozen=True)
class Difference:
    """A shard of a leaf of which not all replicas have the same bits."""

    leaf: str
    devices: tuple[int, ...]
    """Devices that hold the replicas, by their positions in the mesh."""
    sums: tuple[int, ...]
    """Checksums of the replicas, in the order of `devices`."""

    @property
    def wrong(self) -> tuple[int, ...]:
        """The devices that do not agree with the majority; none without a majority."""
        most = max(set(self.sums), key=self.sums.count)
        if 2 * self.sums.count(most) <= len(self.sums):
            return ()
        return self.not_as(most)

    def not_as(self, checksum: int) -> tuple[int, ...]:
        """Return the devices whose replica has another checksum."""
        return tuple(w for w, s in zip(self.devices, self.sums) if s != checksum)


def coverage(state) -> Coverage:
    """Return which leaves of a state, or of an abstract one, exist more than once."""
    compared, single = {}, {}
    for name, leaf in named_leaves(state).items():
        shape = leaf.sharding.shard_shape(leaf.shape)
        size = math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
        (compared if _num_replicas(leaf) > 1 else single)[name] = size
    return Coverage(compared, single)


class ReplicaCheck:
    """A compiled program that sums every shard of the leaves that exist more than once,
    and the comparison of its results."""

    def __init__(self, abstract_state, mesh: Mesh) -> None:
        """Compile the program for states with the shapes and shardings of
        `abstract_state`.

        The leaves' meshes may cut axes of `mesh` in two: they have the same devices in
        the same order.
        """
        leaves = {
            name: leaf
            for name, leaf in named_leaves(abstract_state).items()
            if _num_replicas(leaf) > 1
        }
        by_mesh: dict[Mesh, list[str]] = {}
        for name, leaf in leaves.items():
            assert np.array_equal(leaf.sharding.mesh.devices.flat, mesh.devices.flat)
            by_mesh.setdefault(leaf.sharding.mesh, []).append(name)
        self._names = [name for names in by_mesh.values() for name in names]
        self._holders = [_holders(leaves[name]) for name in self._names]
        self.program = None
        if leaves:
            groups = [(m, [leaves[n] for n in names]) for m, names in by_mesh.items()]
            self.program = _compile(groups, mesh)

    def sums(self, state) -> jax.Array | None:
        """Start to sum the shards of a state, and return the sums, uint32 [device,
        leaf], whole on every device; None if every leaf exists once.

        The caller may donate the state as soon as this returns.
        """
        if self.program is None:
            return None
        leaves = named_leaves(state)
        return self.program([leaves[name] for name in self._names])

    def differences(self, table_wn: np.ndarray) -> list[Difference]:
        """Return the shards whose replicas differ, from the result of `sums`."""
        found = []
        for name, holders_xr, sum_w in zip(self._names, self._holders, table_wn.T):
            sums_xr = sum_w[holders_xr]
            is_different_x = (sums_xr != sums_xr[:, :1]).any(axis=1)
            for shard in np.flatnonzero(is_different_x):
                devices, sums = holders_xr[shard].tolist(), sums_xr[shard].tolist()
                found.append(Difference(name, tuple(devices), tuple(sums)))
        return found


def _compile(groups: list[tuple[Mesh, list]], mesh: Mesh):
    """Return the compiled program that sums these leaves, given by mesh."""

    def sums(leaves: list[jax.Array]) -> jax.Array:
        tables, rest = [], iter(leaves)
        for own_mesh, abstract in groups:
            shards = [next(rest) for _ in abstract]
            specs = [leaf.sharding.spec for leaf in abstract]
            tables.append(_sums_on_mesh(shards, own_mesh, specs))
        return jnp.concatenate(tables, axis=1)

    abstract = [leaf for _, leaves in groups for leaf in leaves]
    return jax.jit(sums, out_shardings=sharding(mesh)).lower(abstract).compile()


def _sums_on_mesh(leaves: list, mesh: Mesh, specs: list[PartitionSpec]) -> jax.Array:
    """Return the checksums of each device's own shards, uint32 [device, leaf]."""
    axes = tuple(mesh.axis_names)

    def local(shards: list[jax.Array]) -> jax.Array:
        own = (as_own(shard, spec, axes) for shard, spec in zip(shards, specs))
        return jnp.stack([shard_sum(shard) for shard in own])[None]

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(axes, None)
    )
    return run(leaves)


def _replicated_over(leaf) -> tuple[str, ...]:
    return replicated_over(leaf.sharding.spec, leaf.sharding.mesh.axis_names)


def _num_replicas(leaf) -> int:
    """Return how many devices hold each shard of a leaf."""
    mesh: Mesh | AbstractMesh = leaf.sharding.mesh
    return math.prod(mesh.shape[axis] for axis in _replicated_over(leaf))


def _holders(leaf) -> np.ndarray:
    """Return the positions in the mesh of the devices that hold each shard, [shard,
    replica]."""
    mesh, over = leaf.sharding.mesh, _replicated_over(leaf)
    names, sizes = mesh.axis_names, tuple(mesh.shape.values())
    split_over = [axis for axis in names if axis not in over]
    order = [names.index(axis) for axis in (*split_over, *over)]
    position = np.arange(mesh.size).reshape(sizes).transpose(order)
    return position.reshape(-1, _num_replicas(leaf))


def _count(sizes: dict[str, int]) -> str:
    return f"{len(sizes)} leaves ({sum(sizes.values()) / 2**20:,.1f} MiB per device)"
