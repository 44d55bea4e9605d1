"""Order of the collectives around a layer's experts, where there is a tensor axis.

n tokens of one tensor group, T rows of a full buffer for them, MP the tensor axis (as
Groups.parts), EP the experts' owners, ESP their shards. Elements of one layer's forward
pass, each times the width d:

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

from moejax.moe.exchange.transport import TRANSPORTS
from moejax.moe.mesh_roles import Axes, Groups, index_along
from moejax.plan.layout import Layout

Counts = Int[Array, " w"]


def enter(x_n: Array, layout: Layout, groups: Groups) -> Array:
    """Return the tokens that this device routes, of a tensor group's tokens [n, ..],
    which are whole on all of its devices."""
    schedule = schedule_of(layout)
    return schedule.copy(split_over(schedule.split(groups), 0, x_n), groups)


def leave(y_nd: Array, layout: Layout, groups: Groups) -> Array:
    """Return the results of all tokens, whole on the tensor axis, from the results of
    `enter`'s tokens."""
    schedule = schedule_of(layout)
    return gathered_over(schedule.split(groups), 0, schedule.own(y_nd, groups))


def _keep(value_n: Array, groups: Groups) -> Array:
    return value_n


class Schedule(NamedTuple):
    """What one schedule does on devices.

    Counts are the real rows of each chunk, as in moejax.moe.exchange.transport. Senders
    are numbered along peers, then shards, the last axis innermost.
    """

    split: Callable[[Groups], Axes]
    """Axes along which `enter` splits tokens, and `leave` gathers them."""
    sources: Callable[[Groups], Axes]
    """Axes along which tokens differ among those whose rows meet on a device."""
    out: Callable[[Array, Counts, Counts, Layout, Groups], Array]
    """out(rows_wcd, count_w, incoming_v, ..): chunks for the owners' devices -> chunks
    from all senders [v, c, d]."""
    back: Callable[[Array, Counts, Counts, Layout, Groups], Array]
    """back(rows_vcd, incoming_v, count_w, ..): results of the senders' chunks ->
    results of the chunks that `out` got [w, c, d], summed over shards."""
    copy: Callable[[Array, Groups], Array] = _keep
    """The tokens that a device routes, from its own tokens."""
    own: Callable[[Array, Groups], Array] = _keep
    """The values of own tokens, from those of `copy`'s tokens: a sum over `split` then
    counts each token once."""


def _nothing(groups: Groups) -> Axes:
    return ()


def _parts(groups: Groups) -> Axes:
    return groups.parts


def _peers(groups: Groups) -> Axes:
    return groups.peers


def _peers_and_shards(groups: Groups) -> Axes:
    return groups.peers + groups.shards


def _peers_and_shards_beside_parts(groups: Groups) -> Axes:
    return tuple(a for a in _peers_and_shards(groups) if a not in groups.parts)


def _parts_beside_shards(groups: Groups) -> Axes:
    """The axes of the tensor axis along which no shards lie."""
    return tuple(axis for axis in groups.parts if axis not in groups.shards)


def _out_to_peers(rows_wcd, count_w, incoming_v, layout: Layout, groups: Groups):
    return TRANSPORTS[layout.transport](rows_wcd, count_w, incoming_v, groups.peers)


def _back_to_peers(rows_vcd, incoming_v, count_w, layout: Layout, groups: Groups):
    return TRANSPORTS[layout.transport](rows_vcd, incoming_v, count_w, groups.peers)


def _base_back(rows_vcd, incoming_v, count_w, layout: Layout, groups: Groups):
    if groups.shards:
        rows_vcd = jax.lax.psum(rows_vcd, groups.shards)
    return TRANSPORTS[layout.transport](rows_vcd, incoming_v, count_w, groups.peers)


def _s1_out(rows_wcd, count_w, incoming_v, layout: Layout, groups: Groups):
    shards, (w, c, d) = _num_shards(groups), rows_wcd.shape
    every_vcd = jnp.broadcast_to(rows_wcd[:, None], (w, shards, c, d))
    every_vcd, count_v = every_vcd.reshape(-1, c, d), jnp.repeat(count_w, shards)
    return TRANSPORTS[layout.transport](
        every_vcd, count_v, incoming_v, groups.peers + groups.shards
    )


def _s1_back(rows_vcd, incoming_v, count_w, layout: Layout, groups: Groups):
    shards, (_, c, d) = _num_shards(groups), rows_vcd.shape
    count_v = jnp.repeat(count_w, shards)
    parts_vcd = TRANSPORTS[layout.transport](
        rows_vcd, incoming_v, count_v, groups.peers + groups.shards
    )
    wide = jnp.promote_types(parts_vcd.dtype, jnp.float32)
    sum_wcd = jnp.sum(parts_vcd.reshape(-1, shards, c, d), axis=1, dtype=wide)
    return sum_wcd.astype(parts_vcd.dtype)


