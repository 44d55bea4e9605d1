"""A domain of 2 x 2 devices (dc, expert) whose experts are compressed. The data axis is
no part of it."""

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
    mesh = make_mesh(Topology(dc=2, data=2, expert=2))
    run = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(run)


def weights(seed, num=ALL, size=SIZE):
    return np.random.default_rng(seed).normal(size=(num, size)).astype(np.float32)
