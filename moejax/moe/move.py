"""Masters and moments on their way: to new owners, or between two ways of lying.

    exchanges(owned_le, new_le, num_devices)   host: bounded rounds, each through a
                                               valid permutation of owners
    move(arrays, rounds, mesh)                 device: some rounds, in place
    reshard(arrays, mesh, to)                  device: by expert <-> by hidden width

A round exchanges positions of one layer in pairs; of two devices each sends the other
at most one expert. So a device sends and receives at most w experts at a time, however
much has to move, and nothing is gathered.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from moejax import axes
from moejax.layout import Store
from moejax.moe.stores import MASTERS, master_spec

ROUNDS_PER_CALL = 8
HIDDEN_DIMS = {"gate_edf": 2, "up_edf": 2, "down_efd": 1}


@struct.dataclass
class Rounds:
    """At most ROUNDS_PER_CALL exchanges of owners, int32."""

    count: Int[Array, ""]
    layer_r: Int[Array, " r"]
    send_rww: Int[Array, "r w w"]
    """Position among the first device's experts of the one that it sends the second."""
    take_re: Int[Array, "r e"]
    """Where each position's expert comes from: (own experts, one of each device)."""


def exchanges(
    owned_le: np.ndarray, new_le: np.ndarray, num_devices: int
) -> Iterator[Rounds]:
    """What turns one table of owners into another; each call of `move` takes one item,
    and the owners are a permutation after every round."""
    rounds = [
        (layer, pairs)
        for layer, (old_e, new_e) in enumerate(zip(owned_le, new_le))
        for pairs in _rounds(old_e, new_e, num_devices)
    ]
    for begin in range(0, len(rounds), ROUNDS_PER_CALL):
        part = rounds[begin : begin + ROUNDS_PER_CALL]
        yield _tables(part, owned_le.shape[1], num_devices)


def no_rounds(num_experts: int, num_devices: int) -> Rounds:
    """Shapes and dtypes; nothing moves."""
    return _tables([], num_experts, num_devices)


def move(arrays: list[Array], names: list[str], rounds: Rounds, mesh: Mesh):
    """Arrays [l, e, ..] of masters or moments (by parameter `names`) after the rounds.
    Rows are copied, bit for bit."""
    specs = [_spec(name, "owned") for name in names]
    own = arrays[0].shape[1] // mesh.shape[axes.EXPERT]

    def body(arrays, rounds):
        return jax.lax.fori_loop(0, rounds.count, partial(_one, rounds, own), arrays)

    return jax.shard_map(body, mesh=mesh, in_specs=(specs, P()), out_specs=specs)(
        arrays, rounds
    )


def reshard(arrays: list[Array], names: list[str], mesh: Mesh, to: Store):
    """Arrays [l, e, ..] in logical order as `to` wants them, from the other way."""
    by_expert = [_spec(name, "owned") for name in names]
    by_width = [_spec(name, "sharded") for name in names]
    is_widening = to == "sharded"

    def body(arrays):
        dims = [HIDDEN_DIMS[name] + 1 for name in names]
        return [
            jax.lax.all_to_all(
                leaf,
                axes.EXPERT,
                split_axis=dim if is_widening else 1,
                concat_axis=1 if is_widening else dim,
                tiled=True,
            )
            for leaf, dim in zip(arrays, dims)
        ]

    before, after = (by_expert, by_width) if is_widening else (by_width, by_expert)
    return jax.shard_map(body, mesh=mesh, in_specs=(before,), out_specs=after)(arrays)


def _one(rounds: Rounds, own: int, r, arrays: list[Array]) -> list[Array]:
    me = jax.lax.axis_index(axes.EXPERT)
    layer, send_w = rounds.layer_r[r], rounds.send_rww[r, me]
    take_s = jax.lax.dynamic_slice_in_dim(rounds.take_re[r], me * own, own)

    def moved(leaf):
        row_sx = jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
        sent_wx = row_sx[jnp.maximum(send_w, 0)]
        arrived_wx = jax.lax.all_to_all(sent_wx, axes.EXPERT, 0, 0, tiled=True)
        new_sx = jnp.concatenate([row_sx, arrived_wx])[take_s]
        return jax.lax.dynamic_update_index_in_dim(leaf, new_sx, layer, 0)

    return [moved(leaf) for leaf in arrays]


def _spec(name: str, store: Store) -> P:
    """Of a stacked parameter; the layer dim is never split."""
    split = [axes.EXPERT, None, None]
    split[HIDDEN_DIMS[name]] = axes.DATA
    return P(None, *master_spec(tuple(split), store))


def _rounds(old_e: np.ndarray, new_e: np.ndarray, num_devices: int):
    """Pairs of positions to exchange, round by round: in a round each position and each
    pair of devices occurs at most once."""
    now_e, own = old_e.copy(), len(old_e) // num_devices
    at_e = np.argsort(now_e)
    rounds: list[list[tuple[int, int]]] = []
    earliest_e = np.zeros(len(old_e), int)
    busy: set[tuple[int, int, int]] = set()
    for i, expert in enumerate(new_e):
        j = at_e[expert]
        if i == j:
            continue
        at_e[now_e[i]], at_e[expert] = j, i
        now_e[i], now_e[j] = now_e[j], now_e[i]
        pair = tuple(sorted((i // own, j // own)))
        r = max(earliest_e[i], earliest_e[j])
        while (r, *pair) in busy:
            r += 1
        if pair[0] != pair[1]:  # within a device nothing travels
            busy.add((r, *pair))
        earliest_e[i] = earliest_e[j] = r + 1
        while len(rounds) <= r:
            rounds.append([])
        rounds[r].append((i, int(j)))
    return rounds


def _tables(part: list, num_experts: int, num_devices: int) -> Rounds:
    own = num_experts // num_devices
    layer_r = np.zeros(ROUNDS_PER_CALL, np.int32)
    send_rww = np.full((ROUNDS_PER_CALL, num_devices, num_devices), -1, np.int32)
    stay_e = np.arange(num_experts, dtype=np.int32) % own
    take_re = np.tile(stay_e, (ROUNDS_PER_CALL, 1))
    for r, (layer, pairs) in enumerate(part):
        layer_r[r] = layer
        for i, j in pairs:
            for to, source in ((i, j), (j, i)):
                to_device, from_device = to // own, source // own
                if to_device == from_device:
                    take_re[r, to] = source % own
                else:
                    send_rww[r, from_device, to_device] = source % own
                    take_re[r, to] = own + from_device
    return Rounds(np.int32(len(part)), layer_r, send_rww, take_re)


assert set(HIDDEN_DIMS) == set(MASTERS)
