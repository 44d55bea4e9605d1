"""One MoE layer with random inputs, and its variants for tools/bench/moe_layer.py.

In array names the letter c is the capacity: rows that one device may send to one
expert.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from moejax.axes import EXPERT
from moejax.config import Moe, Router
from moejax.kernels.cases import TOLERANCES, largest_error
from moejax.moe import reference
from moejax.moe.experts import swiglu
from moejax.moe.layer import MoeLayer, moe_layer
from moejax.moe.route import route
from moejax.moe.setup import LayerSetup, shard
from moejax.moe.types import Routes
from moejax.resolve.layer import set_up

Variant = tuple[Callable[[Any, Array], Array], Any]
"""A function apply(params, x_btd) -> y_btd, and its params."""


class LayerCase(NamedTuple):
    """A layer on its devices, and its input."""

    setup: LayerSetup
    params: dict[str, Array]
    x_btd: Array


def make_case(
    moe: Moe, d: int, tokens: int, dtype: str, devices: Sequence[jax.Device]
) -> LayerCase:
    """Return a layer whose experts are split over devices, each with one sequence of
    `tokens` tokens."""
    mesh = Mesh(np.array(devices), (EXPERT,), axis_types=(AxisType.Auto,))
    router = Router(normalise_gates=moe.top_k > 1)  # one normalised gate is 1
    setup = set_up(moe, mesh, (len(devices), tokens, d), router=router)
    layer = shard(MoeLayer(moe, d, nnx.Rngs(0)), setup)
    x_btd = jax.random.normal(jax.random.key(1), (len(devices), tokens, d), dtype)
    x_btd = jax.device_put(x_btd, setup.batch_sharding)
    return LayerCase(setup, layer.params(), x_btd)


def variants(case: LayerCase, capacity: int) -> dict[str, Variant]:
    """Return the variants of the layer, by name. Only einsum uses `capacity`."""
    setup = case.setup
    placement = setup.place().layer(0)

    def ours(params, x_btd, setup=setup, **options):
        return moe_layer(params, x_btd, placement, setup, **options)[0]

    plain = dataclasses.replace(
        setup, layout=dataclasses.replace(setup.layout, align_rows=1)
    )
    by_xla = partial(ours, setup=plain, experts=partial(swiglu, implementation="xla"))
    return {
        "dense": (partial(_dense, mesh=setup.mesh), _dense_params(setup)),
        "einsum": (partial(_einsum, setup=setup, capacity=capacity), case.params),
        "ragged_dot": (by_xla, case.params),
        "moejax": (ours, case.params),
    }


def check(case: LayerCase) -> dict[str, float]:
    """Return the error of each variant but dense: the largest over the values and
    gradients of the layer, over the largest of a right product in its dtype."""

    def results(apply, params):
        def loss(params, x_btd):
            y_btd = apply(params, x_btd).astype(jnp.float32)
            return (y_btd**2).mean(), y_btd

        step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        return jax.device_get(step(params, case.x_btd))

    capacity = case.x_btd.shape[1]  # nothing is dropped
    with jax.default_matmul_precision("highest"):
        right = jax.tree.leaves(results(partial(_definition, case.setup), case.params))
        others = variants(case, capacity)
        del others["dense"]
        found = {name: jax.tree.leaves(results(*own)) for name, own in others.items()}
    tolerance = TOLERANCES[case.x_btd.dtype]
    return {
        name: max(map(largest_error, own, right)) / tolerance
        for name, own in found.items()
    }


def _definition(setup: LayerSetup, params: dict, x_btd: Array) -> Array:
    """Compute the layer by its definition, all experts on every device."""
    x_nd = x_btd.reshape(-1, setup.d_model).astype(jnp.float32)
    y_nd = reference.moe(x_nd, _route(setup, params, x_nd), params)
    return y_nd.reshape(x_btd.shape)


def _route(setup: LayerSetup, params: dict, x_nd: Array) -> Routes:
    router = params["router_de"], params["bias_e"], setup.router
    return route(x_nd, *router, setup.moe.top_k)[0]


def _dense_params(setup: LayerSetup) -> dict[str, Array]:
    """Return random weights of `dense`, whole on every device."""
    d, width = setup.d_model, setup.moe.d_expert * setup.moe.top_k
    shapes = {"gate_df": (d, width), "up_df": (d, width), "down_fd": (width, d)}
    keys = jax.random.split(jax.random.key(2), len(shapes))
    return {
        name: jax.device_put(
            dims[0] ** -0.5 * jax.random.normal(key, dims), setup.param_sharding()
        )
        for key, (name, dims) in zip(keys, shapes.items())
    }


def _dense(weights: dict, x_btd: Float[Array, "b t d"], mesh: Mesh) -> Array:
    """Compute a SwiGLU of the same FLOPs (width k*f), data parallel."""

    def body(weights, x_btd):
        weights = {name: leaf.astype(x_btd.dtype) for name, leaf in weights.items()}
        x_nd = x_btd.reshape(-1, x_btd.shape[-1])  # XLA:CPU is slower with three dims
        hidden_nf = jax.nn.silu(x_nd @ weights["gate_df"]) * (x_nd @ weights["up_df"])
        return (hidden_nf @ weights["down_fd"]).reshape(x_btd.shape)

    specs = {"in_specs": (P(), P(EXPERT)), "out_specs": P(EXPERT)}
    return jax.shard_map(body, mesh=mesh, **specs)(weights, x_btd)


def _einsum(
    params: dict, x_btd: Float[Array, "b t d"], setup: LayerSetup, capacity: int
) -> Array:
    """Compute the layer by GShard's dispatch (Lepikhin et al. 2020, algorithm 1):
    one-hot masks, one group per device. Choices beyond the capacity are dropped."""

    def body(x_btd, router, experts):
        x_nd = x_btd.reshape(-1, x_btd.shape[-1])
        routes = _route(setup, router, x_nd)
        mask_nec, gate_nec = _masks(routes, setup.moe.num_experts, capacity)
        mask_nec, gate_nec = mask_nec.astype(x_nd.dtype), gate_nec.astype(x_nd.dtype)
        gate_sdf, up_sdf, down_sfd = (w.astype(x_nd.dtype) for w in experts)
        x_ecd = jnp.einsum("nec,nd->ecd", mask_nec, x_nd)
        x_smd = jax.lax.all_to_all(x_ecd, EXPERT, 0, 1, tiled=True)
        hidden_smf = jax.nn.silu(jnp.einsum("smd,sdf->smf", x_smd, gate_sdf))
        hidden_smf = hidden_smf * jnp.einsum("smd,sdf->smf", x_smd, up_sdf)
        y_smd = jnp.einsum("smf,sfd->smd", hidden_smf, down_sfd)
        y_ecd = jax.lax.all_to_all(y_smd, EXPERT, 1, 0, tiled=True)
        return jnp.einsum("nec,ecd->nd", gate_nec, y_ecd).reshape(x_btd.shape)

    router = {name: params[name] for name in ("router_de", "bias_e")}
    experts = [params[name] for name in ("gate_edf", "up_edf", "down_efd")]
    specs = {"in_specs": (P(EXPERT), P(), P(EXPERT)), "out_specs": P(EXPERT)}
    return jax.shard_map(body, mesh=setup.mesh, **specs)(x_btd, router, experts)


def _masks(
    routes: Routes, num_experts: int, capacity: int
) -> tuple[Bool[Array, "n e c"], Float[Array, "n e c"]]:
    """Return which position of which expert's buffer each token takes, and its gate
    there.

    Positions go to first choices first, then by token. Choices after the last position
    are dropped.
    """
    n, k = routes.expert_nk.shape
    chosen_ae = jax.nn.one_hot(routes.expert_nk.T.reshape(-1), num_experts, dtype=int)
    position_a = jnp.sum(jnp.cumsum(chosen_ae, axis=0) * chosen_ae, axis=1) - 1
    position_nk = position_a.reshape(k, n).T
    mask_nec, gate_nec = False, 0.0
    for choice in range(k):  # k fused passes; an array of n * k * e * c is never made
        is_expert_ne = routes.expert_nk[:, choice, None] == jnp.arange(num_experts)
        is_position_nc = position_nk[:, choice, None] == jnp.arange(capacity)
        here_nec = is_expert_ne[:, :, None] & is_position_nc[:, None, :]
        mask_nec = mask_nec | here_nec
        gate_nec += jnp.where(here_nec, routes.gate_nk[:, choice, None, None], 0.0)
    return mask_nec, gate_nec
