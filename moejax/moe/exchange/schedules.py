"""Schedules: the order of the collectives around a layer's experts, with a tensor axis.

Notation: n tokens of one tensor group, T rows of a full buffer for them; MP the tensor
axis, EP the experts' owners, ESP the experts' shards. The table counts the elements
that one layer's forward pass sends, each times the width d:

    base    gather x over ESP              n ESP           DeepSpeed-MoE
            send rows and results, EP      2 x T ESP       (arXiv 2201.05596)
            sum over ESP                   T ESP
    s1      split x over MP                                Parm
            send rows and results by one                   (arXiv 2407.00599)
              all_to_all over EP x ESP     2 x T ESP / MP
            gather y over MP               n
    s2      split the buffer over MP                       Parm
            send rows and results, EP x ESP    2 x T ESP / MP
            gather the buffer over MP      T
    s1h     split x over MP                                FSMoE's order
            send rows and results, EP      2 x T / MP      (arXiv 2501.10714)
            gather rows over ESP,
              scatter their sums           2 x T ESP / MP
            gather y over MP               n
    local   experts along MP, sum y over MP    n           PPMoE (arXiv 2304.11414)

The backward pass sends as much again. The transpose of the split is then the gather
over MP, and the transpose of the gather in 'base' is free if ESP is MP.

All schedules compute the same function, up to the order of sums, unless a capacity
drops rows: 's1' and 's1h' drop within their part of the tokens, and in 'base' copies of
a token take room from one another.

A layer calls `enter` before it routes, and `leave` after the last results are back.
Dispatch and combine call the schedule's `out` and `back` for each window.

    enter(x_nd)    the tokens that this device routes
    out(rows)      [w, c, d] for each peer  ->  [v, c, d] from each sender
    back(rows)     the reverse of `out`, summed over shards
    leave(y_nd)    results of all tokens, whole on the tensor axis
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
    """Return the tokens that this device routes. `x_n` has the tokens of its tensor
    group [n, ..], which every device of the group holds whole."""
    schedule = find_schedule(mesh_layout)
    return schedule.copy(split_over(schedule.split(mesh_layout), 0, x_n), mesh_layout)


def leave(y_nd: Array, mesh_layout: MeshLayout) -> Array:
    """Gather the results of all tokens of a tensor group, whole on each of its devices.
    `y_nd` has the results of the tokens that `enter` returned."""
    schedule = find_schedule(mesh_layout)
    own_nd = schedule.own(y_nd, mesh_layout)
    return gather_over(schedule.split(mesh_layout), 0, own_nd)


def _keep(value_n: Array, mesh_layout: MeshLayout) -> Array:
    """Return the argument, for schedules that copy no tokens."""
    return value_n


class Schedule(NamedTuple):
    """Functions and mesh axes that define one schedule on devices.

    Counts are the numbers of real rows in each chunk, as in
    moejax.moe.exchange.transport. Senders are numbered along peers, then shards, the
    last axis innermost.
    """

    split: Callable[[MeshLayout], Axes]
    """Axes along which `enter` splits tokens, and `leave` gathers them."""
    sources: Callable[[MeshLayout], Axes]
    """Axes of the devices that send rows to one device, as far as their tokens
    differ."""
    out: Callable[[Array, Counts, Counts, MeshLayout], Array]
    """Function out(rows_wcd, count_w, incoming_v, mesh_layout) that sends the chunks
    for the owners' devices and returns the chunks from all senders [v, c, d]."""
    back: Callable[[Array, Counts, Counts, MeshLayout], Array]
    """Function back(rows_vcd, incoming_v, count_w, mesh_layout) that sends results to
    the senders and returns those of the chunks that `out` sent [w, c, d], summed over
    shards."""
    copy: Callable[[Array, MeshLayout], Array] = _keep
    """Function from a device's own tokens to the tokens that it routes. In 'base' these
    include other devices' tokens."""
    own: Callable[[Array, MeshLayout], Array] = _keep
    """Function from the values of all tokens that `copy` returned to those of the
    device's own tokens. A sum over `split` then counts each token once."""


def _no_axes(mesh_layout: MeshLayout) -> Axes:
    return ()


def _tensor_axes(mesh_layout: MeshLayout) -> Axes:
    return mesh_layout.tensor_axes


def _peer_axes(mesh_layout: MeshLayout) -> Axes:
    return mesh_layout.peer_axes


def _sender_axes(mesh_layout: MeshLayout) -> Axes:
    return mesh_layout.peer_axes + mesh_layout.shard_axes


def _sender_axes_without_tensor(mesh_layout: MeshLayout) -> Axes:
    tensor_axes = mesh_layout.tensor_axes
    return tuple(a for a in _sender_axes(mesh_layout) if a not in tensor_axes)


