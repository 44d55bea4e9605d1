"""Order of the collectives around a layer's experts, where there is a tensor axis.

n tokens of one tensor group, T rows of a full buffer for them, MP the tensor axis, EP
the experts' owners, ESP their shards. Elements of one layer's forward pass, each times
the width d:

    base    gather x over ESP        n ESP        DeepSpeed-MoE (arXiv 2201.05596)
            rows out and home, EP    2 x T ESP
            sum over ESP             T ESP
    s1      x split over MP                       Parm (arXiv 2407.00599)
            rows out and home, one all_to_all over EP x ESP    2 x T ESP / MP
            gather y over MP         n
    s2      the buffer split over MP              Parm
            rows out and home, EP x ESP    2 x T ESP / MP
            gather the buffer over MP      T
    s1h     x split over MP                       FSMoE's order (arXiv 2501.10714)
            rows out and home, EP    2 x T / MP
            gather rows over ESP, scatter their sums    2 x T ESP / MP
            gather y over MP         n
    local   experts along MP, sum y over MP      n     PPMoE (arXiv 2304.11414)

The backward pass sends the same again: the gather over MP is then the transpose of the
split, and that of base's gather is free where ESP is MP. All are one function, up to
the order of sums, unless a capacity drops rows: s1 and s1h drop by part of the tokens,
and base's copies of a token take room from one another.

A layer calls `enter` before it routes and `leave` after its last row is home; dispatch
and combine call the `out` and `back` of its schedule, for each window.

    enter(x_nd)    the tokens that this device routes
    out(rows)      [w, c, d] for each peer  ->  [v, c, d] from each sender
    back(rows)     the same way back, summed over shards
    leave(y_nd)    whole again on the tensor axis
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.moe.exchange.transport import TRANSPORTS, Send
from moejax.moe.mesh_roles import Axes, MeshLayout, index_along

Counts = Int[Array, " w"]


def enter(x_n: Array, mesh_layout: MeshLayout) -> Array:
    """Return the tokens that this device routes, of a tensor group's tokens [n, ..],
    which are whole on all of its devices."""
    schedule = find_schedule(mesh_layout)
    return schedule.copy(split_over(schedule.split(mesh_layout), 0, x_n), mesh_layout)


def leave(y_nd: Array, mesh_layout: MeshLayout) -> Array:
    """Return the results of all tokens, whole on the tensor axis, from the results of
    `enter`'s tokens."""
    schedule = find_schedule(mesh_layout)
    own_nd = schedule.own(y_nd, mesh_layout)
    return gathered_over(schedule.split(mesh_layout), 0, own_nd)


def _keep(value_n: Array, mesh_layout: MeshLayout) -> Array:
    return value_n


class Schedule(NamedTuple):
    """What one schedule does on devices.

    Counts are the real rows of each chunk, as in moejax.moe.exchange.transport. Senders
    are numbered along peers, then shards, the last axis innermost.
    """

    split: Callable[[MeshLayout], Axes]
    """Axes along which `enter` splits tokens, and `leave` gathers them."""
    sources: Callable[[MeshLayout], Axes]
    """Axes along which tokens differ among those whose rows meet on a device."""
    out: Callable[[Array, Counts, Counts, MeshLayout], Array]
    """out(rows_wcd, count_w, incoming_v, ..): chunks for the owners' devices -> chunks
    from all senders [v, c, d]."""
    back: Callable[[Array, Counts, Counts, MeshLayout], Array]
    """back(rows_vcd, incoming_v, count_w, ..): results of the senders' chunks ->
    results of the chunks that `out` got [w, c, d], summed over shards."""
    copy: Callable[[Array, MeshLayout], Array] = _keep
    """The tokens that a device routes, from its own tokens."""
    own: Callable[[Array, MeshLayout], Array] = _keep
    """The values of own tokens, from those of `copy`'s tokens: a sum over `split` then
    counts each token once."""


def _nothing(mesh_layout: MeshLayout) -> Axes:
    return ()


def _tensor(mesh_layout: MeshLayout) -> Axes:
    return mesh_layout.tensor_axes


def _peers(mesh_layout: MeshLayout) -> Axes:
    return mesh_layout.peer_axes


def _senders(mesh_layout: MeshLayout) -> Axes:
    return mesh_layout.peer_axes + mesh_layout.shard_axes


