"""A bit flipped in one replica of any leaf is found and named, on every kind of mesh;
honest runs, and leaves that exist once, are not reported. A run that finds a flip saves
nothing after it, and goes on from the checkpoint before it."""

import contextlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.axes import make_mesh, sharding, split
from moejax.plan.layout import Topology
from moejax.resolve.resolved import resolve
from tests.support.flips import flip, flip_leaf
from tests.support.steps import DELTA, TENSOR, TWO_DCS, configure
from tests.support.watched_run import (
    assert_same_run,
    run_here,
    watched,
)
from train.balance.balancing import Balancing
from train.checkpoint.checksum import named_leaves
from train.replicas import Difference, ReplicaCheck, ReplicasDiffer, coverage
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state

CASES = {
    "data": (Topology(data=4, expert=2), {}),
    "shards": (TENSOR, {"schedule": "s1h", "expert_shards": 1}),
    "compressed domain": (TWO_DCS, DELTA),
}
"""Meshes and fields of Dispatch. Experts of shards and domains lie on meshes with axes
cut in two."""
OFTEN = "Train.check_replicas_every_steps = 4"
SHORT = ("Train.num_steps = 16", "Checkpoint.every_steps = 7", OFTEN)
MOE = "params/cycles/blocks/0/moe"


def found(check: ReplicaCheck, state) -> list[Difference]:
    return check.differences(np.asarray(check.sums(state)))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_flip_in_any_replicated_leaf_is_found(case):
    """Random bits stand in every leaf of a state, moments and counters included. The
    devices of a replica are those that jax says, and a majority names the wrong one."""
    topology, dispatch = CASES[case]
    cfg, rng = configure(mesh=topology, dispatch=dispatch), np.random.default_rng(0)
    run = resolve(cfg, make_mesh(cfg.mesh))
    adamw = make_optimizer(cfg.optimizer, cfg.train.num_steps)
    abstract = abstract_state(run, adamw, run.layout.store)

    def random(leaf):
        x = rng.bytes(leaf.dtype.itemsize * int(np.prod(leaf.shape)))
        x = np.frombuffer(x, leaf.dtype).reshape(leaf.shape)
        return jax.device_put(x, leaf.sharding)

    state, check = jax.tree.map(random, abstract), ReplicaCheck(abstract, run.mesh)
    assert found(check, state) == []
    replicated = coverage(abstract).compared
    assert any(name.endswith("router_de") for name in replicated)
    for name, leaf in named_leaves(state).items():
        position = {d: i for i, d in enumerate(leaf.sharding.mesh.devices.flat)}
        holders: dict[tuple, list[int]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            where = tuple(s.indices(n) for s, n in zip(index, leaf.shape))
            holders.setdefault(where, []).append(position[device])
        assert ({len(x) for x in holders.values()} != {1}) == (name in replicated), name
        device = int(rng.integers(run.mesh.size))
        bit = 29 if name.endswith("router_de") else 20
        differences = found(check, flip_leaf(state, name, device, bit))
        if name not in replicated:
            assert differences == []
            continue
        [difference] = differences
        assert difference.leaf == name
        assert sorted(difference.devices) in map(sorted, holders.values())
        assert device in difference.devices
        is_majority = len(difference.devices) > 2
        assert difference.wrong == ((device,) if is_majority else ())


def test_every_bit_of_every_dtype():
    mesh = make_mesh(Topology(data=2, expert=4))
    state = [
        jax.device_put(np.ones((5, 3), dtype), sharding(mesh))
        for dtype in (jnp.float32, jnp.bfloat16, jnp.uint32, jnp.int8)
    ]
    check = ReplicaCheck(state, mesh)
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
    expected = [("pair", (1, 5), ()), ("pair", (2, 6), ())]
    assert [(d.leaf, d.devices, d.wrong) for d in differences] == expected


def test_leaves_that_exist_once_are_listed_and_cost_nothing():
    mesh = make_mesh(Topology(data=2, expert=4))
    refined = split(mesh, {"expert": 2})
    axes = "expert_outer", "expert_inner"
    state = {
        "once": jax.device_put(np.zeros(8), sharding(mesh, ("data", "expert"))),
        "refined": jax.device_put(np.zeros((2, 2), np.int8), sharding(refined, *axes)),
    }
    assert coverage(state).compared == {"refined": 1}
    assert coverage(state).single == {"once": 4}
    alone = {"once": state["once"]}
    assert ReplicaCheck(alone, mesh).sums(alone) is None


def test_sums_are_whole_on_every_device():
    """The state may be donated at once: the sums are of the bits at the time of the
    call."""
    mesh = make_mesh(Topology(data=2, expert=4))
    x = jax.device_put(np.ones((4096, 1024), np.float32), sharding(mesh, "expert"))
    check = ReplicaCheck([x], mesh)
    table_wn = check.sums([x])
    assert table_wn.sharding.spec == P()
    assert (table_wn.shape, table_wn.dtype) == ((8, 1), jnp.uint32)
    change, tables = jax.jit(lambda x: x + 1, donate_argnums=0), []
    x = flip(x, 3, 20)
    for _ in range(5):
        tables.append(check.sums([x]))
        x = change(x)
    for table in tables:
        assert [3 in d.devices for d in check.differences(np.asarray(table))] == [True]


@pytest.fixture(scope="module")
def house():
    """Programs that the runs below share."""
    with watched() as house:
        yield house


@contextlib.contextmanager
def flipping(step: int, *flip):
    """Have runs flip a bit before a step: of a leaf, on a device."""
    before = Balancing.before

    def flipped(self, next_step, state):
        state = before(self, next_step, state)
        return flip_leaf(state, *flip) if next_step == step else state

    with mock.patch.object(Balancing, "before", flipped):
        yield


def ended(house, run_dir, *params: str, flips: tuple) -> str:
    """Run until replicas differ, and return the line that says so."""
    with flipping(*flips), pytest.raises(ReplicasDiffer) as error:
        run_here(house, run_dir, *params)
    return str(error.value)


def saved(run_dir) -> list[int]:
    names = [path.name for path in (run_dir / "checkpoints").iterdir()]
    return sorted(map(int, filter(str.isdecimal, names)))


@pytest.mark.slow
def test_a_run_that_finds_a_flip_names_it_and_goes_on_from_before(house, tmp_path):
    """The new start ends as an undisturbed run does. Without comparisons nothing is
    found."""
    flips, run_dir = (10, f"{MOE}/router_de", 6, 29), tmp_path / "run"
    line = ended(house, run_dir, *SHORT, flips=flips)
    words = (
        rf"after step 12: {MOE}/router_de.* is wrong on device 6 \(process 0, data=1, "
        r"expert=2\): the 7 other replicas agree; they were equal after step 8; start "
        "again to go on from checkpoint 7, "
    )
    assert re.match("REPLICAS DIFFER " + words, line), line
    assert saved(run_dir) == [7]
    runs = [run_here(house, tmp_path / name, *SHORT) for name in ("run", "other")]
    assert_same_run(*(done.run_dir for done in runs))
    params = (*SHORT, "Train.check_replicas_every_steps = 0", "Train.num_steps = 9")
    with flipping(3, "key", 3, 0):
        run_here(house, tmp_path / "none", *params)
    assert saved(tmp_path / "none") == [7, 9]


@pytest.mark.slow
def test_a_flip_is_found_before_a_save(house, tmp_path):
    line = ended(house, tmp_path / "run", *SHORT, flips=(6, "key", 3, 0))
    words = r"after step 7: key is wrong on device 3 \(.*; there is no checkpoint, "
    assert re.match("REPLICAS DIFFER " + words, line), line
    assert saved(tmp_path / "run") == []
