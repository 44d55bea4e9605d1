"""The manifest of one exchange alone, without the layer around it."""

import jax
from jax.sharding import PartitionSpec as P

from moejax.axes import BATCH_AXES
from moejax.kernels import varying_alike
from moejax.moe.exchange.manifest import manifest
from moejax.moe.mesh_roles import on_mesh
from moejax.plan.layout import Layout, Topology
from tests.support.layers import build_mesh


def make_manifest(topology: Topology, layout: Layout, tell):
    """Return run(expert_nk, placement), which makes the manifest of these choices, and
    returns `tell(sent, placement)` of each device, along a leading dim."""
    mesh = build_mesh(topology)
    mesh_layout = on_mesh(mesh, layout).exchanged

    def body(expert_nk, placement):
        told = tell(*manifest(expert_nk, placement, mesh_layout))
        return jax.tree.map(lambda leaf: varying_alike(leaf, expert_nk)[0][None], told)

    spec = P(BATCH_AXES)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec, P()), out_specs=spec))