def _tensor_axes_without_shards(mesh_layout: MeshLayout) -> Axes:
    """Return the parts of the tensor axis along which experts have no shards."""
    shard_axes = mesh_layout.shard_axes
    return tuple(axis for axis in mesh_layout.tensor_axes if axis not in shard_axes)


def _out_to_peers(rows_wcd, count_w, incoming_v, mesh_layout: MeshLayout):
    """Send chunks to the peers, as they are."""
    return _send(mesh_layout)(rows_wcd, count_w, incoming_v, mesh_layout.peer_axes)


def _back_to_peers(rows_vcd, incoming_v, count_w, mesh_layout: MeshLayout):
    """Send results back to the peers, as they are."""
    return _send(mesh_layout)(rows_vcd, incoming_v, count_w, mesh_layout.peer_axes)


def _base_back(rows_vcd, incoming_v, count_w, mesh_layout: MeshLayout):
    """Sum results over shards, then send them back to the peers."""
    if mesh_layout.shard_axes:
        rows_vcd = jax.lax.psum(rows_vcd, mesh_layout.shard_axes)
    return _send(mesh_layout)(rows_vcd, incoming_v, count_w, mesh_layout.peer_axes)


def _s1_out(rows_wcd, count_w, incoming_v, mesh_layout: MeshLayout):
    """Send each chunk to all shards of its owner, by one exchange."""
    shards, (w, c, d) = _num_shards(mesh_layout), rows_wcd.shape
    every_vcd = jnp.broadcast_to(rows_wcd[:, None], (w, shards, c, d))
    every_vcd, count_v = every_vcd.reshape(-1, c, d), jnp.repeat(count_w, shards)
    return _send(mesh_layout)(every_vcd, count_v, incoming_v, _sender_axes(mesh_layout))


def _s1_back(rows_vcd, incoming_v, count_w, mesh_layout: MeshLayout):
    """Send the results of all shards back by one exchange. The receiver sums them over
    shards."""
    shards, (_, c, d) = _num_shards(mesh_layout), rows_vcd.shape
    count_v = jnp.repeat(count_w, shards)
    sender_axes = _sender_axes(mesh_layout)
    parts_vcd = _send(mesh_layout)(rows_vcd, incoming_v, count_v, sender_axes)
    wide = jnp.promote_types(parts_vcd.dtype, jnp.float32)
    sum_wcd = jnp.sum(parts_vcd.reshape(-1, shards, c, d), axis=1, dtype=wide)
    return sum_wcd.astype(parts_vcd.dtype)


def _s2_out(rows_wcd, count_w, incoming_v, mesh_layout: MeshLayout):
    """Send this device's part of each chunk to all shards of its owner."""
    window_wcd = split_over(mesh_layout.tensor_axes, 1, rows_wcd)
    return _s1_out(window_wcd, count_w, incoming_v, mesh_layout)


def _s2_back(rows_vcd, incoming_v, count_w, mesh_layout: MeshLayout):
    """Send results back as `_s1_back` does, and gather the parts of the buffer."""
    window_wcd = _s1_back(rows_vcd, incoming_v, count_w, mesh_layout)
    return gather_over(mesh_layout.tensor_axes, 1, window_wcd)


def _s1h_out(rows_wcd, count_w, incoming_v, mesh_layout: MeshLayout):
    """Send chunks to those devices of the owners that have this device's shard index,
    then gather the arrived chunks over shards."""
    _, c, d = rows_wcd.shape
    incoming_w = _from_this_shard(incoming_v, mesh_layout)
    rows_wcd = _send(mesh_layout)(rows_wcd, count_w, incoming_w, mesh_layout.peer_axes)
    if not mesh_layout.shard_axes:
        return rows_wcd
    rows_wxcd = jax.lax.all_gather(rows_wcd, mesh_layout.shard_axes, axis=1)
    return rows_wxcd.reshape(-1, c, d)


def _s1h_back(rows_vcd, incoming_v, count_w, mesh_layout: MeshLayout):
    """Reduce-scatter results over shards, then send them back to the peers."""
    if shard_axes := mesh_layout.shard_axes:
        rows_wxcd = rows_vcd.reshape(-1, _num_shards(mesh_layout), *rows_vcd.shape[1:])
        rows_vcd = jax.lax.psum_scatter(rows_wxcd, shard_axes, scatter_dimension=1)
        incoming_v = _from_this_shard(incoming_v, mesh_layout)
    return _send(mesh_layout)(rows_vcd, incoming_v, count_w, mesh_layout.peer_axes)


def _send(mesh_layout: MeshLayout) -> Send:
    """Return the function that moves chunks of rows, by the layout's transport."""
    return TRANSPORTS[mesh_layout.layout.transport]


