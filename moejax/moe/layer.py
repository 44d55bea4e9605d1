"""The MoE layer: an NNX module with its parameters, and a function of them.

The body of the layer runs on each device inside one `shard_map`.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.axes import is_explicit
from moejax.config import Moe
from moejax.kernels import varying_alike
from moejax.moe import route as routing
from moejax.moe.exchange import schedules
from moejax.moe.exchange.dispatch import Experts
from moejax.moe.exchange.manifest import (
    Manifest,
    fullest_pair,
    manifest,
    num_dropped,
    rows_here,
)
from moejax.moe.exchange.rounds import exchange, num_rounds
from moejax.moe.experts import make_experts
from moejax.moe.mesh_roles import MeshLayout
from moejax.moe.setup import LayerSetup
from moejax.moe.types import LayerSums, Placement
from moejax.moe.weights import stores
from moejax.moe.weights.dependency import dependency_spec, wait_for
from moejax.moe.weights.slots import Slots, make_slots, whole
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
        if not (isinstance(moe, Moe) and isinstance(d_model, int)):
            given = (type(value).__name__ for value in (moe, d_model, rngs))
            raise ValueError(
                f"MoeLayer takes a Moe, a width and rngs, and got {', '.join(given)}"
            )
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
        passed on. Raises ValueError for arguments in another order."""
        is_placed = isinstance(placement, Placement)
        if not is_placed or not isinstance(setup, LayerSetup):
            given = (type(value).__name__ for value in (x_btd, placement, setup))
            raise ValueError(
                "a call takes an array, a Placement and a LayerSetup, and got "
                f"{', '.join(given)}: layer(x_btd, setup.place(plan).layer(0), setup)"
            )
        return moe_layer(self.params(), x_btd, placement, setup, **options)

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


