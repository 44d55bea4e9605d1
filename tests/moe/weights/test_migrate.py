"""Test the moves of float32 master parameters and moments between owners.

A move equals a permutation in NumPy bit for bit, and runs in bounded rounds. Resharding
from experts to hidden width and back changes no value.
"""

import functools
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.axes import everywhere, make_mesh
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.weights.migrate import (
    ROUNDS_PER_CALL,
    Rounds,
    exchanges,
    move,
    reshard,
)
from moejax.moe.weights.stores import EXPERT_PARAMS
from moejax.plan.groups import GROUP_AXES
from moejax.plan.layout import Layout, Topology
from tests.support.close import are_same_bits
from tests.support.random_plans import random_owners

L, E, WIDTH, HIDDEN, TOPOLOGY = 12, 16, 4, 16, Topology(data=2, expert=4)
NAMES = [*EXPERT_PARAMS, *EXPERT_PARAMS]  # parameters, and moments of the same shapes
GROUPS = {"expert": 4, "data_expert": 8}
"""Groups of owners, and their numbers of devices. The group 'expert' has the axis data
beside it, over which the hidden width is split."""


def by_expert(group: str) -> dict[str, P]:
    """Return the specs of parameters that rest with their owners."""
    if group == "data_expert":
        return dict.fromkeys(EXPERT_PARAMS, P(None, ("data", "expert")))
    wide = P(None, "expert", None, "data")
    return dict.fromkeys(EXPERT_PARAMS, wide) | {"down_efd": P(None, "expert", "data")}


BY_WIDTH = {
    "gate_edf": P(None, None, None, ("data", "expert")),
    "up_edf": P(None, None, None, ("data", "expert")),
    "down_efd": P(None, None, ("data", "expert"), None),
}


