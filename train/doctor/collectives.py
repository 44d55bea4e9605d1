"""Checks of the collectives that a run's layers use, on the mesh of the run.

Every value says which device sent it, for which device, and its position, so that what
arrives is compared exactly with what the definition of the collective says. The
definitions need one table: `peers`, the devices that a device has along some axes, in
their order.

    all_gather        part j is what peers[j] has
    all_to_all        part j is what peers[j] has for this device
    reduce_scatter    the sum of these
    psum              the sum of what all peers have
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.axes import AXES, DC, EXPERT, TENSOR, axis_size
from moejax.moe.exchange.schedules import find_schedule
from moejax.moe.exchange.transport import TRANSPORTS
from moejax.moe.mesh_roles import Axes
from moejax.moe.weights.gather import Fsdp, gather
from moejax.resolve.resolved import Resolved
from train.doctor.outcome import Outcome
from train.step.gpu_options import compiler_options

ROWS, COLUMNS = 256, 16
"""Sizes of what travels for each pair of devices, where the run's own are not used."""
MAX_BYTES = 64 * 2**20
"""Largest size of the buffer of a device for which rows travel as in the run."""
DIGIT = 128
"""Base of the digits in which numbers are written. Every whole number up to 256 is
exact in bfloat16, and so are sums up to it."""
ALL_TO_ALL_SCHEDULES = ("s1", "s2")
"""Schedules whose rows travel to all shards of an owner by one exchange."""


class Place(NamedTuple):
    """Position of a device in the mesh, known inside a program."""

    me: Int[Array, ""]
    """Number of the device in the mesh."""
    peers_w: Int[Array, " w"]
    """Numbers of the devices along the axes of a check, in their order; this one is
    among them."""


@dataclasses.dataclass(frozen=True)
class CollectiveCheck:
    """One collective along some axes of the mesh."""

    name: str
    avoided_by: str
    """Binding with which a run does not use the collective (Outcome.avoided_by)."""
    along: Axes
    run: Callable[[Place], list[tuple[Array, Array]]]
    """Function that runs it on one device, and returns pairs of equal shapes: what
    came, and what should have come."""


def collective_checks(run: Resolved) -> list[CollectiveCheck]:
    """Return a check for each collective that the layers of a run use."""
    checks = [*_row_checks(run), *_gather_checks(run), *_plain_checks(run)]
    return list({check.name: check for check in checks}.values())


