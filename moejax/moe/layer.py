"""The MoE layer: an NNX module with its parameters, and a function of them.

The body of the layer runs on each device inside one `shard_map`.
"""

import dataclasses
import functools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.axes import is_explicit
from moejax.config import Moe, Router
from moejax.kernels import varying_alike
from moejax.moe import route as routing
from moejax.moe.exchange import schedules
from moejax.moe.exchange.manifest import (
    Manifest,
    manifest,
    num_dropped,
    pair_to_fit,
    rows_here,
)
from moejax.moe.exchange.rounds import Experts, exchange, num_rounds
from moejax.moe.experts import make_experts
from moejax.moe.mesh_roles import MeshLayout
from moejax.moe.setup import LayerSetup
from moejax.moe.types import LayerSums, Placement, Routes
from moejax.moe.weights import stores
from moejax.moe.weights.dependency import dependency_spec, wait_for
from moejax.moe.weights.gather import Fsdp, gather
from moejax.moe.weights.slots import Slots, make_slots, own_experts, whole
from moejax.plan.layout import Layout

ROUTER_FAN = 10
"""Divisor of the router's initial variance: a tenth of the usual one (Switch, section
2.4) gives logits near zero and loads that are nearly even."""


class RouterBias(nnx.Variable):
    """Bias of each expert's score in aux-loss-free balancing; loads move it, gradients
    do not."""


class MoeLayer(nnx.Module):
    """Router and experts of one MoE layer, as float32 parameters in logical order.

    router_de [d, e], bias_e [e], gate_edf and up_edf [e, d, f], down_efd [e, f, d]: d
    is the model's width, e counts experts, f is the hidden width of one. With
    Moe.expert_bias there are gate_bias_ef, up_bias_ef [e, f] and down_bias_ew [e, d],
    and with Router.bias (`router_bias`) logit_bias_e [e]. They do not depend on mesh,
    layout or plan, all of which come with a call. `moejax.shard` puts them on a mesh.
    """

    def __init__(
        self, moe: Moe, d_model: int, rngs: nnx.Rngs, router_bias: bool = False
    ):
        e, d, f = moe.num_experts, d_model, moe.d_expert
        self.router_de = _param(rngs, (d, e), ROUTER_FAN * d)
        self.bias_e = RouterBias(jnp.zeros(e, jnp.float32))
        self.gate_edf = _param(rngs, (e, d, f), d, "edf")
        self.up_edf = _param(rngs, (e, d, f), d, "edf")
        self.down_efd = _param(rngs, (e, f, d), f, "efd")
        widths = (f, f, d) if moe.expert_bias else (None,) * 3
        self.gate_bias_ef, self.up_bias_ef, self.down_bias_ew = (
            width and nnx.Param(jnp.zeros((e, width)), expert_dims=stores.dims(name))
            for name, width in zip(stores.EXPERT_BIASES, widths)
        )
        self.logit_bias_e = nnx.Param(jnp.zeros(e)) if router_bias else None

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        placement: Placement,
        setup: LayerSetup,
        **options,
    ) -> tuple[Float[Array, "b t d"], LayerSums]:
        """Compute the layer by `moe_layer`, with this layer's parameters; `options` are
        passed on."""
        return moe_layer(self.params(), x_btd, placement, setup, **options)

    def of_parts(
        self,
        parts: "tuple[LayerInputs, ...]",
        placement: Placement,
        setup: LayerSetup,
        **options,
    ) -> tuple[tuple[Float[Array, "b t d"], ...], LayerSums]:
        """Compute the layer by `moe_layer_of_parts`, with this layer's parameters;
        `options` are passed on."""
        return moe_layer_of_parts(self.params(), parts, placement, setup, **options)

    def params(self) -> stores.ExpertWeights:
        """Return the parameters by name, as `moe_layer` takes them."""
        return {"router_de": self.router_de[...], **self.biases()} | (
            self.master_params()
        )

    def biases(self) -> dict[str, Array]:
        """Return the biases of the router: bias_e, which moves the choice, and
        logit_bias_e if there is one."""
        return self._given("bias_e", "logit_bias_e")

    def master_params(self) -> stores.ExpertWeights:
        """Return the float32 weights of all experts: gate_edf, up_edf, down_efd, and
        their biases if they have any."""
        return self._given(*stores.EXPERT_PARAMS, *stores.EXPERT_BIASES)

    def _given(self, *names: str) -> dict[str, Array]:
        """Return the parameters of these names that the layer has."""
        params = {name: getattr(self, name) for name in names}
        return {name: param[...] for name, param in params.items() if param is not None}