def arrays() -> list[np.ndarray]:
    """Return float32 arrays of random bits, which include infinities and NaNs."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys(EXPERT_PARAMS, (L, E, WIDTH, HIDDEN))
    shapes["down_efd"] = (L, E, HIDDEN, WIDTH)
    raw = [rng.integers(0, 2**32, shapes[name], dtype=np.uint32) for name in NAMES]
    return [bits.view(np.float32) for bits in raw]


def on_devices(mesh, leaves, specs):
    """Return arrays placed on the mesh, sharded by `specs`."""
    shardings = [NamedSharding(mesh, specs[name]) for name in NAMES]
    return jax.device_put(leaves, shardings)


def are_sharded(leaves, specs) -> bool:
    """Return whether arrays are sharded by `specs`."""
    shardings = [NamedSharding(leaves[0].sharding.mesh, specs[name]) for name in NAMES]
    return all(x.sharding.is_equivalent_to(s, 4) for x, s in zip(leaves, shardings))


def owners(seed: int, num_experts: int = E, num_layers: int = L) -> np.ndarray:
    """Return random owners, as experts in the order of owners, int32 [l, e]."""
    return random_owners(np.random.default_rng(seed), num_experts, num_layers)


@functools.cache
def programs(group: str):
    """Return the mesh, and the traced and the compiled move and reshards."""
    mesh = make_mesh(TOPOLOGY)
    layout = Layout.home(E, GROUPS[group], 8, axes=GROUP_AXES[group])
    mesh_layout = on_mesh(mesh, layout)
    leaves = on_devices(mesh, arrays(), by_expert(group))
    rounds = next(exchanges(owners(0), owners(1), GROUPS[group]))
    to = {
        store: jax.jit(
            functools.partial(reshard, names=NAMES, to=store, mesh_layout=mesh_layout)
        )
        for store in ("sharded", "owned")
    }
    run = jax.jit(
        lambda *args: move(args[0], NAMES, args[1], mesh_layout), donate_argnums=0
    )
    traced = {
        "move": run.trace(leaves, everywhere(rounds, mesh)),
        "sharded": to["sharded"].trace(leaves),
        "owned": to["owned"].trace(on_devices(mesh, arrays(), BY_WIDTH)),
    }
    return mesh, traced, {name: t.lower().compile() for name, t in traced.items()}


def after_each_round(owned_le: np.ndarray, rounds: Rounds, num_devices: int):
    """Yield the owners after each round, computed from the tables of the round.

    In each round a device sends at most one expert and takes at most one.
    """
    owned_le = owned_le.copy()
    own = owned_le.shape[1] // num_devices
    for r in range(rounds.count):
        layer = rounds.layer_r[r]
        before_we = owned_le[layer].reshape(num_devices, own)
        after_we = before_we.copy()
        for device in range(num_devices):
            source = rounds.want_rw[r, device]
            have = before_we[device]
            if source >= 0:
                assert rounds.offer_rw[r, source] >= 0
                have = np.r_[have, before_we[source, rounds.offer_rw[r, source]]]
            after_we[device] = have[
                rounds.take_re[r, device * own : (device + 1) * own]
            ]
        owned_le[layer] = after_we.reshape(-1)
        yield owned_le


@pytest.mark.parametrize(
    ("num_experts", "num_devices"), [(12, 4), (8, 8), (16, 2), (64, 16), (5, 1)]
)
def test_owners_are_a_permutation_after_every_round(num_experts, num_devices):
    for seed in range(4):
        old_le, new_le = (owners(2 * seed + i, num_experts) for i in (0, 1))
        owned_le = old_le
        for rounds in exchanges(old_le, new_le, num_devices):
            assert 1 <= rounds.count <= ROUNDS_PER_CALL
            for now_le in after_each_round(owned_le, rounds, num_devices):
                assert (np.sort(now_le, axis=1) == np.arange(num_experts)).all()
                owned_le = now_le
        assert np.array_equal(owned_le, new_le)
        assert not list(exchanges(old_le, old_le, num_devices))


@pytest.mark.parametrize("group", GROUPS)
def test_move_is_the_permutation_of_all_arrays(group):
    """Moves of many rounds and several calls equal permutations that differ between
    layers, and undo them."""
    mesh, _, compiled = programs(group)
    layer_l1, old_le = np.arange(L)[:, None], owners(5)
    logical = arrays()
    leaves = [leaf[layer_l1, old_le] for leaf in logical]
    leaves = on_devices(mesh, leaves, by_expert(group))
    for new_le in (owners(6), old_le):
        calls = list(exchanges(old_le, new_le, GROUPS[group]))
        assert len(calls) > 1
        for rounds in calls:
            leaves = compiled["move"](leaves, everywhere(rounds, mesh))
        assert are_same_bits(leaves, [leaf[layer_l1, new_le] for leaf in logical])
        assert are_sharded(leaves, by_expert(group))
        old_le = new_le


def test_moments_in_bfloat16_move_beside_float32_parameters():
    """Bits stay as they are, and a bfloat16 travels as 2 bytes. (Programs for CPUs
    change NaNs of bfloat16 into other NaNs.)"""
    mesh, layer_l1 = make_mesh(TOPOLOGY), np.arange(L)[:, None]
    mesh_layout = on_mesh(mesh, Layout.home(E, GROUPS["expert"], 8))
    half = len(NAMES) // 2
    rng = np.random.default_rng(1)
    logical = arrays()[:half] + [
        rng.standard_normal(leaf.shape).astype(ml_dtypes.bfloat16)
        for leaf in arrays()[half:]
    ]
    old_le, new_le = owners(5), owners(6)
    leaves = [leaf[layer_l1, old_le] for leaf in logical]
    leaves = on_devices(mesh, leaves, by_expert("expert"))
    run = jax.jit(lambda leaves, rounds: move(leaves, NAMES, rounds, mesh_layout))
    calls = list(exchanges(old_le, new_le, GROUPS["expert"]))
    traced = run.trace(leaves, everywhere(calls[0], mesh))
    for rounds in calls:
        leaves = run(leaves, everywhere(rounds, mesh))
    for leaf, expected in zip(jax.device_get(leaves), logical):
        bits = f"u{leaf.dtype.itemsize}"
        np.testing.assert_array_equal(
            leaf.view(bits), expected[layer_l1, new_le].view(bits)
        )
    sent = re.findall(r"all_to_all.*-> tensor<\S*x(\w+)>", traced.lower().as_text())
    assert sorted(sent) == ["bf16"] * 2 + ["f32"] * 2


@pytest.mark.parametrize("group", GROUPS)
def test_reshard_changes_where_values_lie_and_none_of_them(group):
    mesh, _, compiled = programs(group)
    wide = compiled["sharded"](on_devices(mesh, arrays(), by_expert(group)))
    assert are_same_bits(wide, arrays())
    assert are_sharded(wide, BY_WIDTH)
    back = compiled["owned"](wide)
    assert are_same_bits(back, arrays())
    assert are_sharded(back, by_expert(group))


@pytest.mark.parametrize("name", ["move", "sharded", "owned"])
def test_nothing_is_gathered(name):
    """Programs compiled for the CPU and lowered for CUDA have no collective but
    all-to-all.

    A move scatters and gathers slices of all arrays at once, with two exchanges. A
    change of store exchanges each array.
    """
    _, traced, compiled = programs("expert")
    collective = r"= \S.* (all-[a-z-]+|reduce-scatter|collective-[a-z-]+)\("
    kinds = re.findall(collective, compiled[name].as_text())
    assert set(kinds) == {"all-to-all"}
    text = traced[name].lower(lowering_platforms=("cuda",)).as_text()
    kinds = re.findall(r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)", text)
    assert kinds == ["all_to_all"] * (2 if name == "move" else len(NAMES))


def test_a_move_needs_little_memory():
    """Arrays are updated in place, and temporary memory is less than a third of the
    state."""
    memory = programs("expert")[2]["move"].memory_analysis()
    state_bytes = sum(leaf.nbytes for leaf in arrays()) // TOPOLOGY.num_devices
    assert memory.alias_size_in_bytes == state_bytes
    assert memory.temp_size_in_bytes < state_bytes / 3
