"""Test that domains change only where experts are computed.

The members of domains are compared with Algorithm 1 of the paper (HybridEP, arXiv
2510.19470), and the shardings of parameters between domains. Levels are mesh axes, the
slowest first. test_equals_reference.py compares the layer with the reference.
"""

import dataclasses
import itertools
from collections import defaultdict

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.moe.mesh_roles import on_mesh
from moejax.moe.weights.domains import gather_in_domain
from moejax.plan.layout import Topology
from moejax.plan.parallel import Domain
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


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize("sizes", [(2, 4), (4, 4), (3, 2, 4), (6,), (1, 5)])
def test_domains_are_those_of_algorithm_1(sizes):
    """Devices share a domain if at every level their indices have the same quotient by
    the domain's size there, and rows go to the device with the same remainders (section
    4.2). The order of devices is that of the mesh."""
    index_lw = np.indices(sizes).reshape(len(sizes), -1)
    for shared in itertools.product(*map(divisors, sizes)):
        size_l1 = np.array(shared)[:, None]
        domains, offsets = defaultdict(list), defaultdict(set)
        for device, (domain, offset) in enumerate(
            zip((index_lw // size_l1).T.tolist(), (index_lw % size_l1).T.tolist())
        ):
            domains[tuple(domain)].append(device)
            offsets[tuple(offset)].add(device)
        members = Domain(sizes, shared).members()
        assert members == list(domains.values())
        assert [set(same) for same in zip(*members)] == list(offsets.values())


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


@pytest.mark.parametrize("reduce_dtype", ["bfloat16", "float32"])
def test_gradients_are_summed_where_experts_rest(reduce_dtype):
    """A device of a domain of 2 x 2 has the experts of all members, and gets the sum of
    their gradients. It crosses the fast axis first, and the slow one with half the
    elements."""
    fields = {"group": "dc_expert", "domain": (2, 2)}
    layout = make_layout(config(PLAIN, **fields))
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
