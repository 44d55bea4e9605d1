"""Transports: ways to send rows between the devices of a group, with one signature.

    send(rows_wcd, count_w, incoming_w, axis) -> rows_wcd

`axis` is the mesh axes along which w devices exchange rows; () is one device alone.

Chunk w of the argument goes to device w; chunk w of the result came from device w. The
first `count_w[w]` rows of chunk w of the argument are real, and the first
`incoming_w[w]` rows of chunk w of the result. The other rows of the result are zero or
stale and must not be read. To send results back, swap the two counts.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.axes import AxisNames

Send = Callable[[Array, Int[Array, " w"], Int[Array, " w"], AxisNames], Array]
"""Signature of a transport."""


def local(rows_wcd, count_w, incoming_w, axis):
    """Return the rows as they are, for a group of one device."""
    return rows_wcd


def padded(rows_wcd, count_w, incoming_w, axis):
    """Send whole chunks by lax.all_to_all. Runs on every backend."""
    if not axis:
        return rows_wcd
    return jax.lax.all_to_all(rows_wcd, axis, split_axis=0, concat_axis=0, tiled=True)


def hierarchical(rows_wcd, count_w, incoming_w, axis):
    """Send whole chunks by one lax.all_to_all per axis, the slowest axis first.

    The links of the slow axis carry the same number of bytes as with `padded`, but in
    fewer and larger messages: one per index along that axis instead of one per device
    (Tutel, arXiv 2206.03382, section 3.3).
    """
    sizes = [jax.lax.axis_size(name) for name in axis]
    rows = rows_wcd.reshape(*sizes, *rows_wcd.shape[1:])
    for dim, name in enumerate(axis):
        rows = jax.lax.all_to_all(rows, name, dim, dim, tiled=True)
    return rows.reshape(rows_wcd.shape)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def ragged(rows_wcd, count_w, incoming_w, axis):
    """Send only the real rows, by lax.ragged_all_to_all. Does not run on CPUs."""
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
"""Transports by name."""
