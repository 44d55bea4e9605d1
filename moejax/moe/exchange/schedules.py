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

    enter(x_nd)    the tokens that this device routes
    out(rows)      [w, c, d] for each peer  ->  [v, c, d] from each sender
    home(rows)     back, summed over shards
    leave(y_nd)    whole again on the tensor axis
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.moe.exchange.transport import TRANSPORTS
from moejax.moe.mesh_roles import Axes, Groups, index_along
from moejax.plan.layout import Layout


def enter(x_n: Array, layout: Layout, groups: Groups) -> Array:
    """Of a tensor group's tokens [n, ..], whole on all its devices, those of which this
    device makes rows."""
    x_n = split_over(split_axes(layout, groups), 0, x_n)
    return copied_over(groups, x_n) if _is(layout, "base") else x_n


def mine(value_n: Array, layout: Layout, groups: Groups) -> Array:
    """Of what was made of `enter`'s tokens, that of tokens of this device's own: summed
    over split_axes it counts each token once."""
    if not _is(layout, "base") or not groups.shards:
        return value_n
    far, copies = _shard_axes(groups)
    size = jax.lax.axis_size(groups.shards)
    own = value_n.shape[0] // size
    blocks = value_n.reshape(-1, jax.lax.axis_size(copies) if copies else 1, own,
                             *value_n.shape[1:])  # fmt: skip
    return split_over(far, 0, blocks[:, 0].reshape(-1, *value_n.shape[1:]))


def leave(y_nd: Array, layout: Layout, groups: Groups) -> Array:
    """Results of enter's tokens as results of all tokens, whole on the tensor axis."""
    y_nd = mine(y_nd, layout, groups)
    return gathered_over(split_axes(layout, groups), 0, y_nd)


def split_axes(layout: Layout, groups: Groups) -> Axes:
    """Along which `enter` splits tokens."""
    if layout.tensor is None:
        return ()
    if layout.tensor.schedule in ("s1", "s1h"):
        return groups.parts
    if layout.tensor.schedule == "base":  # duplicates that no shard is there for
        return tuple(axis for axis in groups.parts if axis not in groups.shards)
    return ()


def out(
    rows_wcd: Array,
    count_w: Int[Array, " w"],
    incoming_v: Int[Array, " v"],
    layout: Layout,
    groups: Groups,
) -> Array:
    """Chunks for the owners' devices -> chunks from all senders [v, c, d]. Senders are
    numbered along peers, then shards, the last axis innermost."""
    send = partial(TRANSPORTS[layout.transport], incoming_w=incoming_v)
    shards = jax.lax.axis_size(groups.shards) if groups.shards else 1
    if _is(layout, "s1", "s2"):
        rows_wcd = split_over(_window_axes(layout, groups), 1, rows_wcd)
        w, c, d = rows_wcd.shape
        every_vcd = jnp.broadcast_to(rows_wcd[:, None], (w, shards, c, d))
        every_vcd, count_v = every_vcd.reshape(-1, c, d), jnp.repeat(count_w, shards)
        return send(every_vcd, count_v, axis=groups.peers + groups.shards)
    if not _is(layout, "s1h"):
        return send(rows_wcd, count_w, axis=groups.peers)
    w, c, d = rows_wcd.shape
    incoming_w = _of_this_shard(incoming_v, shards, groups)
    rows_wcd = TRANSPORTS[layout.transport](
        rows_wcd, count_w, incoming_w, axis=groups.peers
    )
    if not groups.shards:
        return rows_wcd
    rows_wxcd = jax.lax.all_gather(rows_wcd, groups.shards, axis=1)
    return rows_wxcd.reshape(-1, c, d)


def home(
    rows_vcd: Array,
    incoming_v: Int[Array, " v"],
    count_w: Int[Array, " w"],
    layout: Layout,
    groups: Groups,
) -> Array:
    """Results of the senders' chunks -> results of the chunks that `out` got [w, c, d],
    summed over the shards of their experts."""
    send, (_, c, d) = TRANSPORTS[layout.transport], rows_vcd.shape
    shards = jax.lax.axis_size(groups.shards) if groups.shards else 1
    if _is(layout, "s1", "s2"):
        along = groups.peers + groups.shards
        count_v = jnp.repeat(count_w, shards)
        parts_vcd = send(rows_vcd, incoming_v, count_v, along)
        wide = jnp.promote_types(parts_vcd.dtype, jnp.float32)
        sum_wcd = jnp.sum(parts_vcd.reshape(-1, shards, c, d), axis=1, dtype=wide)
        windows = _window_axes(layout, groups)
        return gathered_over(windows, 1, sum_wcd.astype(parts_vcd.dtype))
    if _is(layout, "base") and groups.shards:
        rows_vcd = jax.lax.psum(rows_vcd, groups.shards)
    if _is(layout, "s1h") and groups.shards:
        rows_wxcd = rows_vcd.reshape(-1, shards, c, d)
        rows_vcd = jax.lax.psum_scatter(rows_wxcd, groups.shards, scatter_dimension=1)
        incoming_v = _of_this_shard(incoming_v, shards, groups)
    return send(rows_vcd, incoming_v, count_w, groups.peers)


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


def _is(layout: Layout, *schedules: str) -> bool:
    return layout.tensor is not None and layout.tensor.schedule in schedules


def _shard_axes(groups: Groups) -> tuple[Axes, Axes]:
    """Of the shards' axes those along which tokens differ, and those of copies."""
    far = tuple(axis for axis in groups.shards if axis not in groups.parts)
    return far, tuple(axis for axis in groups.shards if axis in groups.parts)


def _window_axes(layout: Layout, groups: Groups) -> Axes:
    return groups.parts if _is(layout, "s2") else ()


def _of_this_shard(count_v, shards: int, groups: Groups):
    """Of counts by sender, those of senders with this device's index among shards."""
    return count_v.reshape(-1, shards)[:, index_along(groups.shards)]
