"""Sizes, weights and a mesh for tests of experts that are compressed in a domain.

The domain has 2 x 2 devices on the axes (dc, expert). The data axis is not part of it.
"""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from moejax.axes import make_mesh
from moejax.plan.layout import Topology

DOMAIN, OWN, SIZE, BLOCKS = ("dc", "expert"), 3, 48, 4
MEMBERS = 4
ALL = OWN * MEMBERS
ROWS = P(("dc", "data", "expert"))
COMMUNICATION = ["float8_e5m2", "bfloat16", "float32"]


def on_devices(body, in_specs, out_specs):
    """Return a jitted function that runs `body` on each of the eight devices."""
    mesh = make_mesh(Topology(dc=2, data=2, expert=2))
    run = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(run)


def weights(seed, num=ALL, size=SIZE):
    """Return random weights of `num` experts, float32 [num, size]."""
    return np.random.default_rng(seed).normal(size=(num, size)).astype(np.float32)