@partial(jax.jit, static_argnames=("setup", "experts"))
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
    3. Choose a replica for each row.
    4. Send each token once to each device of its slots, by all_to_all, and compute the
       rows of each slot by one grouped SwiGLU.
    5. Sum a token's results where they are, weighted by their gates, bring the sums
       home, and add them up.

    The output has x's shape and dtype, which is the dtype that experts compute in. Sums
    [w, ..] are of each of the w devices that split the batch: `router_losses` takes
    `sums.over_devices()`, and `RoutingStats.from_sums` takes those of several layers.

    `params` are those of MoeLayer by name. `placement` is of one layer
    (`setup.place(plan).layer(i)`). `jitter_btd` multiplies the router's input;
    `forced_btk` replaces its choice, by distinct experts of each token; `slots` are the
    weights of all slots where they exist already; `experts` computes the rows of a
    device's slots (None: `swiglu`, by the layout's kernels).

    It is jitted: a call outside of a jitted function compiles once for each setup,
    `experts` and shape.

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
    one may travel while another one's are computed. (With splits 'top_up' and 'dynamic'
    each exchange chooses its own copies, which travel for it alone.) With Moe.halves a
    single part is cut into two halves of each device's tokens, once they are routed; of
    two parts each is a half. Rows leave when the copies of another layer's experts have
    arrived, if `dependency` tells of them. The other arguments are those of
    `moe_layer`.
    """
    setup.check_params(params)
    for part in parts:
        setup.check(part.x_btd, placement, part.forced_btk, part.jitter_btd, len(parts))
    mesh_layout, layout = setup.mesh_layout, setup.layout
    exchanged = mesh_layout.exchanged  # for rows, a domain is one device
    schedule = schedules.find_schedule(exchanged)
    x_sharding, dtype = jax.typeof(parts[0].x_btd).sharding, parts[0].x_btd.dtype
    parts = jax.tree.map(lambda leaf: _reshard(leaf, setup.batch_sharding), parts)
    router_de = _reshard(
        params["router_de"], NamedSharding(mesh_layout.mesh, setup.router_spec)
    )
    biases = {
        name: _reshard(params[name], setup.param_sharding())
        for name in ("bias_e", "logit_bias_e")
        if name in params
    }

    # 1. Make the weights of the slots. With a split that makes replicas these are own
    # experts of the device or domain: copies travel later, when the loads are known.
    if slots is None:
        weights = {
            name: _reshard(params[name], setup.param_sharding(stores.dims(name)))
            for name in (*stores.EXPERT_PARAMS, *stores.EXPERT_BIASES)
            if name in params
        }
        how = mesh_layout, dtype, setup.gradient_reduce_dtype
        slots, _ = make_slots(weights, placement, *how)
    experts = experts or make_experts(setup.moe, mesh_layout)
    is_whole = slots.is_whole

    def on_device(parts, router_de, biases, placement, weights, dependency):
        """Compute the layer for parts of the sequences of one device. Devices along the
        tensor axis have the same sequences. `weights` are those of its slots."""
        entered = [_enter(part, exchanged) for part in parts]
        router_de = setup.whole_router(router_de, entered[0].x_btd)
        if not is_whole:
            how = mesh_layout, setup.gradient_reduce_dtype
            weights = whole(weights, entered[0].x_btd, *how)
        y_parts, sums = [], []
        for part, (x_nd, jitter_nd, forced_nk) in zip(parts, entered):
            # 2. Route each token, in float32.
            routes, score_ne, logit_ne = routing.route(
                x_nd if jitter_nd is None else x_nd * jitter_nd,
                router_de,
                cfg=setup.router,
                top_k=setup.moe.top_k,
                forced_nk=forced_nk,
                **biases,
            )
            expert_nk = wait_for(dependency, routes.expert_nk)

            # 3. Exchange each part by itself, or each of its two halves: choose a
            # replica for each row, ..
            streams = [(x_nd, expert_nk, routes.gate_nk)]
            if layout.halves and len(parts) == 1:
                streams = list(zip(*(jnp.split(x_n, 2) for x_n in streams[0])))
            y_streams, sents = [], []
            for stream in streams:
                sent_nd, chosen_nk, gate_nk = stream
                sent, used = manifest(chosen_nk, placement, exchanged)
                gate_nk, sent = checkpoint_name((gate_nk, sent), routing.ROUTES)
                slot_weights = weights
                if layout.makes_replicas or layout.split == "top_up":
                    used = checkpoint_name(used, routing.ROUTES)
                if layout.makes_replicas:  # so far own experts; add copies
                    with jax.named_scope("slots"):
                        slot_weights, _ = stores.gather_copies(weights, used, exchanged)
                elif layout.split == "top_up":  # so far those of the plan
                    with jax.named_scope("slots"):
                        slot_weights = stores.append_copies(weights, used, exchanged)
                # 4. send the rows and compute them, and 5. bring the results home.
                y_nd = exchange(
                    sent_nd, gate_nk, slot_weights, sent, experts, exchanged,
                    gates_input=setup.router.gate_input,
                )  # fmt: skip
                y_streams.append(y_nd)
                sents.append(sent)
            y_nd = schedules.leave(_join(y_streams), exchanged)
            y_parts.append(y_nd.reshape(part.x_btd.shape).astype(dtype))

            # Sums for losses and statistics, each token counted once.
            of_tokens = score_ne, logit_ne, expert_nk, _join([x.slot_nk for x in sents])
            own = (schedule.own(value, exchanged) for value in of_tokens)
            sums.append(_sums(*own, sents, part.x_btd.shape[1], exchanged))
        total = LayerSums.over_parts(sums)
        x_btd = parts[0].x_btd
        total = jax.tree.map(lambda leaf: varying_alike(leaf, x_btd)[0][None], total)
        return tuple(y_parts), total

    batch = P(mesh_layout.batch_axes)
    sums_tree = SUMS.replace(together_ee=0 if layout.counts_together else None)
    y_parts, sums = jax.shard_map(
        on_device,
        mesh=mesh_layout.mesh,
        in_specs=(
            batch,
            setup.router_spec,
            P(),
            P(),
            slots.specs(mesh_layout),
            dependency_spec(mesh_layout),
        ),
        out_specs=(batch, jax.tree.map(lambda _: batch, sums_tree)),
    )(parts, router_de, biases, placement, slots.read(), dependency)
    return tuple(_reshard(y_btd, x_sharding) for y_btd in y_parts), sums


SUMS = LayerSums(*[0] * 10)
"""The structure of LayerSums without `together_ee`, for specs of shard_map."""


def _reshard(value: Array, where) -> Array:
    """Reshard an array, if the types of arrays carry shardings (JAX's explicit mode);
    otherwise return it as it is, and leave its sharding to the partitioner."""
    if isinstance(where, NamedSharding) and is_explicit(where.mesh):
        return jax.sharding.reshard(value, where)
    return value


def _enter(part: LayerInputs, mesh_layout: MeshLayout) -> LayerInputs:
    """Return the inputs of the tokens that this device routes, [n, ..]."""

    def enter(value_bt):
        b, t = value_bt.shape[:2]
        return schedules.enter(value_bt.reshape(b * t, -1), mesh_layout)

    return jax.tree.map(enter, part)


def _join(values: list[Array]) -> Array:
    """Return the values of one or several streams, one after the other."""
    return values[0] if len(values) == 1 else jnp.concatenate(values)


def _sums(
    score_ne, logit_ne, expert_nk, slot_nk, sents: list[Manifest], seq_len,
    mesh_layout: MeshLayout,
):  # fmt: skip
    """Return this device's addends to losses and statistics, of one part and the
    exchanges of its streams. Devices along the tensor axis return the same."""
    layout = mesh_layout.layout
    split = schedules.find_schedule(mesh_layout).split(mesh_layout)
    added = routing.balance_sums(score_ne, logit_ne, expert_nk, seq_len, split)
    added["dropped"] = num_dropped(expert_nk, slot_nk)
    if layout.counts_together:
        added["together_ee"] = routing.count_together(expert_nk, layout.num_experts)
    rows_h = jnp.stack([rows_here(sent, mesh_layout) for sent in sents])
    owners = set(mesh_layout.tensor_axes) & set(mesh_layout.peer_axes)
    return LayerSums(
        **(jax.lax.psum(added, split) if split else added),
        rows_h=jax.lax.pmax(rows_h, tuple(sorted(owners))) if owners else rows_h,
        rounds=reduce(jnp.maximum, (num_rounds(sent, layout) for sent in sents)),
        fullest_pair=reduce(
            jnp.maximum, (fullest_pair(sent, layout) for sent in sents)
        ),
        bound_h=jnp.stack([sent.bound for sent in sents]),
    )


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
