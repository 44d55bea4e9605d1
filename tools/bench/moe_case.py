"""One MoE layer with inputs of a chosen skew, and the implementations that compute
it."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from moejax import axes
from moejax.balance.policies.micromoe.symmetric import symmetric
from moejax.config import Dispatch, Moe, Recorded, Router
from moejax.moe import recorded, reference, route
from moejax.moe.experts import swiglu
from moejax.moe.layer import MoeLayer
from moejax.moe.setup import LayerSetup
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from tools.bench import moe_baselines

Variant = tuple[Callable[[Any, Array], Array], Any]
"""A function apply(params, x_btd) -> y_btd, and its params."""


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer and the skew of its loads."""

    d: int
    f: int
    tokens: int
    """Tokens per device, in one sequence."""
    experts: int
    top_k: int
    devices: int
    skew: Literal["uniform", "zipf"]
    dtype: str

    def __post_init__(self) -> None:
        for field in ("d", "f", "tokens", "experts", "top_k", "devices"):
            if getattr(self, field) < 1:
                raise ValueError(f"--{field} {getattr(self, field)} must be at least 1")
        if self.top_k > self.experts or self.experts > self.d:
            raise ValueError(
                f"--top_k {self.top_k} <= --experts {self.experts} <= --d {self.d} "
                "must hold: inputs are made so that the router distinguishes experts"
            )

    @property
    def moe(self) -> Moe:
        return Moe(num_experts=self.experts, top_k=self.top_k, d_expert=self.f)

    @property
    def router(self) -> Router:
        """The router of the layer."""
        return Router(normalise_gates=self.top_k > 1)  # one normalised gate is 1

    @property
    def layout(self) -> Layout:
        """The default layout of a run: buffers of 1.5 times the even share."""
        factor = Dispatch().buffer_factor
        choices = self.tokens * self.top_k
        return Layout.home(self.experts, self.devices, choices, buffer_factor=factor)


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """A layer, its inputs, and the loads that its router makes of them."""

    shape: LayerShape
    mesh: Mesh
    graph: Any
    params: Any
    rest: Any
    x_btd: Array
    counts_we: np.ndarray
    """Rows from every device to every expert."""

    @property
    def fullest_pair(self) -> int:
        """Maximum number of rows from one device to the experts of one device."""
        w = self.shape.devices
        return int(self.counts_we.reshape(w, w, -1).sum(axis=-1).max())

    def dropped_share(self, capacity: int) -> float:
        """Return the fraction of all rows that are dropped if a device may send at most
        `capacity` rows to an expert."""
        over_we = np.maximum(self.counts_we - capacity, 0)
        return float(over_we.sum() / self.counts_we.sum())


def make_case(shape: LayerShape) -> LayerCase:
    """Return a layer of this shape on its devices, with inputs of its skew."""
    mesh = axes.make_mesh(
        Topology(expert=shape.devices), jax.devices()[: shape.devices]
    )
    layer = MoeLayer(shape.moe, shape.d, nnx.Rngs(0))
    expert_btk = choices(shape)
    x_btd = inputs(expert_btk, np.asarray(layer.router_de[...]))
    counts_we = np.stack(
        [np.bincount(c.reshape(-1), minlength=shape.experts) for c in expert_btk]
    )
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    by_expert, whole = axes.sharding(mesh, axes.EXPERT), axes.sharding(mesh)
    where = jax.tree.map(lambda leaf: by_expert if leaf.ndim == 3 else whole, params)
    return LayerCase(
        shape=shape,
        mesh=mesh,
        graph=graph,
        params=jax.device_put(params, where),
        rest=jax.device_put(rest, whole),
        x_btd=jax.device_put(
            x_btd.astype(shape.dtype), axes.sharding(mesh, axes.BATCH_AXES)
        ),
        counts_we=counts_we,
    )


def choices(shape: LayerShape) -> Int[np.ndarray, "b t k"]:
    """Draw the experts of each token by the skew. Which experts are hot is drawn
    too."""
    rng = np.random.default_rng(0)
    source = Recorded(source=shape.skew)
    chance_e = recorded.loads(source, 1, shape.experts, shape.top_k)[0, 0]
    start_bt = rng.random((shape.devices, shape.tokens), np.float32)
    drawn_btk = recorded.choose(
        jnp.asarray(chance_e), jnp.asarray(start_bt), shape.top_k
    )
    return rng.permutation(shape.experts)[np.asarray(drawn_btk)]