def _row_checks(run: Resolved) -> list[CollectiveCheck]:
    """Return the check of how rows travel between devices, both ways; none where no
    rows do."""
    mesh_layout, layout = run.mesh_layout, run.layout
    name, tensor = layout.transport, layout.tensor
    along = mesh_layout.peer_axes
    if tensor is not None and tensor.schedule in ALL_TO_ALL_SCHEDULES:
        along += mesh_layout.shard_axes
    if name == "local" or not along or run.cfg.router.training == "dense":
        return []
    dtype = jnp.dtype(run.cfg.model.compute_dtype)
    w, d = axis_size(mesh_layout.mesh, along), run.cfg.model.d_model
    rows = min(layout.rows_per_peer, MAX_BYTES // (w * d * dtype.itemsize))
    option = "Dispatch.transport = 'padded'" if name != "padded" else ""
    send = functools.partial(_travel, name, along, (max(8, rows), d), dtype)
    return [CollectiveCheck(f"{name} rows{_along(along)}", option, along, send)]


def _gather_checks(run: Resolved) -> list[CollectiveCheck]:
    """Return checks of weights that are gathered, and of their gradients."""
    mesh_layout, model = run.mesh_layout, run.cfg.model
    compute, reduce = model.compute_dtype, model.gradient_reduce_dtype
    gathers = [(mesh_layout.master_axes, compute), (mesh_layout.fsdp_axes, compute)]
    gathers += [((axis,), compute) for axis in mesh_layout.domain_axes]
    gathers += [(mesh_layout.fsdp_axes, "float32")]
    checks = []
    for along, dtype in gathers:
        if not along:
            continue
        travel = jnp.promote_types(dtype, reduce).name
        option = "Model.gradient_reduce_dtype = 'float32'"
        name = f"gather in {dtype}, gradients in {travel}{_along(along)}"
        step = functools.partial(_gather, Fsdp(along, None, reduce), jnp.dtype(dtype))
        option = option if travel != "float32" else ""
        checks.append(CollectiveCheck(name, option, along, step))
    return checks


def _plain_checks(run: Resolved) -> list[CollectiveCheck]:
    """Return checks of the other collectives, along the axes of the layers and of the
    dense part of the model."""
    mesh_layout, compute = run.mesh_layout, run.cfg.model.compute_dtype
    schedule = find_schedule(mesh_layout.exchanged)
    expert, tensor, dc = (_parts(run, axis) for axis in (EXPERT, TENSOR, DC))
    wanted: list[tuple[str, Axes, str]] = [
        ("all_gather", schedule.sources(mesh_layout), "int32"),
        ("all_gather", schedule.split(mesh_layout), compute),
        ("all_gather", mesh_layout.shard_axes, compute),
        ("all_gather", expert, compute),
        ("reduce_scatter", mesh_layout.shard_axes, compute),
        ("reduce_scatter", expert, compute),
        ("psum", tensor, compute),
        ("psum", mesh_layout.shard_axes, compute),
        ("psum", dc, "float32"),
        ("psum", sum((_parts(run, axis) for axis in AXES), ()), "float32"),
    ]
    wanted += [("psum", _parts(run, axis), "float32") for axis in AXES]
    if any(store != "owned" for store in (run.layout.store, *run.settings.stores)):
        wanted.append(("all_to_all", mesh_layout.owner_axes, compute))
    return [
        CollectiveCheck(
            f"{kind} in {dtype}{_along(along)}",
            "",
            along,
            functools.partial(PLAIN[kind], along, jnp.dtype(dtype)),
        )
        for kind, along, dtype in wanted
        if along
    ]


def _along(along: Axes) -> str:
    return f" along {' x '.join(along)}"


def _parts(run: Resolved, axis: str) -> Axes:
    """Return the axes of the layers' mesh that an axis of the run's mesh is cut into,
    without those of one device."""
    mesh = run.mesh_layout.mesh
    names = (axis, f"{axis}_outer", f"{axis}_inner")
    return tuple(n for n in mesh.axis_names if n in names and mesh.shape[n] > 1)


def _code(sender, receiver, shape: tuple[int, int], base: int) -> Float[Array, "r c"]:
    """Return what `sender` has for `receiver`, [.., rows, columns]: in turn the digits
    of both numbers and of the row, in `base`.

    The two numbers may be arrays [..]; the result is float32.
    """
    rows, columns = shape
    row_r1, column = jnp.arange(rows)[:, None], jnp.arange(columns)
    sender, receiver = (jnp.asarray(n)[..., None, None] for n in (sender, receiver))
    digits = [
        number // base**power % base
        for number in (sender, receiver, row_r1)
        for power in range(2)
    ]
    shape = (*jnp.broadcast_shapes(sender.shape, receiver.shape)[:-2], rows, columns)
    which = column % len(digits)
    values = (jnp.where(which == i, digit, 0) for i, digit in enumerate(digits))
    return jnp.broadcast_to(sum(values), shape).astype(jnp.float32)


def _base(dtype, num_added: int) -> int:
    """Return the base in which sums of `num_added` digits are exact in a dtype."""
    if jnp.dtype(dtype).itemsize >= 4:
        return DIGIT
    return max(2, min(DIGIT, 2 * DIGIT // num_added))


def _travel(name: str, along: Axes, shape, dtype, place: Place):
    """Send rows by a transport, and their gradients back. What lies beyond the rows in
    use is not compared."""
    me, peers_w = place
    rows_r = jnp.arange(shape[0])

    def count(sender, receiver):
        return (3 * sender + 5 * receiver + 1) % (shape[0] + 1)

    count_w, incoming_w = count(me, peers_w), count(peers_w, me)
    sent_wcd = _code(me, peers_w, shape, DIGIT)
    arriving_wcd = _code(peers_w, me, shape, DIGIT)

    def send(rows_wcd):
        return TRANSPORTS[name](rows_wcd, count_w, incoming_w, along)

    def real(value_wcd, count_w):
        return jnp.where((rows_r < count_w[:, None])[..., None], value_wcd, 0)

    arrived_wcd, back = jax.vjp(send, sent_wcd.astype(dtype))
    (gradient_wcd,) = back(real(sent_wcd, incoming_w).astype(dtype))
    return [
        (real(arrived_wcd, incoming_w), real(arriving_wcd, incoming_w)),
        (real(gradient_wcd, count_w), real(arriving_wcd, count_w)),
    ]


def _gather(fsdp: Fsdp, dtype, place: Place):
    """Gather a weight from its parts, and sum its gradients where it rests."""
    me, peers_w = place
    base, shape = _base(dtype, len(peers_w)), (ROWS, COLUMNS)

    def whole(part):
        return gather((part,), (0,), me, fsdp)[0]

    gathered, back = jax.vjp(whole, _code(me, 0, shape, base).astype(dtype))
    gradient = _code(me, peers_w, shape, base).reshape(gathered.shape)
    (summed,) = back(gradient.astype(dtype))
    every = _code(peers_w, 0, shape, base).reshape(gathered.shape)
    return [(gathered, every), (summed, _code(peers_w, me, shape, base).sum(0))]


def _all_gather(along: Axes, dtype, place: Place):
    own, every = (_code(n, 0, (ROWS, COLUMNS), DIGIT) for n in place)
    return [(jax.lax.all_gather(own.astype(dtype), along), every)]


def _all_to_all(along: Axes, dtype, place: Place):
    me, peers_w = place
    sent = _code(me, peers_w, (ROWS, COLUMNS), DIGIT).astype(dtype)
    came = jax.lax.all_to_all(sent, along, split_axis=0, concat_axis=0, tiled=True)
    return [(came, _code(peers_w, me, (ROWS, COLUMNS), DIGIT))]


def _reduce_scatter(along: Axes, dtype, place: Place):
    (me, peers_w), shape = place, (ROWS, COLUMNS)
    base = _base(dtype, len(peers_w))
    sent = _code(me, peers_w, shape, base).astype(dtype)
    return [(jax.lax.psum_scatter(sent, along), _code(peers_w, me, shape, base).sum(0))]


def _psum(along: Axes, dtype, place: Place):
    (me, peers_w), shape = place, (ROWS, COLUMNS)
    base = _base(dtype, len(peers_w))
    total = jax.lax.psum(_code(me, 0, shape, base).astype(dtype), along)
    return [(total, _code(peers_w, 0, shape, base).sum(0))]


PLAIN = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "psum": _psum,
}
"""Collectives by name, as functions (axes, dtype, place) -> pairs."""


def run_collective(check: CollectiveCheck, mesh: Mesh) -> Outcome:
    """Run a check on all devices of a mesh, and return what it found on the devices of
    this process. All processes call it with the same check.

    The program has the compiler's options of a step: a collective may be wrong under
    one scheduler and right under another.
    """
    everywhere = P(mesh.axis_names)

    def body(me_1, peers_1w):
        """Return the number of wrong values, and the first of them with the value that
        should be in its place."""
        pairs = check.run(Place(me_1[0], peers_1w[0]))
        came, expected = (
            jnp.concatenate([array.astype(jnp.float32).reshape(-1) for array in arrays])
            for arrays in zip(*pairs)
        )
        is_wrong = came != expected  # also for NaN
        first = jnp.argmax(is_wrong)
        count = jnp.sum(is_wrong, dtype=jnp.float32)
        return jnp.stack([count, came[first], expected[first]])[None]

    program = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(everywhere, everywhere), out_specs=everywhere
        ),
        compiler_options=compiler_options(mesh.devices.flat[0].platform),
    )
    split = NamedSharding(mesh, everywhere)
    tables = np.arange(mesh.size, dtype=np.int32), _peers(mesh, check.along)
    found_n3 = program(
        *(jax.make_array_from_callback(t.shape, split, t.__getitem__) for t in tables)
    )
    by_device = {
        shard.device.id: np.asarray(shard.data)[0]
        for shard in found_n3.addressable_shards
    }
    wrong = {device: found for device, found in by_device.items() if found[0]}
    details = [f"{due:g} came as {came:g}" for _, came, due in wrong.values()]
    return Outcome(
        name=check.name,
        avoided_by=check.avoided_by,
        error=float(max(found[0] for found in by_device.values())),
        allowed=0.0,
        devices=tuple(wrong),
        process=jax.process_index(),
        detail=details[0] if details else "",
    )


def _peers(mesh: Mesh, along: Axes) -> Int[np.ndarray, "n w"]:
    """Return the numbers of the devices that each device of a mesh has along axes."""
    numbers = np.arange(mesh.size, dtype=np.int32).reshape(mesh.devices.shape)
    dims = [mesh.axis_names.index(axis) for axis in along]
    others = [dim for dim in range(numbers.ndim) if dim not in dims]
    groups_gw = numbers.transpose(*others, *dims).reshape(-1, axis_size(mesh, along))
    table_nw = np.empty((mesh.size, groups_gw.shape[1]), np.int32)
    table_nw[groups_gw] = groups_gw[:, None]
    return table_nw
