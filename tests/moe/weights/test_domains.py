"""Test that domains change only where experts are computed.

The members of domains are compared with Algorithm 1 of the paper (HybridEP, arXiv
2510.19470), and the shardings of parameters between domains. Levels are mesh axes, the
slowest first. test_equals_reference.py compares the layer with the reference.
"""

import dataclasses
import itertools
import math
from collections import Counter

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.config import Model
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.weights.domains import gather_in_domain
from moejax.plan.layout import Layout, Topology
from moejax.plan.parallel import Domain, Tensor
from moejax.resolve.resolved import resolve
from tests.support.layers import build_mesh, config
from tests.support.primitives import equations
from tests.support.resolved import make_layout
from tests.support.steps import SMALL
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state

PLAIN = Topology(dc=2, expert=4)
DATA = Topology(dc=2, data=2, expert=2)
TENSOR = Topology(dc=2, expert=2, tensor=2)


def domain_config(mesh: Topology, shared: tuple[int, int], **changes):
    """Return a configuration with a domain and with small buffers, so that later rounds
    run between domains."""
    return config(mesh, group="dc_expert", domain=shared, rows_per_peer=4, **changes)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


SIZES = [(2, 4), (4, 4), (3, 2, 4), (6,), (1, 5)]


def level_indices(device: int, sizes) -> tuple[int, ...]:
    """Return a device's index at each level (location renumbering, section 4.2)."""
    index = []
    for size in sizes[::-1]:
        index.append(device % size)
        device //= size
    return tuple(index[::-1])


def links(sizes, shared) -> list[dict[str, set]]:
    """Return the ordered pairs of devices that communicate, by level and kind.

    Algorithm 1 wants equal indices at later levels. As printed it does not want equal
    indices at earlier levels, without which level 1 would gather across data centres.
    """
    devices = range(math.prod(sizes))
    pairs = [{"gather": set(), "rows": set()} for _ in sizes]
    for m, n in itertools.permutations(devices, 2):
        x, y = level_indices(m, sizes), level_indices(n, sizes)
        for level, size in enumerate(shared):
            if x[level + 1 :] != y[level + 1 :] or x[:level] != y[:level]:
                continue
            (domain_x, offset_x), (domain_y, offset_y) = (
                divmod(z[level], size) for z in (x, y)
            )
            if domain_x == domain_y and offset_x != offset_y:
                pairs[level]["gather"].add((m, n))
            if domain_x != domain_y and offset_x == offset_y:
                pairs[level]["rows"].add((m, n))
    return pairs


def count_ways(device: int, kind: str, pairs) -> Counter:
    """Return in how many ways each device is reached from `device`, with at most one
    link of this kind at each level."""
    ways = Counter([device])
    for level in pairs:
        steps = Counter(ways)
        for m, n in level[kind]:
            steps[n] += ways[m]
        ways = +steps
    return ways