def _senders_beside_tensor(mesh_layout: MeshLayout) -> Axes:
    return tuple(a for a in _senders(mesh_layout) if a not in mesh_layout.tensor_axes)


def _tensor_beside_shards(mesh_layout: MeshLayout) -> Axes:
    """Return the parts of the tensor axis along which no shards lie."""
    shard_axes = mesh_layout.shard_axes
    return tuple(axis for axis in mesh_layout.tensor_axes if axis not in shard_axes)


def _out_to_peers(rows_wcd, count_w, incoming_v, mesh_layout: MeshLayout):
    return _send(mesh_layout)(rows_wcd, count_w, incoming_v, mesh_layout.peer_axes)


def _back_to_peers(rows_vcd, incoming_v, count_w, mesh_layout: MeshLayout):
    return _send(mesh_layout)(rows_vcd, incoming_v, count_w, mesh_layout.peer_axes)


def _base_back(rows_vcd, incoming_v, count_w, mesh_layout: MeshLayout):
    if mesh_layout.shard_axes:
        rows_vcd = jax.lax.psum(rows_vcd, mesh_layout.shard_axes)
    return _send(mesh_layout)(rows_vcd, incoming_v, count_w, mesh_layout.peer_axes)


def _s1_out(rows_wcd, count_w, incoming_v, mesh_layout: MeshLayout):
    shards, (w, c, d) = _num_shards(mesh_layout), rows_wcd.shape
    every_vcd = jnp.broadcast_to(rows_wcd[:, None], (w, shards, c, d))
    every_vcd, count_v = every_vcd.reshape(-1, c, d), jnp.repeat(count_w, shards)
    return _send(mesh_layout)(every_vcd, count_v, incoming_v, _senders(mesh_layout))


def _s1_back(rows_vcd, incoming_v, count_w, mesh_layout: MeshLayout):
    shards, (_, c, d) = _num_shards(mesh_layout), rows_vcd.shape
    count_v = jnp.repeat(count_w, shards)
    along = _senders(mesh_layout)
    parts_vcd = _send(mesh_layout)(rows_vcd, incoming_v, count_v, along)
    wide = jnp.promote_types(parts_vcd.dtype, jnp.float32)
    sum_wcd = jnp.sum(parts_vcd.reshape(-1, shards, c, d), axis=1, dtype=wide)
    return sum_wcd.astype(parts_vcd.dtype)


def _s2_out(rows_wcd, count_w, incoming_v, mesh_layout: MeshLayout):
    window_wcd = split_over(mesh_layout.tensor_axes, 1, rows_wcd)
    return _s1_out(window_wcd, count_w, incoming_v, mesh_layout)


def _s2_back(rows_vcd, incoming_v, count_w, mesh_layout: MeshLayout):
    window_wcd = _s1_back(rows_vcd, incoming_v, count_w, mesh_layout)
    return gathered_over(mesh_layout.tensor_axes, 1, window_wcd)


def _s1h_out(rows_wcd, count_w, incoming_v, mesh_layout: MeshLayout):
    _, c, d = rows_wcd.shape
    incoming_w = _from_this_shard(incoming_v, mesh_layout)
    rows_wcd = _send(mesh_layout)(rows_wcd, count_w, incoming_w, mesh_layout.peer_axes)
    if not mesh_layout.shard_axes:
        return rows_wcd
    rows_wxcd = jax.lax.all_gather(rows_wcd, mesh_layout.shard_axes, axis=1)
    return rows_wxcd.reshape(-1, c, d)


def _s1h_back(rows_vcd, incoming_v, count_w, mesh_layout: MeshLayout):
    if shard_axes := mesh_layout.shard_axes:
        rows_wxcd = rows_vcd.reshape(-1, _num_shards(mesh_layout), *rows_vcd.shape[1:])
        rows_vcd = jax.lax.psum_scatter(rows_wxcd, shard_axes, scatter_dimension=1)
        incoming_v = _from_this_shard(incoming_v, mesh_layout)
    return _send(mesh_layout)(rows_vcd, incoming_v, count_w, mesh_layout.peer_axes)


def _send(mesh_layout: MeshLayout) -> Send:
    return TRANSPORTS[mesh_layout.layout.transport]


def _num_shards(mesh_layout: MeshLayout) -> int:
    return jax.lax.axis_size(mesh_layout.shard_axes) if mesh_layout.shard_axes else 1


