"""Migration of master parameters and moments to new owners or to another sharding.

    exchanges(owned_le, new_le, num_devices)   host: rounds of bounded size; after each
                                               one, owners are a valid permutation
    move(arrays, names, rounds, mesh_layout)   device: some of these rounds
    reshard(arrays, names, to, mesh_layout)    device: split by expert <-> by width

In a round a device sends at most one expert and receives at most one. It travels in
slices, as copies do (moejax.moe.weights.stores), arrays of each dtype by themselves. So
a round costs the bytes of two experts per device, and memory for two more, however many
experts have to move.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from moejax import axes
from moejax.axes import AxisNames
from moejax.moe.mesh_roles import MeshLayout, index_along
from moejax.moe.weights.stores import dims as param_dims
from moejax.moe.weights.stores import (
    exchange_copies,
    master_param_spec,
    pick,
    width_dim,
)
from moejax.plan import owner_moves
from moejax.plan.layout import Store

ROUNDS_PER_CALL = 8
"""Number of rounds that one call of `move` does, at most."""


@struct.dataclass
class Rounds:
    """Tables of at most ROUNDS_PER_CALL rounds of exchanges between owners, int32."""

    count: Int[Array, ""]
    """Number of rounds in the tables; the others do nothing."""
    layer_r: Int[Array, " r"]
    """Layer whose experts move."""
    offer_rw: Int[Array, "r w"]
    """Position among its own experts of the one that each device sends, -1 for none."""
    want_rw: Int[Array, "r w"]
    """Device whose expert each device receives, -1 for none."""
    take_re: Int[Array, "r e"]
    """Source of the expert at each position, as an index into the device's own experts
    followed by the received one."""


def exchanges(
    owned_le: np.ndarray, new_le: np.ndarray, num_devices: int
) -> Iterator[Rounds]:
    """Yield the rounds that turn one table of owners into another.

    Each item is for one call of `move`. After every round the owners are a valid
    permutation of the experts.
    """
    rounds = [
        (layer, pairs)
        for layer, (old_e, new_e) in enumerate(zip(owned_le, new_le))
        for pairs in owner_moves.rounds(old_e, new_e, num_devices)
    ]
    for begin in range(0, len(rounds), ROUNDS_PER_CALL):
        part = rounds[begin : begin + ROUNDS_PER_CALL]
        yield _tables(part, owned_le.shape[1], num_devices)


def no_rounds(num_experts: int, num_devices: int) -> Rounds:
    """Return tables in which nothing moves, for their shapes and dtypes."""
    return _tables([], num_experts, num_devices)


def move(
    arrays: list[Array],
    names: list[str],
    rounds: Rounds,
    mesh_layout: MeshLayout,
):
    """Return master parameters or moments [l, e, ..] after the given rounds.

    `names` are the arrays' parameter names. Experts are copied bit for bit.
    """
    specs = [_spec(name, "owned", mesh_layout) for name in names]
    own = arrays[0].shape[1] // axes.axis_size(mesh_layout.mesh, mesh_layout.owner_axes)

    def body(arrays, rounds):
        step = partial(_move_round, rounds, own, mesh_layout.owner_axes)
        return jax.lax.fori_loop(0, rounds.count, step, arrays)

    run = jax.shard_map(
        body, mesh=mesh_layout.mesh, in_specs=(specs, P()), out_specs=specs
    )
    return run(arrays, rounds)


def reshard(
    arrays: list[Array],
    names: list[str],
    to: Store,
    mesh_layout: MeshLayout,
):
    """Return arrays [l, e, ..], in logical order, in the sharding of the store `to`.

    For `to` = 'sharded' they change from a split by expert to one by hidden width; for
    any other store, back.
    """
    by_expert = [_spec(name, "owned", mesh_layout) for name in names]
    by_width = [_spec(name, "sharded", mesh_layout) for name in names]
    is_to_width = to == "sharded"

    def body(arrays):
        dims = [width_dim(param_dims(name)) + 1 for name in names]
        return [
            jax.lax.all_to_all(
                leaf,
                mesh_layout.owner_axes,
                split_axis=dim if is_to_width else 1,
                concat_axis=1 if is_to_width else dim,
                tiled=True,
            )
            for leaf, dim in zip(arrays, dims)
        ]

    before, after = (by_expert, by_width) if is_to_width else (by_width, by_expert)
    run = jax.shard_map(
        body, mesh=mesh_layout.mesh, in_specs=(before,), out_specs=after
    )
    return run(arrays)


def _move_round(
    rounds: Rounds, own: int, group: AxisNames, r, arrays: list[Array]
) -> list[Array]:
    """Return this device's arrays after round `r`; `own` is how many experts it has."""
    me = index_along(group)
    layer, offer_o = rounds.layer_r[r], rounds.offer_rw[r, me][None]
    take_s = jax.lax.dynamic_slice_in_dim(rounds.take_re[r], me * own, own)
    rows = [jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False) for x in arrays]
    offered, want_w1 = [pick(row, offer_o) for row in rows], rounds.want_rw[r][:, None]
    received = _exchange(offered, want_w1, group)
    new = [jnp.concatenate(pair)[take_s] for pair in zip(rows, received)]
    return [
        jax.lax.dynamic_update_index_in_dim(x, row, layer, 0)
        for x, row in zip(arrays, new)
    ]


def _exchange(offered: list[Array], want_w1: Array, group: AxisNames) -> list[Array]:
    """Return `exchange_copies` of arrays of several dtypes, as moments in bfloat16 are:
    those of one dtype travel together, in it."""
    received: dict[int, Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in offered):
        at = [i for i, x in enumerate(offered) if x.dtype == dtype]
        copies = exchange_copies([offered[i] for i in at], want_w1, group)
        received |= zip(at, copies)
    return [received[i] for i in range(len(offered))]


def _spec(name: str, store: Store, mesh_layout: MeshLayout) -> P:
    """Return the PartitionSpec of a stacked parameter, whose layer dim is not split."""
    return P(None, *master_param_spec(param_dims(name), store, mesh_layout))


def _tables(part: list, num_experts: int, num_devices: int) -> Rounds:
    """Return the tables of rounds (layer, pairs of positions that trade experts)."""
    own = num_experts // num_devices
    offer_rw = np.full((ROUNDS_PER_CALL, num_devices), -1, np.int32)
    want_rw = np.full((ROUNDS_PER_CALL, num_devices), -1, np.int32)
    layer_r = np.zeros(ROUNDS_PER_CALL, np.int32)
    stay_e = np.arange(num_experts, dtype=np.int32) % own
    take_re = np.tile(stay_e, (ROUNDS_PER_CALL, 1))
    for r, (layer, pairs) in enumerate(part):
        layer_r[r] = layer
        for i, j in pairs:
            for to, source in ((i, j), (j, i)):
                if to // own == source // own:
                    take_re[r, to] = source % own
                else:
                    offer_rw[r, source // own] = source % own
                    want_rw[r, to // own] = source // own
                    take_re[r, to] = own
    return Rounds(np.int32(len(part)), layer_r, offer_rw, want_rw, take_re)