def moe_layer(
    params: stores.ExpertWeights,
    x_btd: Float[Array, "b t d"],
    placement: Placement,
    setup: LayerSetup,
    *,
    jitter_btd: Float[Array, "b t d"] | None = None,
    forced_btk: Int[Array, "b t k"] | None = None,
    slots: Slots | None = None,
    experts: Experts | None = None,
) -> tuple[Float[Array, "b t d"], LayerSums]:
    """Return the output of an MoE layer, and sums for losses and statistics.

    1. Make the weights of the slots that the placement gives to each device.
    2. Route each token to its top_k experts, in float32.
    3. Choose a replica for each row, and exchange rows by all_to_all.
    4. Compute the rows of each slot by one grouped SwiGLU.
    5. Bring results home, and add them up, weighted by their gates.

    The output has x's shape and dtype, which is the dtype that experts compute in. Sums
    [w, ..] are of each of the w devices that split the batch: `router_losses` takes
    `sums.over_devices()`, and `RoutingStats.from_sums` takes those of several layers.

    `params` are those of MoeLayer by name. `placement` is of one
    layer (`setup.place(plan).layer(i)`). `jitter_btd` multiplies the router's input;
    `forced_btk` replaces its choice; `slots` are the weights of all slots where they
    exist already; `experts` computes the rows of a
    device's slots (None: `swiglu`, by the layout's kernels).

    Raises ValueError, one line, for shapes that do not fit the setup.
    """
    inputs = LayerInputs(x_btd, jitter_btd, forced_btk)
    (y_btd,), sums = moe_layer_of_parts(
        params, (inputs,), placement, setup, slots=slots, experts=experts
    )
    return y_btd, sums


class LayerInputs(NamedTuple):
    """Inputs of an MoE layer that differ from token to token, as `moe_layer` takes
    them."""

    x_btd: Float[Array, "b t d"]
    jitter_btd: Float[Array, "b t d"] | None = None
    forced_btk: Int[Array, "b t k"] | None = None


def moe_layer_of_parts(
    params: stores.ExpertWeights,
    parts: tuple[LayerInputs, ...],
    placement: Placement,
    setup: LayerSetup,
    *,
    slots: Slots | None = None,
    experts: Experts | None = None,
    dependency: Int[Array, " w"] | None = None,
) -> tuple[tuple[Float[Array, "b t d"], ...], LayerSums]:
    """Return the output of an MoE layer for each part of a batch, and the sums of all.

    Parts have nothing in common but the weights, which are gathered once: the rows of
    one may travel while another one's are computed. (With split 'dynamic' each exchange
    chooses its own copies, which travel for it alone.) With Moe.halves a single part is
    cut into two halves of each device's tokens, once they are routed; of two parts each
    is a half. Rows leave when the copies of another layer's experts have arrived, if
    `dependency` tells of them. The other arguments are those of `moe_layer`.
    """
    setup.check_biases(params)
    for part in parts:
        setup.check(part.x_btd, placement, part.forced_btk, part.jitter_btd, len(parts))
    mesh_layout = setup.mesh_layout
    x_sharding, dtype = jax.typeof(parts[0].x_btd).sharding, parts[0].x_btd.dtype
    parts = jax.tree.map(lambda leaf: _reshard(leaf, setup.batch_sharding), parts)
    router = (
        _reshard(
            params["router_de"], NamedSharding(mesh_layout.mesh, setup.router_spec)
        ),
        {
            name: _reshard(params[name], setup.param_sharding())
            for name in ("bias_e", "logit_bias_e")
            if name in params
        },
    )
    if slots is None:
        slots = _slots(params, placement, setup, dtype)
    batch = P(mesh_layout.batch_axes)
    experts = experts or make_experts(setup.moe, mesh_layout)
    static = Static.of(setup, experts)
    body = jax.shard_map(
        partial(_body, are_whole=slots.is_whole, static=static),
        mesh=mesh_layout.mesh,
        in_specs=(
            batch,
            setup.router_spec,
            P(),
            P(),
            slots.specs(mesh_layout),
            dependency_spec(mesh_layout),
        ),
        out_specs=(batch, jax.tree.map(lambda _: batch, SUMS)),
    )
    y_parts, sums = body(parts, *router, placement, slots.read(), dependency)
    return tuple(_reshard(y_btd, x_sharding) for y_btd in y_parts), sums


def _slots(params, placement, setup: LayerSetup, dtype) -> Slots:
    """Return the weights of all slots. With a split that makes replicas return those of
    the device's own experts alone: copies travel later, when the loads are known."""
    experts = {
        name: _reshard(params[name], setup.param_sharding(stores.dims(name)))
        for name in (*stores.EXPERT_PARAMS, *stores.EXPERT_BIASES)
        if name in params
    }
    if setup.layout.makes_replicas:
        return own_experts(experts, dtype)
    how = setup.mesh_layout, dtype, setup.gradient_reduce_dtype
    return make_slots(experts, placement, *how)[0]


