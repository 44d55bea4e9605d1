"""Find silent corruption: replicas of a leaf must have equal bits throughout a run.

    step s is dispatched  ->  every N-th time: sum the shards, on the devices
    step s + 1            ->  read the sums of step s, and compare
    before each save      ->  sum, read and compare at once

A leaf whose sharding does not use all axes of its mesh exists more than once: devices
that differ only along the other axes hold *replicas* of one shard. In an honest run
they have equal bits, because each device computes them from equal values in the same
order. A difference ends the run, and nothing is saved after it. A leaf that exists once
has nothing to be compared with (`coverage`).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from moejax.axes import sharding
from train.balance.balancing import Balancing
from train.checkpoint.checkpoints import Checkpointer
from train.checkpoint.checksum import array_sum, named_leaves
from train.job import Job
from train.launch.processes import Watchdog
from train.launch.program import RunFailed
from train.step.state import TrainState, abstract_state


class ReplicasDiffer(RunFailed):
    """Raised when replicas of a leaf do not have the same bits."""


class Replicas:
    """Comparison of the replicas of a run's state, every
    Train.check_replicas_every_steps steps and before each save."""

    def __init__(
        self,
        job: Job,
        balancing: Balancing,
        checkpointer: Checkpointer,
        watchdog: Watchdog,
        say: Callable[[str], None],
    ) -> None:
        """Compile the comparison for each way in which the balancer may store
        experts."""
        self._mesh, self._balancing = job.model.mesh, balancing
        self._checkpointer, self._watchdog = checkpointer, watchdog
        self._every_steps = job.cfg.train.check_replicas_every_steps
        self._waiting: tuple[int, ReplicaCheck, jax.Array] | None = None
        self._last_equal: int | None = None
        self._checks: dict[bool, ReplicaCheck] = {}
        if not self._every_steps:
            return
        run, optimizer = job.model.run, job.model.optimizer
        for store in balancing.stores:
            if (store == "sharded") not in self._checks:
                state = abstract_state(run, optimizer, store)
                self._checks[store == "sharded"] = ReplicaCheck(state, self._mesh)
        state = abstract_state(run, optimizer, balancing.layout.store)
        say(
            f"replicas  {coverage(state)}; compared every {self._every_steps} steps "
            "and before each save (--dry_run --json lists them)"
        )

    def is_due(self, step: int) -> bool:
        """Return whether `put` begins or reads a comparison at this step."""
        return self._begins(step) or self._waiting is not None

    def put(self, step: int, state: TrainState) -> None:
        """Start to compare the replicas after `step` if that is due, and read the
        comparison that was started last. The state may be donated afterwards.

        Raises ReplicasDiffer.
        """
        self._read()
        if self._begins(step):
            self._start(step, state)

    def require_equal(self, step: int, state: TrainState) -> None:
        """Raise ReplicasDiffer unless the replicas after `step` are equal."""
        if self._every_steps and self._last_equal != step:
            if self._waiting is None:
                self._start(step, state)
            self._read()

    def _begins(self, step: int) -> bool:
        return bool(self._every_steps) and step % self._every_steps == 0

    def _start(self, step: int, state: TrainState) -> None:
        check = self._checks[self._balancing.layout.store == "sharded"]
        table_wn = check.sums(state)
        if table_wn is not None:
            table_wn.copy_to_host_async()
            self._waiting = (step, check, table_wn)

    def _read(self) -> None:
        """Read the comparison that waits; raise ReplicasDiffer if replicas differ."""
        if self._waiting is None:
            return
        (step, check, table_wn), self._waiting = self._waiting, None
        found = check.differences(jax.device_get(table_wn))
        if found:
            raise ReplicasDiffer(self._explain(step, found))
        self._last_equal = step

    def _explain(self, step: int, found: list["Difference"]) -> str:
        """Return one line: which replicas differ after `step`, since when, and what to
        do. A difference whose majority says which device is wrong comes first."""
        first = next((x for x in found if x.wrong), found[0])
        num_leaves = len({x.leaf for x in found})
        more = f" and {num_leaves - 1} more" if num_leaves > 1 else ""
        devices = " and ".join(map(self._name, first.wrong or first.devices))
        where = f"differs between {devices}; nothing says which one is wrong"
        if first.wrong:
            num_right = len(first.devices) - len(first.wrong)
            where = f"is wrong on {devices}: the {num_right} other replicas agree"
        since = "no comparison came before"
        if self._last_equal is not None:
            since = f"they were equal after step {self._last_equal}"
        written = self._checkpointer.num_written_bytes
        self._watchdog.at("the save before a difference of replicas", written)
        self._checkpointer.settle()
        saved_step = self._checkpointer.newest_step()
        go_on = "there is no checkpoint, so that a new start begins at step 1"
        if saved_step is not None:
            go_on = (
                f"start again to go on from checkpoint {saved_step}, whose replicas "
                "were equal"
            )
        return (
            f"REPLICAS DIFFER after step {step}: {first.leaf}{more} {where}; {since}; "
            f"{go_on}, and replace a device that such lines name twice"
        )

    def _name(self, position: int) -> str:
        """Return a device's id, process and mesh coordinates, by its position."""
        device = self._mesh.devices.flat[position]
        indices = np.unravel_index(position, self._mesh.devices.shape)
        sizes = self._mesh.shape.items()
        where = [f"{axis}={i}" for (axis, n), i in zip(sizes, indices) if n > 1]
        place = ", ".join([f"process {device.process_index}", *where])
        return f"device {device.id} ({place})"


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