def inputs(
    expert_btk: Int[np.ndarray, "b t k"], router_de: Float[np.ndarray, "d e"]
) -> Float[np.ndarray, "b t d"]:
    """Return inputs of a layer for which its router chooses the given experts, so that
    each variant's time includes its router.

    The inputs are noise, moved so that the chosen logits are 3 to 4 and the others at
    most 2.
    """
    b, t, k = expert_btk.shape
    x_btd = np.random.default_rng(1).standard_normal((b, t, len(router_de)))
    logit_bte = x_btd @ router_de
    wanted_bte = np.minimum(logit_bte, 2.0)
    rank_k = np.broadcast_to(4 - np.arange(k) / k, expert_btk.shape)
    np.put_along_axis(wanted_bte, expert_btk, rank_k, axis=-1)
    x_btd += (wanted_bte - logit_bte) @ np.linalg.pinv(router_de)
    chosen_btk = np.argsort(-(x_btd @ router_de), axis=-1)[..., :k]
    assert np.array_equal(chosen_btk, expert_btk), "the router chooses otherwise"
    return x_btd.astype(np.float32)


def variants(
    case: LayerCase, capacity: int, *, has_splits: bool = False
) -> dict[str, Variant]:
    """Return all variants of the layer to measure, by name. Only einsum uses
    `capacity`."""
    layout = case.shape.layout
    ours = partial(_ours, case, layout, ExpertPlan.home_in(layout, 1))

    def einsum(params, x_btd):
        layer = nnx.merge(case.graph, params, case.rest)
        choose = partial(
            route.route,
            cfg=case.shape.router,
            top_k=case.shape.top_k,
            seq_len=case.shape.tokens,
        )
        return moe_baselines.einsum_layer(layer, x_btd, choose, case.mesh, capacity)

    return {
        "dense": (partial(moe_baselines.dense, mesh=case.mesh), dense_params(case)),
        "einsum": (einsum, case.params),
        "ragged_dot": (partial(ours, implementation="xla"), case.params),
        "moejax": (ours, case.params),
        **(split_variants(case) if has_splits else {}),
    }


def split_variants(case: LayerCase) -> dict[str, Variant]:
    """Return the variants of the layer with twice the slots, filled with copies in each
    pass.

    Under the splits 'even' and 'water_filling' each expert has two replicas; under
    'dynamic' the loads decide which experts have replicas.
    """
    layout, own = case.shape.layout, case.shape.layout.experts_per_device
    layout = dataclasses.replace(
        layout,
        store="transient",
        slots_per_device=2 * own,
        offers_per_device=own,
        copies_per_device=own,
    )
    row_p = symmetric(layout.num_experts, layout.num_devices, 2 * own)
    twice = ExpertPlan(row_p[None], layout.num_experts)
    plans = {
        "even": twice,
        "water_filling": twice,
        "dynamic": ExpertPlan.home_in(layout, 1),
    }
    return {
        split: (
            partial(_ours, case, dataclasses.replace(layout, split=split), plan),
            case.params,
        )
        for split, plan in plans.items()
    }


def _ours(case, layout, plan, params, x_btd, implementation="auto"):
    layer = nnx.merge(case.graph, params, case.rest)
    placement = Placement.from_plan(plan, layout).layer(0)
    experts = partial(swiglu, implementation=implementation)
    shape = case.shape
    setup = LayerSetup(shape.moe, shape.router, shape.d, layout, case.mesh)
    return layer(x_btd, placement, setup, experts=experts)[0]


def dense_params(case: LayerCase) -> dict[str, Array]:
    """Return random weights of the `dense` baseline, whole on every device."""
    d, width = case.shape.d, case.shape.f * case.shape.top_k
    rng = np.random.default_rng(2)

    def matrix(fan_in: int, fan_out: int) -> np.ndarray:
        return rng.standard_normal((fan_in, fan_out), np.float32) * fan_in**-0.5

    params = {
        "gate_df": matrix(d, width),
        "up_df": matrix(d, width),
        "down_fd": matrix(width, d),
    }
    return jax.device_put(params, axes.sharding(case.mesh))


def compute_reference(case: LayerCase, params: Any, x_btd: Array) -> Array:
    """Compute the layer by its definition, with all experts on every device; for
    jit."""
    layer = nnx.merge(case.graph, params, case.rest)
    x_nd = x_btd.reshape(-1, case.shape.d)
    router = (layer.router_de[...], layer.bias_e[...], case.shape.router)
    routes, _, _ = route.route(x_nd, *router, case.shape.top_k, case.shape.tokens)
    names = ("gate_edf", "up_edf", "down_efd")
    weights = {name: getattr(layer, name)[...] for name in names}
    return reference.moe(x_nd, routes, weights).reshape(x_btd.shape)