def _reshard(value: Array, where) -> Array:
    """Reshard an array, if the types of arrays carry shardings (JAX's explicit mode);
    otherwise return it as it is, and leave its sharding to the partitioner."""
    if isinstance(where, NamedSharding) and is_explicit(where.mesh):
        return jax.sharding.reshard(value, where)
    return value


@dataclasses.dataclass(frozen=True)
class Static:
    """Static arguments of the body that a device runs."""

    top_k: int
    router: Router
    mesh_layout: MeshLayout
    router_fsdp: Fsdp
    """How the router's matrix rests (LayerSetup.router_fsdp)."""
    router_dim: int | None
    """Dim along which it is split, or None."""
    gradient_reduce_dtype: str
    """Dtype in which gradients of experts travel (Model.gradient_reduce_dtype)."""
    experts: Experts | None = None
    """Function that computes rows; None: the dense layer (moejax.moe.dense), which has
    no rows."""

    @classmethod
    def of(cls, setup: LayerSetup, experts: Experts | None = None) -> "Static":
        """Return the static arguments of a layer."""
        return cls(
            setup.moe.top_k, setup.router, setup.mesh_layout, setup.router_fsdp,
            setup.router_dim, setup.gradient_reduce_dtype, experts,
        )  # fmt: skip

    def whole_router(self, part: Array, x_nd: Array) -> Float[Array, "d e"]:
        """Return the whole matrix of the router, from this device's part of it."""
        (router_de,) = gather((part,), (self.router_dim,), x_nd, self.router_fsdp)
        return router_de


SUMS = LayerSums(*[0] * 10)
"""The structure of LayerSums, for specs of shard_map."""


class _Stream(NamedTuple):
    """Routed tokens of one exchange: those of a part, or half of them."""

    x_nd: Array
    routes: Routes


def _body(
    parts,
    router_de,
    biases,
    placement,
    weights,
    dependency,
    *,
    are_whole,
    static: Static,
):
    """Compute the layer for parts of the sequences of one device. Devices along the
    tensor axis have the same sequences. `weights` are those of its slots."""
    mesh_layout, exchanged = static.mesh_layout, static.mesh_layout.exchanged
    given = [_enter(part, exchanged) for part in parts]
    x_nd, (_, t, _) = given[0].x_btd, parts[0].x_btd.shape
    route = partial(_route, static.whole_router(router_de, x_nd), biases, static=static)
    if not are_whole:
        weights = whole(weights, x_nd, mesh_layout, static.gradient_reduce_dtype)
    y_parts, sums = [], []
    for part, entered in zip(parts, given):
        routes, score_ne, logit_ne = route(entered)
        routes = routes.replace(expert_nk=wait_for(dependency, routes.expert_nk))
        streams = _streams(_Stream(entered.x_btd, routes), len(parts), exchanged)
        y_nd, sents = zip(
            *(_travel(stream, weights, placement, static) for stream in streams)
        )
        y_nd = schedules.leave(_join(y_nd), exchanged)
        y_parts.append(y_nd.reshape(part.x_btd.shape).astype(part.x_btd.dtype))
        peer_nk = _join([sent.peer_nk for sent in sents])
        keep_own = schedules.find_schedule(exchanged).own
        own = (score_ne, logit_ne, routes.expert_nk, peer_nk)
        own = (keep_own(value, exchanged) for value in own)
        sums.append(_sums(*own, sents, t, exchanged))
    total = LayerSums.over_parts(sums)
    x_btd = parts[0].x_btd
    total = jax.tree.map(lambda leaf: varying_alike(leaf, x_btd)[0][None], total)
    return tuple(y_parts), total


def _enter(part: LayerInputs, mesh_layout: MeshLayout) -> LayerInputs:
    """Return the inputs of the tokens that this device routes, [n, ..]."""

    def enter(value_bt):
        b, t = value_bt.shape[:2]
        return schedules.enter(value_bt.reshape(b * t, -1), mesh_layout)

    return jax.tree.map(enter, part)


def _route(router_de, biases, part: LayerInputs, *, static: Static):
    """Return the routes of the tokens [n, ..] of a part, and the router's scores and
    logits."""
    x_nd, jitter_nd, forced_nk = part
    routed_nd = x_nd if jitter_nd is None else x_nd * jitter_nd
    return routing.route(
        routed_nd,
        router_de,
        cfg=static.router,
        top_k=static.top_k,
        forced_nk=forced_nk,
        **biases,
    )


