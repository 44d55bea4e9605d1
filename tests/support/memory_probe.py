"""Print the peak resident memory of a few MoE layer steps: `python memory_probe.py
SKEW`.

The program is a process of its own, so that nothing else is resident. It resets the
recorded peak (clear_refs) after compilation, and prints the peak of the steps after
that, in MiB.
"""

import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.axes import BATCH_AXES, make_mesh, sharding
from moejax.config import Moe, Router
from moejax.moe.layer import MoeLayer
from moejax.moe.setup import LayerSetup
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology

SEQ, WIDTH, HIDDEN, EXPERTS, TOP_K = 128, 128, 128, 32, 2
TOPOLOGY = Topology(expert=8)


def layer_step(exchange: str, batch: int):
    """Return step(params, x, choices) -> gradients, its parameters, and the mesh."""
    mesh = make_mesh(TOPOLOGY)
    moe = Moe(num_experts=EXPERTS, top_k=TOP_K, d_expert=HIDDEN)
    layer = MoeLayer(moe, WIDTH, nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    assignments = batch * SEQ * TOP_K // TOPOLOGY.num_devices
    layout = Layout.home(EXPERTS, TOPOLOGY.expert, assignments, exchange=exchange)

    setup = LayerSetup(moe, Router(), WIDTH, layout, mesh)
    placement = Placement.from_plan(ExpertPlan.home_in(layout, 1), layout).layer(0)

    def loss(params, x_btd, forced_btk):
        layer = nnx.merge(graph, params, rest)
        y_btd, sums = layer(x_btd, placement, setup, forced_btk=forced_btk)
        return jnp.sum(y_btd**2), (jnp.max(sums.rounds), jnp.sum(sums.dropped))

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    return step, jax.device_put(params, sharding(mesh)), mesh


def inputs(mesh, skew: str, batch: int):
    """Return hidden states [b, t, d] and the experts of each token [b, t, k]."""
    rng = np.random.default_rng(0)
    x_btd = rng.normal(size=(batch, SEQ, WIDTH)).astype(np.float32)
    if skew == "uniform":
        score = rng.random((batch, SEQ, EXPERTS))
        choice_btk = np.argsort(score, axis=-1)[..., :TOP_K]
    else:  # every token goes to expert 0 and to one other
        other = rng.integers(1, EXPERTS, (batch, SEQ))
        choice_btk = np.stack([np.zeros_like(other), other], axis=-1)
    arrays = (x_btd, choice_btk.astype(np.int32))
    return jax.device_put(arrays, sharding(mesh, BATCH_AXES))


def main(skew: str, batch: int = 256) -> None:
    """Print the rounds and the peak memory of three steps."""
    step, params, mesh = layer_step("exact", batch)
    args = (params, *inputs(mesh, skew, batch))
    jax.block_until_ready(step(*args))
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        _, (rounds, _) = jax.block_until_ready(step(*args))
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    peak_kib = next(int(x.split()[1]) for x in status if x.startswith("VmHWM"))
    print(f"rounds {int(rounds)} peak_mib {peak_kib / 1024:.1f}")


if __name__ == "__main__":
    main(sys.argv[1])