def _s2_out(rows_wcd, count_w, incoming_v, layout: Layout, groups: Groups):
    window_wcd = split_over(groups.parts, 1, rows_wcd)
    return _s1_out(window_wcd, count_w, incoming_v, layout, groups)


def _s2_back(rows_vcd, incoming_v, count_w, layout: Layout, groups: Groups):
    window_wcd = _s1_back(rows_vcd, incoming_v, count_w, layout, groups)
    return gathered_over(groups.parts, 1, window_wcd)


def _s1h_out(rows_wcd, count_w, incoming_v, layout: Layout, groups: Groups):
    _, c, d = rows_wcd.shape
    incoming_w = _from_this_shard(incoming_v, groups)
    rows_wcd = TRANSPORTS[layout.transport](rows_wcd, count_w, incoming_w, groups.peers)
    if not groups.shards:
        return rows_wcd
    rows_wxcd = jax.lax.all_gather(rows_wcd, groups.shards, axis=1)
    return rows_wxcd.reshape(-1, c, d)


def _s1h_back(rows_vcd, incoming_v, count_w, layout: Layout, groups: Groups):
    if groups.shards:
        rows_wxcd = rows_vcd.reshape(-1, _num_shards(groups), *rows_vcd.shape[1:])
        rows_vcd = jax.lax.psum_scatter(rows_wxcd, groups.shards, scatter_dimension=1)
        incoming_v = _from_this_shard(incoming_v, groups)
    return TRANSPORTS[layout.transport](rows_vcd, incoming_v, count_w, groups.peers)


def _num_shards(groups: Groups) -> int:
    return jax.lax.axis_size(groups.shards) if groups.shards else 1


def _from_this_shard(count_v, groups: Groups):
    """Return the counts of the senders with this device's index among shards."""
    return count_v.reshape(-1, _num_shards(groups))[:, index_along(groups.shards)]


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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def copied_over(groups: Groups, x_n: Array) -> Array:
    """Tokens of all shards' devices, one after the other: as many copies of each as the
    tensor axis has devices among them. The transpose adds copies up, and sends
    nothing."""
    if not groups.shards:
        return x_n
    return jax.lax.all_gather(x_n, groups.shards, tiled=True, to="invarying")


def _copied_forward(groups, x_n):
    return copied_over(groups, x_n), None


def _copied_backward(groups, _, d_every_n):
    if not groups.shards:
        return (d_every_n,)
    far, copies = _shard_axes(groups)
    num_copies = jax.lax.axis_size(copies) if copies else 1
    own = d_every_n.shape[0] // jax.lax.axis_size(groups.shards)
    rest = d_every_n.shape[1:]
    d_blocks = d_every_n.reshape(-1, num_copies, own, *rest).sum(axis=1)
    return (jax.lax.dynamic_index_in_dim(d_blocks, index_along(far), keepdims=False),)


copied_over.defvjp(_copied_forward, _copied_backward)


def _base_own(value_n: Array, groups: Groups) -> Array:
    """Return the values of own tokens, from those of `copied_over`'s tokens."""
    if not groups.shards:
        return value_n
    far, copies = _shard_axes(groups)
    size = jax.lax.axis_size(groups.shards)
    own = value_n.shape[0] // size
    blocks = value_n.reshape(-1, jax.lax.axis_size(copies) if copies else 1, own,
                             *value_n.shape[1:])  # fmt: skip
    return split_over(far, 0, blocks[:, 0].reshape(-1, *value_n.shape[1:]))


def _shard_axes(groups: Groups) -> tuple[Axes, Axes]:
    """Return the shards' axes along which tokens differ, and those of copies."""
    far = tuple(axis for axis in groups.shards if axis not in groups.parts)
    return far, tuple(axis for axis in groups.shards if axis in groups.parts)


SCHEDULES: dict[str | None, Schedule] = {
    None: Schedule(_nothing, _peers, _out_to_peers, _back_to_peers),
    "base": Schedule(
        split=_parts_beside_shards,
        sources=_peers,
        out=_out_to_peers,
        back=_base_back,
        copy=lambda x_n, groups: copied_over(groups, x_n),
        own=_base_own,
    ),
    "s1": Schedule(_parts, _peers_and_shards, _s1_out, _s1_back),
    "s2": Schedule(_nothing, _peers_and_shards_beside_parts, _s2_out, _s2_back),
    "s1h": Schedule(_parts, _peers_and_shards, _s1h_out, _s1h_back),
    "local": Schedule(_nothing, _nothing, _out_to_peers, _back_to_peers),
}
"""Schedules by name; None where there is no tensor axis."""


def schedule_of(layout: Layout) -> Schedule:
    """Return the schedule of a layout."""
    return SCHEDULES[None if layout.tensor is None else layout.tensor.schedule]