def _streams(
    whole_part: _Stream, num_parts: int, mesh_layout: MeshLayout
) -> list[_Stream]:
    """Return what is exchanged separately: a part, or its two halves where the layout
    asks for halves and there is no other part."""
    if not mesh_layout.layout.halves or num_parts > 1:
        return [whole_part]
    leaves, tree = jax.tree.flatten(whole_part)
    halves = zip(*(jnp.split(leaf, 2) for leaf in leaves))
    return [tree.unflatten(half) for half in halves]


def _travel(stream: _Stream, weights, placement, static: Static):
    """Return the results of a stream's tokens, and the manifest of its exchange."""
    mesh_layout, exchanged = static.mesh_layout, static.mesh_layout.exchanged
    if static.router.gate_input:
        return _travel_gated(stream, weights, placement, static)
    expert_nk, gate_nk = stream.routes.expert_nk, stream.routes.gate_nk
    sent, used = manifest(expert_nk, placement, exchanged)
    gate_nk, sent = checkpoint_name((gate_nk, sent), routing.ROUTES)
    if mesh_layout.layout.makes_replicas:  # so far own experts; add copies
        used = checkpoint_name(used, routing.ROUTES)
        with jax.named_scope("slots"):
            weights, _ = stores.gather_copies(weights, used, mesh_layout)
    y_nd = exchange(stream.x_nd, gate_nk, weights, sent, static.experts, exchanged)
    return y_nd, sent


def _travel_gated(stream: _Stream, weights, placement, static: Static):
    """Return what `_travel` does where gates multiply the input of experts: each choice
    is a token of its own, with one expert and a gate of 1."""
    (n, k), x_nd = stream.routes.gate_nk.shape, stream.x_nd
    x_nkd = x_nd[:, None] * stream.routes.gate_nk[..., None].astype(x_nd.dtype)
    expert_a1 = stream.routes.expert_nk.reshape(n * k, 1)
    routes = Routes(expert_a1, jnp.ones_like(stream.routes.gate_nk, shape=(n * k, 1)))
    ungated = dataclasses.replace(
        static, router=dataclasses.replace(static.router, gate_input=False)
    )
    choices = _Stream(x_nkd.reshape(n * k, -1), routes)
    y_ad, sent = _travel(choices, weights, placement, ungated)
    sent = sent.replace(peer_nk=sent.peer_nk.reshape(n, k))
    return y_ad.reshape(n, k, -1).sum(axis=1), sent


def _join(values):
    """Return the values of one or several streams, one after the other."""
    return values[0] if len(values) == 1 else jnp.concatenate(values)


def _sums(
    score_ne, logit_ne, expert_nk, peer_nk, sents: tuple[Manifest, ...], seq_len,
    mesh_layout: MeshLayout,
):  # fmt: skip
    """Return this device's addends to losses and statistics, of one part and the
    exchanges of its streams. Devices along the tensor axis return the same."""
    layout = mesh_layout.layout
    split = schedules.find_schedule(mesh_layout).split(mesh_layout)
    added = routing.balance_sums(score_ne, logit_ne, expert_nk, seq_len, split)
    added["dropped"] = num_dropped(expert_nk, peer_nk)
    rows_h = jnp.stack([rows_here(sent, mesh_layout) for sent in sents])
    owners = set(mesh_layout.tensor_axes) & set(mesh_layout.peer_axes)
    return LayerSums(
        **(jax.lax.psum(added, split) if split else added),
        rows_h=jax.lax.pmax(rows_h, tuple(sorted(owners))) if owners else rows_h,
        rounds=_largest(num_rounds(sent, layout) for sent in sents),
        fullest_pair=_largest(pair_to_fit(sent, layout) for sent in sents),
        bound_h=jnp.stack([sent.bound for sent in sents]),
    )


def _largest(counts) -> Int[Array, ""]:
    """Return the largest of several counts."""
    return functools.reduce(jnp.maximum, counts)


def _param(rngs: nnx.Rngs, shape, fan_in: int, dims: str | None = None) -> nnx.Param:
    """Draw a parameter from a truncated normal of variance 1 / fan_in. `dims` name the
    dims of an expert parameter, such as 'edf'."""
    init = jax.nn.initializers.truncated_normal(fan_in**-0.5)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), expert_dims=dims)


def check_device(layout: Layout, device: jax.Device) -> None:
    """Raise NotImplementedError where a layer of this layout cannot run on a device."""
    if layout.transport == "ragged" and device.platform == "cpu":
        raise NotImplementedError(
            "XLA:CPU has no ragged_all_to_all (jax issue 34755): use "
            "Dispatch.transport = 'padded' on the CPU"
        )
