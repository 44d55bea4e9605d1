"""How rows travel between the devices of a group: one signature.

    send(rows_wcd, count_w, incoming_w, axis) -> rows_wcd

`axis` is the mesh axes along which w devices exchange; () is one device alone.

Chunk w of the argument goes to device w, chunk w of the result came from it. Of each
chunk the first `count_w[w]` rows are real; `incoming_w` is the same of the result,
whose other rows are zero or stale, and must not be read. The way back swaps the
two counts.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.axes import AxisNames

Send = Callable[[Array, Int[Array, " w"], Int[Array, " w"], AxisNames], Array]


def local(rows_wcd, count_w, incoming_w, axis):
    """One device: rows are where they belong."""
    return rows_wcd


def padded(rows_wcd, count_w, incoming_w, axis):
    """lax.all_to_all of whole chunks; runs on every backend."""
    if not axis:
        return rows_wcd
    return jax.lax.all_to_all(rows_wcd, axis, split_axis=0, concat_axis=0, tiled=True)


def hierarchical(rows_wcd, count_w, incoming_w, axis):
    """lax.all_to_all over one axis after the other, the first one (the slowest) first:
    as many bytes on its links, in messages to w / size fewer devices (Tutel,
    arXiv 2206.03382, section 3.3)."""
    sizes = [jax.lax.axis_size(name) for name in axis]
    rows = rows_wcd.reshape(*sizes, *rows_wcd.shape[1:])
    for dim, name in enumerate(axis):
        rows = jax.lax.all_to_all(rows, name, dim, dim, tiled=True)
    return rows.reshape(rows_wcd.shape)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def ragged(rows_wcd, count_w, incoming_w, axis):
    """lax.ragged_all_to_all: only real rows are sent. Not on CPUs."""
    if not axis:
        return rows_wcd
    w, c, d = rows_wcd.shape
    me = jax.lax.axis_index(axis)
    chunk_w = jnp.arange(w, dtype=jnp.int32) * c
    received = jax.lax.ragged_all_to_all(
        rows_wcd.reshape(w * c, d),
        jnp.zeros_like(rows_wcd).reshape(w * c, d),
        chunk_w,
        count_w,
        jnp.full_like(count_w, me * c),
        incoming_w,
        axis_name=axis,
    )
    return received.reshape(w, c, d)


def _ragged_forward(rows_wcd, count_w, incoming_w, axis):
    return ragged(rows_wcd, count_w, incoming_w, axis), (count_w, incoming_w)


def _ragged_backward(axis, counts, d_rows_wcd):
    count_w, incoming_w = counts
    return ragged(d_rows_wcd, incoming_w, count_w, axis), None, None


ragged.defvjp(_ragged_forward, _ragged_backward)

TRANSPORTS: dict[str, Send] = {
    "local": local,
    "padded": padded,
    "ragged": ragged,
    "hierarchical": hierarchical,
}
