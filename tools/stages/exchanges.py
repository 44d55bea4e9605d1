"""Compare one MoE layer under every transport, schedule and store with the same layer
whose rows travel in padded buffers.

    python -m tools.stages.exchanges SETTINGS.json RESULT.json
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

from moejax.config import Dispatch, Moe
from moejax.plan.layout import Topology
from tools.stages.runner import begin_process
from tools.stages.stage import Settings
from train.files import write_whole
from train.messages import one_line

MAX_ERROR = 1e-5
"""Largest ||y - padded|| / ||padded|| in float32: another order of sums."""
MAX_ERROR_TF32 = 2e-3
"""The same on GPUs, whose matrix units round to 10 bits."""
WIDTH, LENGTH, SEQUENCES = 64, 16, 2


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to exchange rows, on a mesh that has the axes that it needs."""

    mesh: str
    """Names of the axes that share the devices: 'expert', 'expert tensor' .."""
    dispatch: dict[str, Any]
    policy: str = "home"
    is_toy: bool = False
    """Whether a dry run tries it too."""


WAYS = {
    "ragged": Way("expert", {"transport": "ragged"}),
    "hierarchical": Way(
        "dc expert", {"group": "dc_expert", "transport": "hierarchical"}, is_toy=True
    ),
    "schedule s1": Way("expert tensor", {"schedule": "s1"}),
    "schedule s1h": Way("expert tensor", {"schedule": "s1h"}),
    "schedule s2": Way("expert tensor", {"schedule": "s2"}),
    "schedule base": Way("expert tensor", {"schedule": "base"}),
    "store transient": Way("expert", {"store": "transient"}, "fastermoe"),
    "store resident": Way("expert", {"store": "resident"}, "flexmoe"),
    "store sharded": Way("expert", {"store": "sharded"}, "eplb"),
}


def main() -> int:
    begin_process()
    settings = Settings.load(pathlib.Path(sys.argv[1]))
    path, found = pathlib.Path(sys.argv[2]), {}
    import jax

    num = jax.device_count()
    expected = run_way(Way("expert", {}), num)
    for name, way in WAYS.items():
        if settings.is_dry and not way.is_toy:
            continue
        found[name] = judge(way, num, expected)
        write_whole(path, json.dumps(found))
    return 0


def judge(way: Way, num: int, expected) -> dict[str, Any]:
    """Return the error of a way, and what is wrong with it, or ''."""
    import jax

    from tools.bench.grouped_dot_cases import relative_error

    allowed = MAX_ERROR if jax.devices()[0].platform == "cpu" else MAX_ERROR_TF32
    try:
        actual = run_way(way, num)
    except Exception as error:  # whatever a collective or a compiler raises
        return {"error": None, "why": f"{type(error).__name__}: {one_line(error, 160)}"}
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    error = max(relative_error(a, b) for a, b in leaves)
    why = "" if error <= allowed else f"error {error:.2g}, at most {allowed:.1g}"
    return {"error": error, "why": why}


def run_way(way: Way, num: int):
    """Return output and gradients of a layer whose rows travel in this way."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from moejax import axes
    from moejax.moe.layer import MoeLayer, moe_layer
    from moejax.moe.setup import shard
    from moejax.resolve.layer import make_plan, set_up

    names = way.mesh.split()
    sizes = {"expert": num} if len(names) == 1 else {names[0]: 2, names[1]: 2}
    if len(names) > 1 and num > 4:
        sizes["expert"] = num // 2
    mesh = axes.make_mesh(Topology(**sizes))
    moe = Moe(num_experts=2 * num, top_k=2, d_expert=32)
    shape = (SEQUENCES * num, LENGTH, WIDTH)
    setup = set_up(moe, mesh, shape, dispatch=Dispatch(**way.dispatch),
                   policy=way.policy)  # fmt: skip
    layer = shard(MoeLayer(moe, WIDTH, nnx.Rngs(0)), setup)
    x_btd = jax.random.normal(jax.random.key(1), shape)
    plan = None
    if way.policy != "home":
        load_e = 1 / np.arange(1, moe.num_experts + 1)
        loads = np.tile(np.round(1000 * load_e), (1, setup.num_batch_shards, 1))
        plan = make_plan(way.policy, loads, setup, dtype="float32")
    placement = (setup.place() if plan is None else setup.place(plan)).layer(0)

    @jax.jit
    def run(params, x_btd):
        def loss(params, x_btd):
            y_btd, _ = moe_layer(params, x_btd, placement, setup)
            return jnp.sum((x_btd + y_btd) ** 2), y_btd

        (_, y_btd), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(
            params, x_btd
        )
        return y_btd, grads

    x_btd = jax.device_put(x_btd, setup.batch_sharding)
    return jax.device_get(run(layer.params(), x_btd))


if __name__ == "__main__":
    sys.exit(main())