def _num_shards(mesh_layout: MeshLayout) -> int:
    return jax.lax.axis_size(mesh_layout.shard_axes) if mesh_layout.shard_axes else 1


def _from_this_shard(count_v, mesh_layout: MeshLayout):
    """Select the counts of the senders that have this device's shard index."""
    count_wx = count_v.reshape(-1, _num_shards(mesh_layout))
    return count_wx[:, index_along(mesh_layout.shard_axes)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def split_over(along: Axes, dim: int, x: Array) -> Array:
    """Return this device's part of an array that all devices along these axes have.

    The transpose is a gather. The transpose of a plain slice would sum whole arrays
    that are zero outside of one part, which sends twice the bytes.
    """
    if not along:
        return x
    size = x.shape[dim] // jax.lax.axis_size(along)
    start = jax.lax.axis_index(along) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)


def _split_forward(along, dim, x):
    return split_over(along, dim, x), None


def _split_backward(along, dim, _, d_part):
    return (gather_over(along, dim, d_part),)


split_over.defvjp(_split_forward, _split_backward)


def gather_over(along: Axes, dim: int, part: Array) -> Array:
    """Gather the parts of all devices along these axes.

    The result is typed as equal on these devices, so the transpose is a slice.
    """
    if not along:
        return part
    return jax.lax.all_gather(part, along, axis=dim, tiled=True, to="invarying")


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_over_shards(x_n: Array, mesh_layout: MeshLayout) -> Array:
    """Gather the tokens of all shards' devices, one device after the other.

    Each token occurs once for each device of the tensor axis among these. The transpose
    adds up these copies, and sends nothing.
    """
    if not mesh_layout.shard_axes:
        return x_n
    return jax.lax.all_gather(x_n, mesh_layout.shard_axes, tiled=True, to="invarying")


def _copy_forward(x_n, mesh_layout):
    return copy_over_shards(x_n, mesh_layout), None


def _copy_backward(mesh_layout, _, d_every_n):
    if not mesh_layout.shard_axes:
        return (d_every_n,)
    far, copies = _shard_axes(mesh_layout)
    num_copies = jax.lax.axis_size(copies) if copies else 1
    own = d_every_n.shape[0] // jax.lax.axis_size(mesh_layout.shard_axes)
    rest = d_every_n.shape[1:]
    d_blocks = d_every_n.reshape(-1, num_copies, own, *rest).sum(axis=1)
    return (jax.lax.dynamic_index_in_dim(d_blocks, index_along(far), keepdims=False),)


copy_over_shards.defvjp(_copy_forward, _copy_backward)


def _base_own(value_n: Array, mesh_layout: MeshLayout) -> Array:
    """Return the values of this device's own tokens, from those of the tokens that
    `copy_over_shards` returned."""
    if not mesh_layout.shard_axes:
        return value_n
    far, copies = _shard_axes(mesh_layout)
    size = jax.lax.axis_size(mesh_layout.shard_axes)
    own = value_n.shape[0] // size
    blocks = value_n.reshape(-1, jax.lax.axis_size(copies) if copies else 1, own,
                             *value_n.shape[1:])  # fmt: skip
    return split_over(far, 0, blocks[:, 0].reshape(-1, *value_n.shape[1:]))


def _shard_axes(mesh_layout: MeshLayout) -> tuple[Axes, Axes]:
    """Return the shards' axes along which tokens differ, and those along which tokens
    are copies of one another."""
    shard_axes, tensor_axes = mesh_layout.shard_axes, mesh_layout.tensor_axes
    far = tuple(axis for axis in shard_axes if axis not in tensor_axes)
    return far, tuple(axis for axis in shard_axes if axis in tensor_axes)


SCHEDULES: dict[str | None, Schedule] = {
    None: Schedule(_no_axes, _peer_axes, _out_to_peers, _back_to_peers),
    "base": Schedule(
        split=_tensor_axes_without_shards,
        sources=_peer_axes,
        out=_out_to_peers,
        back=_base_back,
        copy=copy_over_shards,
        own=_base_own,
    ),
    "s1": Schedule(_tensor_axes, _sender_axes, _s1_out, _s1_back),
    "s2": Schedule(_no_axes, _sender_axes_without_tensor, _s2_out, _s2_back),
    "s1h": Schedule(_tensor_axes, _sender_axes, _s1h_out, _s1h_back),
    "local": Schedule(_no_axes, _no_axes, _out_to_peers, _back_to_peers),
}
"""Schedules by name; the one named None is for layers without a tensor axis. The sum of
'local' over the tensor axis is in `combine`."""


def find_schedule(mesh_layout: MeshLayout) -> Schedule:
    """Return the schedule of a layout."""
    tensor = mesh_layout.layout.tensor
    return SCHEDULES[None if tensor is None else tensor.schedule]
