"""The MoE layer: a module that owns parameters, and the short body of its shard_map."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.config import Moe, Router
from moejax.kernels import varying_alike
from moejax.kernels.device import is_hopper
from moejax.kernels.grouped_dot import grouped_swiglu
from moejax.kernels.water_fill import fits_fused
from moejax.moe import route as routing
from moejax.moe.exchange import schedules
from moejax.moe.exchange.manifest import manifest, num_dropped, pair_to_fit, rows_here
from moejax.moe.exchange.rounds import Experts, exchange, num_rounds
from moejax.moe.mesh_roles import MeshLayout, on_mesh
from moejax.moe.types import LayerSums, Placement
from moejax.moe.weights import stores
from moejax.plan.edge_coloring import max_colors
from moejax.plan.layout import Fp8, Layout

ROUTER_FAN = 10
"""The router starts with a tenth of the usual variance (Switch, section 2.4): logits
near zero, loads near even."""


class RouterBias(nnx.Variable):
    """Expert bias of aux-loss-free balancing: moved by loads, not by gradients."""


class MoeLayer(nnx.Module):
    """Router, experts e of width f, in logical order; float32 masters.

    Expert weights are split over their owners by e, and by their hidden width f over
    shards and, where they rest, over data
    (moejax.moe.weights.stores.master_param_spec).
    """

    def __init__(
        self, cfg: Moe, router: Router, d_model: int, mesh: Mesh, rngs: nnx.Rngs
    ):
        e, d, f = cfg.num_experts, d_model, cfg.d_expert
        self.cfg, self.router, self.mesh = cfg, router, mesh
        self.router_de = _param(rngs, (d, e), ROUTER_FAN * d)
        self.bias_e = RouterBias(jnp.zeros(e, jnp.float32))
        self.gate_edf = _param(rngs, (e, d, f), d, "edf")
        self.up_edf = _param(rngs, (e, d, f), d, "edf")
        self.down_efd = _param(rngs, (e, f, d), f, "efd")

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        placement: Placement,
        layout: Layout,
        jitter_btd: Float[Array, "b t d"] | None = None,
        forced_btk: Int[Array, "b t k"] | None = None,
        slots: stores.Weights | None = None,
        experts: Experts | None = None,
    ) -> tuple[Float[Array, "b t d"], LayerSums]:
        """Output and every device's sums (leading dim: dc * data * expert devices).

        `placement` is of this layer alone. `jitter_btd` multiplies the router's input;
        `forced_btk` replaces its choice; `slots` are this layer's, where they exist
        already; `experts` computes the rows of this device's slots (None: `swiglu`, by
        the layout's kernels).
        """
        mesh_layout = on_mesh(self.mesh, layout)
        if layout.split == "dynamic":  # copies travel when the loads are known
            slots = stores.join_gate_up(self.master_params(), x_btd.dtype)
        elif slots is None:
            slots = self.slots(placement, mesh_layout, x_btd.dtype)
        optional = {"jitter_btd": jitter_btd, "forced_btk": forced_btk}
        optional = {k: v for k, v in optional.items() if v is not None}
        batch, slot_specs = P(mesh_layout.batch_axes), stores.slot_specs(mesh_layout)
        experts = experts or _make_experts(layout)
        static = Static(self.cfg.top_k, self.router, mesh_layout, experts)
        body = jax.shard_map(
            partial(_body, static=static),
            mesh=mesh_layout.mesh,
            in_specs=(batch, P(), P(), P(), slot_specs, dict.fromkeys(optional, batch)),
            out_specs=(batch, jax.tree.map(lambda _: batch, SUMS)),
        )
        y_btd, sums = body(
            x_btd, self.router_de[...], self.bias_e[...], placement, slots, optional
        )
        return y_btd, sums

    def slots(
        self,
        placement: Placement,
        mesh_layout: MeshLayout,
        dtype,
        tracked_sx: Float[Array, "s x"] | None = None,
    ) -> stores.Weights:
        """Return the weights of all slots, made from the masters.

        `tracked_sx` is what the layer's domains hold of experts that travel compressed;
        None: they travel whole.
        """
        return stores.slots(
            self.master_params(), placement, mesh_layout, dtype, tracked_sx
        )

    def master_params(self) -> stores.Weights:
        return {name: getattr(self, name)[...] for name in stores.EXPERT_PARAMS}


@dataclasses.dataclass(frozen=True)
class Static:
    """What the body of a layer is compiled for, beside shapes."""

    top_k: int
    router: Router
    mesh_layout: MeshLayout
    experts: Experts | None = None
    """What computes rows; None: the dense layer (moejax.moe.dense), which has none."""


SUMS = LayerSums(*[0] * 10)
"""Their structure."""


def _body(x_btd, router_de, bias_e, placement, slots, optional, *, static: Static):
    """One device's share of the layer; x_btd holds its own sequences, whole on the
    tensor axis."""
    b, t, d = x_btd.shape
    mesh_layout, exchanged = static.mesh_layout, static.mesh_layout.exchanged
    given = {"x_btd": x_btd} | optional
    given = {k: v.reshape(b * t, -1) for k, v in given.items()}
    given = {k: schedules.enter(v, exchanged) for k, v in given.items()}
    x_nd = given["x_btd"]
    routed_nd = x_nd * given["jitter_btd"] if "jitter_btd" in given else x_nd

    routes, score_ne, logit_ne = routing.route(
        routed_nd,
        router_de,
        bias_e,
        static.router,
        static.top_k,
        t,
        given.get("forced_btk"),
    )
    sent, used = manifest(routes.expert_nk, placement, exchanged)
    gate_nk, sent = checkpoint_name((routes.gate_nk, sent), routing.ROUTES)

    weights = whole(slots, x_nd, mesh_layout)
    if mesh_layout.layout.split == "dynamic":  # own experts; here come copies of some
        used = checkpoint_name(used, routing.ROUTES)
        with jax.named_scope("slots"):
            weights = stores.gather_copies(weights, used, mesh_layout)
    y_nd = exchange(x_nd, gate_nk, weights, sent, static.experts, exchanged)
    y_nd = schedules.leave(y_nd, exchanged)

    own = (score_ne, logit_ne, routes.expert_nk, sent.peer_nk)
    keep_own = schedules.find_schedule(exchanged).own
    own = (keep_own(value, exchanged) for value in own)
    sums = _sums(*own, sent, t, exchanged)
    sums = jax.tree.map(lambda leaf: varying_alike(leaf, x_btd)[0][None], sums)
    return y_nd.reshape(b, t, d).astype(x_btd.dtype), sums


def _sums(score_ne, logit_ne, expert_nk, peer_nk, sent, seq_len, mesh_layout):
    """What this device's tokens add to losses and statistics, equal on the devices of
    its tensor axis."""
    layout = mesh_layout.layout
    split = schedules.find_schedule(mesh_layout).split(mesh_layout)
    added = routing.balance_sums(score_ne, logit_ne, expert_nk, seq_len, split)
    added["dropped"] = num_dropped(expert_nk, peer_nk)
    rows = rows_here(sent, mesh_layout)
    owners = set(mesh_layout.tensor_axes) & set(mesh_layout.peer_axes)
    return LayerSums(
        **(jax.lax.psum(added, split) if split else added),
        rows=jax.lax.pmax(rows, tuple(sorted(owners))) if owners else rows,
        rounds=num_rounds(sent, layout),
        fullest_pair=pair_to_fit(sent, layout),
        bound=sent.bound,
    )


@jax.named_scope("slots")
def whole(
    slots: stores.Weights, x_nd: Array, mesh_layout: MeshLayout
) -> stores.Weights:
    """This device's slots, gathered from where their width rests, as varied as x; gate
    beside up.

    The transpose scatters the summed gradient back.
    """

    def gathered(leaf, hidden_dim):
        leaf, _ = varying_alike(leaf, x_nd)  # gradients meet over dc as shards
        if axes := mesh_layout.master_axes:
            leaf = jax.lax.all_gather(leaf, axes, axis=hidden_dim, tiled=True)
        return leaf

    into_sd2f = slots["into"]
    s, d = into_sd2f.shape[:2]
    return {
        "into_sdh": gathered(into_sd2f, 3).reshape(s, d, -1),
        "down_sfd": gathered(slots["down"], 1),
    }


@jax.named_scope("experts")
def swiglu(
    x_md: Float[Array, "m d"],
    rows_s: Int[Array, " s"],
    weights: dict[str, Array],
    implementation: str = "auto",
    fp8: Fp8 = "none",
) -> Float[Array, "m d"]:
    """Return the rows, sorted by slot, through their slot's silu(x gate) * (x up) down.

    weights: into_sdh [s, d, 2f], gate and up side by side so that one product reads the
    rows once, and down_sfd, in the dtype of x. Rows past sum(rows_s) are padding and
    come out as zeros.
    """
    into_sdh, down_sfd = weights["into_sdh"], weights["down_sfd"]
    return grouped_swiglu(
        x_md, into_sdh, down_sfd, rows_s, implementation=implementation, fp8=fp8
    )


def _make_experts(layout: Layout) -> Experts:
    """Return `swiglu` by the layout's kernels."""
    grouped = "blocked" if layout.kernels == "plain" else "auto"
    return partial(swiglu, implementation=grouped, fp8=layout.fp8)


def _param(rngs: nnx.Rngs, shape, fan_in: int, dims: str | None = None) -> nnx.Param:
    """Normal with variance 1 / fan_in, truncated; `dims` are those of experts."""
    init = jax.nn.initializers.truncated_normal(fan_in**-0.5)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), dims=dims)


def check_device(layout: Layout, device: jax.Device) -> None:
    """NotImplementedError when a layer of this layout cannot run on such devices."""
    if layout.transport == "ragged" and device.platform == "cpu":
        raise NotImplementedError(
            "XLA:CPU has no ragged_all_to_all (jax issue 34755): use "
            "Dispatch.transport = 'padded' on the CPU"
        )
    if not layout.fused_split:
        return
    num_colors = max_colors(layout.num_experts, layout.num_slots)
    if not is_hopper(device) or not fits_fused(num_colors, layout.num_devices):
        raise NotImplementedError(
            "the fused split is a kernel for Hopper GPUs and groups of at most 128 "
            f"devices, and this is {layout.num_experts} experts on "
            f"{layout.num_devices} x {device.device_kind}: use Dispatch.fused_split "
            "= False"
        )