def _count(sizes: dict[str, int]) -> str:
    return f"{len(sizes)} leaves ({sum(sizes.values()) / 2**20:,.1f} MiB per device)"


def coverage(state) -> Coverage:
    """Return which leaves of a state, or of an abstract one, exist more than once."""
    compared, single = {}, {}
    for name, leaf in named_leaves(state).items():
        shape = leaf.sharding.shard_shape(leaf.shape)
        size = math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
        (compared if _num_replicas(leaf) > 1 else single)[name] = size
    return Coverage(compared, single)


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
        return tuple(w for w, s in zip(self.devices, self.sums) if s != most)


class ReplicaCheck:
    """A compiled program in which every device sums its shards of the leaves that exist
    more than once, and the comparison of its results."""

    def __init__(self, abstract_state, mesh: Mesh) -> None:
        """Compile the program for states with the shapes and shardings of
        `abstract_state`.

        The leaves' meshes may cut axes of `mesh` in two: they have the same devices in
        the same order.
        """
        by_mesh: dict[Mesh, dict] = {}
        for name, leaf in named_leaves(abstract_state).items():
            if _num_replicas(leaf) > 1:
                own_mesh = leaf.sharding.mesh
                assert np.array_equal(own_mesh.devices.flat, mesh.devices.flat)
                by_mesh.setdefault(own_mesh, {})[name] = leaf
        self._names = [list(leaves) for leaves in by_mesh.values()]
        self._holders = [
            (name, _holders(leaf))
            for leaves in by_mesh.values()
            for name, leaf in leaves.items()
        ]

        def sums(groups: list[list[jax.Array]]) -> jax.Array:
            tables = map(_sums_on_mesh, groups, by_mesh, specs)
            return jnp.concatenate(list(tables), axis=1)

        groups = [list(leaves.values()) for leaves in by_mesh.values()]
        specs = [[leaf.sharding.spec for leaf in group] for group in groups]
        self.program = None
        if groups:
            jitted = jax.jit(sums, out_shardings=sharding(mesh))
            self.program = jitted.lower(groups).compile()

    def sums(self, state) -> jax.Array | None:
        """Start to sum the shards of a state, and return the sums, uint32 [device,
        leaf], whole on every device; None if every leaf exists once.

        The caller may donate the state as soon as this returns.
        """
        if self.program is None:
            return None
        leaves = named_leaves(state)
        return self.program([[leaves[name] for name in names] for names in self._names])

    def differences(self, table_wn: np.ndarray) -> list[Difference]:
        """Return the shards whose replicas differ, from the result of `sums`."""
        found = []
        for (name, holders_xr), sum_w in zip(self._holders, table_wn.T):
            sums_xr = sum_w[holders_xr]
            is_different_x = (sums_xr != sums_xr[:, :1]).any(axis=1)
            for shard in np.flatnonzero(is_different_x):
                devices, sums = holders_xr[shard].tolist(), sums_xr[shard].tolist()
                found.append(Difference(name, tuple(devices), tuple(sums)))
        return found


def _sums_on_mesh(leaves: list, mesh: Mesh, specs: list[PartitionSpec]) -> jax.Array:
    """Return the checksums of each device's own shards, uint32 [device, leaf]."""
    axes = tuple(mesh.axis_names)

    def local(shards: list[jax.Array]) -> jax.Array:
        sums = []
        for shard, spec in zip(shards, specs):
            over = _not_used(spec, axes)
            own = jax.lax.pcast(shard, over, to="varying") if over else shard
            sums.append(array_sum(own))
        return jnp.stack(sums)[None]

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(axes, None)
    )
    return run(leaves)


def _not_used(spec: PartitionSpec, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of a mesh over which an array with this spec is not split."""
    dims = [(dim,) if isinstance(dim, str) else dim for dim in spec if dim is not None]
    return tuple(axis for axis in axes if not any(axis in dim for dim in dims))


def _replicated_over(leaf) -> tuple[str, ...]:
    return _not_used(leaf.sharding.spec, leaf.sharding.mesh.axis_names)


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