@pytest.mark.parametrize("sizes", SIZES)
def test_domains_are_those_of_algorithm_1(sizes):
    """Experts reach all devices of a domain; rows reach the devices with the same index
    in every domain. A row and its expert meet at exactly one device. Each pair of
    devices has at most one link, and the number of links is that of Table VII."""
    num_devices = math.prod(sizes)
    for shared in itertools.product(*map(divisors, sizes)):
        pairs, members = links(sizes, shared), Domain(sizes, shared).members()
        rows, experts = (
            [count_ways(device, kind, pairs) for device in range(num_devices)]
            for kind in ("rows", "gather")
        )
        for domain in members:
            assert domain == sorted(domain)
            assert all(experts[device] == Counter(domain) for device in domain)
        for same in zip(*members):
            assert all(rows[device] == Counter(same) for device in same)
        assert sorted(itertools.chain(*members)) == list(range(num_devices))
        kinds = [kind for level in pairs for kind in level.values()]
        assert len(set().union(*kinds)) == sum(map(len, kinds))
        for level, size, s in zip(pairs, sizes, shared):
            assert len(level["gather"]) == num_devices * (s - 1)
            assert len(level["rows"]) == num_devices * (size // s - 1)
        for source, owner in itertools.product(range(num_devices), repeat=2):
            meetings = rows[source] & experts[owner]
            assert sum(meetings.values()) == 1


@pytest.mark.parametrize("mesh", [DATA, TENSOR])
def test_owners_and_shardings_are_the_same_for_every_domain(mesh):
    """Owners and the shardings of the whole state, moments included, do not depend on
    the domain."""
    dispatch = dataclasses.replace(SMALL.dispatch, group="dc_expert")
    states = []
    for shared in itertools.product(divisors(mesh.dc), divisors(mesh.expert)):
        cfg = dataclasses.replace(
            SMALL,
            mesh=mesh,
            dispatch=dataclasses.replace(dispatch, domain=shared),
        )
        optimizer = make_optimizer(cfg.optimizer, cfg.train.num_steps)
        run = resolve(cfg, build_mesh(mesh))
        state = abstract_state(run, optimizer)
        owned_le = run.home_plan().owned_le
        states.append((owned_le.tolist(), jax.tree.map(lambda x: x.sharding, state)))
    assert all(state == states[0] for state in states)


OWNED = {"num_experts": 8, "slots_per_device": 1, "rows_per_peer": 8}
DC_EXPERT = {"axes": ("dc", "expert"), "num_devices": 8, **OWNED}


def init(cfg) -> None:
    """Make the abstract state of a run, which checks its configuration."""
    optimizer = make_optimizer(cfg.optimizer, cfg.train.num_steps)
    abstract_state(resolve(cfg, build_mesh(cfg.mesh)), optimizer)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: domain_config(PLAIN, (2, 3)), ["(2, 3)", "divisor", "use (2, 1)"]),
        (lambda: domain_config(PLAIN, (0, 1)), ["(0, 1)", "divisor"]),
        (lambda: config(PLAIN, domain=(2, 1)),
         ["(2, 1)", "dc axis", "dc_expert", "(1, 1)"]),
        (lambda: config(Topology(data=2, expert=4), group="data_expert",
             domain=(1, 2)),
         ["domain=(1, 2)", "use Dispatch.group", "not 'data_expert'"]),
        (lambda: Layout(**DC_EXPERT | {"slots_per_device": 2},
             domain=Domain((2, 4), (2, 1)), store="sharded"),
         ["domain=(2, 1)", "store='owned'", "'sharded'"]),
        (lambda: Layout(**DC_EXPERT, domain=Domain((2, 4), (2, 1)),
             tensor=Tensor("s1", 2, 1)),
         ["domain=(2, 1)", "(2)", "expert_shards=1: use 2"]),
        (lambda: config(PLAIN, compression=8.0),
         ["Dispatch.compression=8.0", "domain is (1, 1)", "compression=None"]),
        (lambda: domain_config(PLAIN, (2, 2), compression=0.5),
         ["Dispatch.compression=0.5", "at least 1"]),
        (lambda: init(domain_config(PLAIN, (2, 2), compression=5000.0)),
         ["one entry in each", "use at most ratio="]),
        (lambda: Domain((2, 4), (2, 1), compression=0.0),
         ["compression=0.0", "at least 1"]),
        (lambda: config(PLAIN, schedule="s1"), ["'s1'", "leave Dispatch.schedule out"]),
        (lambda: config(Topology(expert=4), schedule="local", expert_shards=2),
         ["'local'", "use 's1h', or Mesh.tensor = 2"]),
        (lambda: config(Topology(expert=4, tensor=2), expert_shards=3),
         ["expert_shards=3", "tensor axis (2)", "use 2"]),
        (lambda: config(Topology(expert=2, tensor=2), expert_shards=8),
         ["expert_shards=8", "expert axis (2)", "times a divisor of 2"]),
        (lambda: config(Topology(expert=4, tensor=2), d_expert=15),
         ["d_expert=15", "divisible by expert_shards=2"]),
        (lambda: config(TENSOR, group="dc_expert", schedule="local"),
         ["'local'", "use Dispatch.group='expert'", "not 'dc_expert'"]),
        (lambda: make_layout(
             config(Topology(expert=4, tensor=2), schedule="local", store="sharded")),
         ["'local'", "store='owned'", "'sharded'"]),
        (lambda: Tensor("s3", 2, 2), ["'s3' is none of base, s1, s2, s1h, local"]),
        (lambda: Layout(4, 2, 2, 9, tensor=Tensor("s2", 2, 2)),
         ["rows_per_peer=9", "into 2 parts", "use a multiple"]),
        (lambda: Layout(4, 2, 2, 8, tensor=Tensor("s1", 2, 2), transport="ragged"),
         ["transport='ragged' works with schedule='s1h' only", "'s1'"]),
        (lambda: Layout(4, 2, 2, 8, transport="hierarchical"),
         ["transport='hierarchical'", "the expert axis", "use Dispatch.group"]),
        (lambda: make_layout(dataclasses.replace(
             config(Topology(expert=8, tensor=4), 8, schedule="s1h"),
             mesh=Topology(expert=8, tensor=16),
             model=Model(num_heads=16, num_kv_heads=16),
         )),
         ["8 tokens", "Mesh.tensor=16", "use a batch"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make, words):
    with pytest.raises(ValueError) as error:
        make()
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reduce_dtype", ["bfloat16", "float32"])
def test_gradients_are_summed_where_experts_rest(reduce_dtype):
    """A device of a domain of 2 x 2 has the experts of all members, and gets the sum of
    their gradients. It crosses the fast axis first, and the slow one with half the
    elements."""
    layout = make_layout(domain_config(PLAIN, (2, 2)))
    mesh_layout = on_mesh(build_mesh(PLAIN), layout)
    random, spec = np.random.default_rng(0), P(mesh_layout.owner_axes)
    # Small integers: all sums are exact in bfloat16.
    own_wsx, d_every_wsx = (
        random.integers(-8, 9, (8, n, 6)).astype(ml_dtypes.bfloat16) for n in (2, 8)
    )

    def body(own_sx, d_every_sx):
        args = mesh_layout, reduce_dtype
        every, pull = jax.vjp(lambda x: gather_in_domain({"x": x}, *args), own_sx)
        return every["x"], pull({"x": d_every_sx})[0]

    run = jax.shard_map(body, mesh=mesh_layout.mesh, in_specs=spec, out_specs=spec)
    args = [x.reshape(-1, 6) for x in (own_wsx, d_every_wsx)]
    every_wsx, grad_wsx = (np.asarray(x).reshape(8, -1, 6) for x in jax.jit(run)(*args))
    for members in layout.domain.members():
        gathered_sx = np.concatenate([own_wsx[w] for w in members])
        grad_vsx = d_every_wsx[np.array(members)].astype(int).sum(0).reshape(4, 2, 6)
        for w, expected_sx in zip(members, grad_vsx, strict=True):
            np.testing.assert_array_equal(every_wsx[w], gathered_sx)
            np.testing.assert_array_equal(grad_wsx[w].astype(int), expected_sx)

    kinds = {"bfloat16": "all_to_all", "float32": "reduce_scatter"}
    sent = [
        (eqn.primitive.name, eqn.invars[0].aval.size, eqn.invars[0].aval.dtype)
        for eqn, _ in equations(jax.make_jaxpr(run)(*args))
        if eqn.primitive.name in kinds.values()
    ]
    assert sent == [(kinds[reduce_dtype], n * 6, reduce_dtype) for n in (8, 4)]
