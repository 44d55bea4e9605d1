"""A bit flipped in one replica of any leaf is found, on every kind of mesh; honest
states, and leaves that exist once, are not reported."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from moejax.axes import make_mesh, sharding, split
from moejax.plan.layout import Topology
from moejax.resolve.resolved import resolve
from tests.support.flips import flip, flip_leaf
from tests.support.steps import DELTA, STORES, TENSOR, TWO_DCS, configure
from train.checkpoint.checksum import named_leaves
from train.replicas.shards import Difference, ReplicaCheck, coverage
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state

CASES = {
    "data": (Topology(data=4, expert=2), {}),
    "dc and tensor": (Topology(dc=2, expert=2, tensor=2), {}),
    "shards": (TENSOR, {"schedule": "s1h", "expert_shards": 1}),
    "compressed domain": (TWO_DCS, DELTA),
    "sharded": (Topology(data=2, expert=4), STORES["sharded"]),
}
"""Meshes and fields of Dispatch. Experts of shards and domains lie on meshes with axes
cut in two."""


def make_abstract(mesh: Topology, **dispatch):
    """Return the abstract state of a small model, and its mesh."""
    cfg = configure(mesh=mesh, dispatch=dispatch)
    run = resolve(cfg, make_mesh(cfg.mesh))
    adamw = make_optimizer(cfg.optimizer, cfg.train.num_steps)
    return abstract_state(run, adamw, run.layout.store), run.mesh


def fill(abstract):
    """Return a state of random bits with the shapes and shardings of an abstract
    one."""
    rng = np.random.default_rng(0)

    def random(leaf):
        num_bytes = leaf.dtype.itemsize * int(np.prod(leaf.shape))
        x = np.frombuffer(rng.bytes(num_bytes), leaf.dtype).reshape(leaf.shape)
        return jax.device_put(x, leaf.sharding)

    return jax.tree.map(random, abstract)


def found(check: ReplicaCheck, state) -> list[Difference]:
    return check.differences(np.asarray(check.sums(state)))


def by_definition(leaf) -> dict[tuple, list[int]]:
    """Return the devices that hold each shard of an array, by the shard's place."""
    position = {d: i for i, d in enumerate(leaf.sharding.mesh.devices.flat)}
    holders: dict[tuple, list[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        where = tuple(s.indices(n) for s, n in zip(index, leaf.shape))
        holders.setdefault(where, []).append(position[device])
    return holders


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_flip_in_any_replicated_leaf_is_found(case):
    """It is found at the right devices."""
    topology, fields = CASES[case]
    abstract, mesh = make_abstract(topology, **fields)
    state, check, rng = (
        fill(abstract),
        ReplicaCheck(abstract, mesh),
        np.random.default_rng(1),
    )
    assert found(check, state) == []
    replicated = coverage(abstract).compared
    assert any(name.endswith("router_de") for name in replicated)
    for name, leaf in named_leaves(state).items():
        holders = by_definition(leaf)
        num_replicas = {len(devices) for devices in holders.values()}
        assert (num_replicas != {1}) == (name in replicated), name
        device = int(rng.integers(mesh.size))
        bit = 29 if name.endswith("router_de") else 20
        differences = found(check, flip_leaf(state, name, device, bit))
        if name not in replicated:
            assert differences == []
            continue
        [difference] = differences
        assert difference.leaf == name
        assert sorted(difference.devices) in map(sorted, holders.values())
        assert device in difference.devices
        if len(difference.devices) > 2:
            assert difference.wrong == (device,)
        else:
            assert difference.wrong == ()


def test_every_bit_of_every_dtype():
    mesh = make_mesh(Topology(data=2, expert=4))
    dtypes = (jnp.float32, jnp.bfloat16, jnp.uint32, jnp.int8)
    abstract = [
        jax.ShapeDtypeStruct((5, 3), dtype, sharding=sharding(mesh)) for dtype in dtypes
    ]
    check, state = ReplicaCheck(abstract, mesh), fill(abstract)
    for i, leaf in enumerate(state):
        for bit in range(8 * leaf.dtype.itemsize):
            flipped = [*state[:i], flip(leaf, bit % 8, bit, bit % 15), *state[i + 1 :]]
            [difference] = found(check, flipped)
            assert (difference.leaf, difference.wrong) == (str(i), (bit % 8,))


def test_several_flips_and_ties():
    """A majority names every device outside it; a tie and two replicas name none."""
    mesh = make_mesh(Topology(dc=2, data=2, expert=2))
    x = jax.device_put(np.arange(8.0), sharding(mesh))
    pair = jax.device_put(np.arange(8.0), sharding(mesh, ("data", "expert")))
    state = {"pair": pair, "x": x}
    check = ReplicaCheck(state, mesh)
    two = state | {"x": flip(flip(x, 3, 20), 6, 21)}
    assert [d.wrong for d in found(check, two)] == [(3, 6)]
    for device in range(4):
        x = flip(x, device, 20)
    assert [d.wrong for d in found(check, state | {"x": x})] == [()]
    both = state | {"pair": flip(flip(pair, 5, 0), 2, 3)}
    differences = found(check, both)
    assert [(d.leaf, d.devices) for d in differences] == [
        ("pair", (1, 5)),
        ("pair", (2, 6)),
    ]
    assert [d.wrong for d in differences] == [(), ()]


def test_leaves_that_exist_once_are_listed_and_cost_nothing():
    mesh = make_mesh(Topology(data=2, expert=4))
    refined = split(mesh, {"expert": 2})
    state = {
        "once": jax.device_put(np.zeros(8), sharding(mesh, ("data", "expert"))),
        "refined": jax.device_put(
            np.zeros((2, 2), np.int8),
            sharding(refined, "expert_outer", "expert_inner"),
        ),
    }
    assert coverage(state).compared == {"refined": 1}
    assert coverage(state).single == {"once": 4}
    assert str(coverage(state)).startswith("1 leaves (0.0 MiB per device) on several")
    alone = {"once": state["once"]}
    assert ReplicaCheck(alone, mesh).sums(alone) is None
    one = make_mesh(Topology(), jax.devices()[:1])
    single = {"x": jax.device_put(np.zeros(8), sharding(one))}
    assert coverage(single).compared == {}


def test_sums_are_whole_on_every_device_and_need_no_copy():
    mesh = make_mesh(Topology(dc=2, expert=4))
    x = jax.device_put(np.zeros((4096, 1024), np.float32), sharding(mesh, "expert"))
    check = ReplicaCheck([x], mesh)
    table_wn = check.sums([x])
    assert table_wn.sharding.spec == P()
    assert (table_wn.shape, table_wn.dtype) == ((8, 1), jnp.uint32)
    memory = check.program.memory_analysis()
    assert memory.argument_size_in_bytes >= x.nbytes // 4
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes / 4


def test_a_state_may_be_donated_at_once():
    """The comparison reads the bits that were there when it was dispatched."""
    mesh = make_mesh(Topology(data=2, expert=4))
    change = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(np.ones(2**20, np.float32), sharding(mesh))
    check = ReplicaCheck([x], mesh)
    x = flip(x, 3, 20)
    tables = []
    for _ in range(5):
        tables.append(check.sums([x]))
        x = change(x)
    for table in tables:
        assert [d.wrong for d in check.differences(np.asarray(table))] == [(3,)]


def test_names_of_optimizer_state_are_compared_too():
    mesh = make_mesh(Topology(data=2, expert=4))
    params = {"w": jax.device_put(np.ones(8, np.float32), sharding(mesh))}
    state = {"params": params, "opt": optax.adam(1e-3).init(params)}
    state = jax.device_put(state, sharding(mesh))
    check = ReplicaCheck(state, mesh)
    for name in ("mu/w", "nu/w", "count"):
        [difference] = found(check, flip_leaf(state, name, 4, 1))
        assert difference.leaf.endswith(name)
        assert difference.wrong == (4,)