def _from_this_shard(count_v, mesh_layout: MeshLayout):
    """Return the counts of the senders with this device's index among shards."""
    count_wx = count_v.reshape(-1, _num_shards(mesh_layout))
    return count_wx[:, index_along(mesh_layout.shard_axes)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def split_over(along: Axes, dim: int, x: Array) -> Array:
    """This device's part of what all devices along these axes have whole.

    Its transpose gathers; that of a plain slice would add up whole arrays that are zero
    but for a part: twice the bytes.
    """
    if not along:
        return x
    size = x.shape[dim] // jax.lax.axis_size(along)
    start = jax.lax.axis_index(along) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)


def _split_forward(along, dim, x):
    return split_over(along, dim, x), None


def _split_backward(along, dim, _, d_part):
    return (gathered_over(along, dim, d_part),)


split_over.defvjp(_split_forward, _split_backward)


def gathered_over(along: Axes, dim: int, part: Array) -> Array:
    """The parts of all devices along these axes, typed as equal on them: its transpose
    is a slice."""
    if not along:
        return part
    return jax.lax.all_gather(part, along, axis=dim, tiled=True, to="invarying")


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def copied_over(x_n: Array, mesh_layout: MeshLayout) -> Array:
    """Tokens of all shards' devices, one after the other: as many copies of each as the
    tensor axis has devices among them. The transpose adds copies up, and sends
    nothing."""
    if not mesh_layout.shard_axes:
        return x_n
    return jax.lax.all_gather(x_n, mesh_layout.shard_axes, tiled=True, to="invarying")


def _copied_forward(x_n, mesh_layout):
    return copied_over(x_n, mesh_layout), None


def _copied_backward(mesh_layout, _, d_every_n):
    if not mesh_layout.shard_axes:
        return (d_every_n,)
    far, copies = _shard_axes(mesh_layout)
    num_copies = jax.lax.axis_size(copies) if copies else 1
    own = d_every_n.shape[0] // jax.lax.axis_size(mesh_layout.shard_axes)
    rest = d_every_n.shape[1:]
    d_blocks = d_every_n.reshape(-1, num_copies, own, *rest).sum(axis=1)
    return (jax.lax.dynamic_index_in_dim(d_blocks, index_along(far), keepdims=False),)


copied_over.defvjp(_copied_forward, _copied_backward)


def _base_own(value_n: Array, mesh_layout: MeshLayout) -> Array:
    """Return the values of own tokens, from those of `copied_over`'s tokens."""
    if not mesh_layout.shard_axes:
        return value_n
    far, copies = _shard_axes(mesh_layout)
    size = jax.lax.axis_size(mesh_layout.shard_axes)
    own = value_n.shape[0] // size
    blocks = value_n.reshape(-1, jax.lax.axis_size(copies) if copies else 1, own,
                             *value_n.shape[1:])  # fmt: skip
    return split_over(far, 0, blocks[:, 0].reshape(-1, *value_n.shape[1:]))


def _shard_axes(mesh_layout: MeshLayout) -> tuple[Axes, Axes]:
    """Return the shards' axes along which tokens differ, and those of copies."""
    shard_axes, tensor_axes = mesh_layout.shard_axes, mesh_layout.tensor_axes
    far = tuple(axis for axis in shard_axes if axis not in tensor_axes)
    return far, tuple(axis for axis in shard_axes if axis in tensor_axes)


SCHEDULES: dict[str | None, Schedule] = {
    None: Schedule(_nothing, _peers, _out_to_peers, _back_to_peers),
    "base": Schedule(
        split=_tensor_beside_shards,
        sources=_peers,
        out=_out_to_peers,
        back=_base_back,
        copy=copied_over,
        own=_base_own,
    ),
    "s1": Schedule(_tensor, _senders, _s1_out, _s1_back),
    "s2": Schedule(_nothing, _senders_beside_tensor, _s2_out, _s2_back),
    "s1h": Schedule(_tensor, _senders, _s1h_out, _s1h_back),
    "local": Schedule(_nothing, _nothing, _out_to_peers, _back_to_peers),
}
"""Schedules by name; None where there is no tensor axis."""


def find_schedule(mesh_layout: MeshLayout) -> Schedule:
    """Return the schedule of a layout."""
    tensor = mesh_layout.layout.tensor
    return SCHEDULES[None if tensor is None else tensor.schedule]
