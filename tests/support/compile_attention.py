"""Compile two layers of attention by cuDNN, and their gradients, for two H100s, which
need not be here. Each has its own rows.

python -m tests.support.compile_attention TOKENS

It prints the names of cuDNN's calls, and the shapes with two dims of TOKENS.
"""

import functools
import json
import os
import re
import sys

from moejax.perf.target import load
from tools.compiled import wheels


def main(t: int) -> None:
    wheels.put_on_path()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies

    from moejax.kernels.attention import attention

    jax.config.update("jax_enable_compilation_cache", False)
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=load("h100").proto(), topology="1x1x2"
    ).devices
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    sizes = [(4, t, heads, 64) for heads in (4, 2, 2)]
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=rows) for s in sizes]
    first_bt = jax.ShapeDtypeStruct((4, t), jnp.int32, sharding=rows)
    by_cudnn = functools.partial(attention, implementation="cudnn")
    on_rows = jax.shard_map(
        by_cudnn, mesh=mesh, in_specs=(jax.P("data"),) * 4, out_specs=jax.P("data")
    )

    def loss(q, k, v, first_bt):
        layer = lambda x, scale: (on_rows(x * scale, k, v, first_bt), None)  # noqa: E731
        x_bthi, _ = jax.lax.scan(layer, q, q[0, 0, 0, :2])
        return jnp.sum(x_bthi.astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays, first_bt)
    text = lowered.compile().as_text()
    calls = re.findall(r'custom_call_target="(__cudnn[^"]*)"', text)
    shapes = set(re.findall(r"\w+\[([\d,]+)\]", text))
    square = sorted(s for s in shapes if s.split(",").count(str(t)) > 1)
    print(json.dumps({"calls": sorted(calls), "square_arrays": square}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
