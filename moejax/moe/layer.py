"""The MoE layer: a module that owns parameters, and the short body of its shard_map."""

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
from moejax.kernels.water_fill import fits_fused
from moejax.moe import route as routing
from moejax.moe.exchange import schedules
from moejax.moe.exchange.manifest import manifest, num_dropped, pair_to_fit, rows_here
from moejax.moe.exchange.rounds import Experts, exchange, num_rounds
from moejax.moe.experts import swiglu
from moejax.moe.mesh_roles import Groups, groups_of
from moejax.moe.types import LayerSums, Placement
from moejax.moe.weights import stores
from moejax.plan.edge_coloring import most_colours
from moejax.plan.layout import Layout

ROUTER_FAN = 10
"""The router starts with a tenth of the usual variance (Switch, section 2.4): logits
near zero, loads near even."""


class RouterBias(nnx.Variable):
    """Expert bias of aux-loss-free balancing: moved by loads, not by gradients."""


class MoeLayer(nnx.Module):
    """Router, experts e of width f, in logical order; float32 masters.

    Expert weights are split over their owners by e, and by their hidden width f over
    shards and, where they rest, over data (moejax.moe.weights.stores.master_spec).
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
        tracked_sx: Float[Array, "s x"] | None = None,
        experts: Experts | None = None,
    ) -> tuple[Float[Array, "b t d"], LayerSums]:
        """Output and every device's sums (leading dim: dc * data * expert devices).

        `placement` is of this layer alone. `jitter_btd` multiplies the router's input;
        `forced_btk` replaces its choice; `slots` are this layer's, where they exist
        already; `tracked_sx` is what its domains hold of experts that travel compressed
        (None: they travel whole); `experts` computes the rows of this device's slots
        (None: `swiglu`, by the layout's kernels).
        """
        if experts is None:
            grouped = "blocked" if layout.kernels == "plain" else "auto"
            experts = partial(swiglu, implementation=grouped, fp8=layout.fp8)
        if layout.split == "dynamic":  # copies travel when the loads are known
            slots = stores.joined(self.masters(), x_btd.dtype)
        elif slots is None:
            slots = self.slots(placement, layout, x_btd.dtype, tracked_sx)
        optional = {"jitter_btd": jitter_btd, "forced_btk": forced_btk}
        optional = {k: v for k, v in optional.items() if v is not None}
        groups = groups_of(self.mesh, layout)
        batch, slot_specs = P(groups.batch), stores.slot_specs(groups)
        static = {"cfg": self.cfg, "router": self.router, "groups": groups}
        body = jax.shard_map(
            partial(_body, **static, layout=layout, experts=experts),
            mesh=groups.mesh,
            in_specs=(batch, P(), P(), P(), slot_specs, dict.fromkeys(optional, batch)),
            out_specs=(batch, jax.tree.map(lambda _: batch, SUMS)),
        )
        y_btd, sums = body(
            x_btd, self.router_de[...], self.bias_e[...], placement, slots, optional
        )
        return y_btd, sums

    def slots(self, placement, layout: Layout, dtype, tracked_sx) -> stores.Weights:
        """The weights of all slots, from the masters."""
        masters, mesh = self.masters(), self.mesh
        return stores.slots(masters, placement, layout, mesh, dtype, tracked_sx)

    def masters(self) -> stores.Weights:
        return {name: getattr(self, name)[...] for name in stores.MASTERS}


SUMS = LayerSums(*[0] * 10)
"""Their structure."""


def _body(
    x_btd,
    router_de,
    bias_e,
    placement,
    slots,
    optional,
    *,
    cfg,
    router,
    groups,
    layout,
    experts,
):
    """One device's share of the layer; x_btd holds its own sequences, whole on the
    tensor axis."""
    b, t, d = x_btd.shape
    view = layout.exchanged
    given = {"x_btd": x_btd} | optional
    given = {k: v.reshape(b * t, -1) for k, v in given.items()}
    given = {k: schedules.enter(v, view, groups) for k, v in given.items()}
    x_nd = given["x_btd"]
    routed_nd = x_nd * given["jitter_btd"] if "jitter_btd" in given else x_nd

    routes, score_ne, logit_ne = routing.route(
        routed_nd, router_de, bias_e, router, cfg.top_k, t, given.get("forced_btk")
    )
    sent, used = manifest(routes.expert_nk, placement, view, groups)
    gate_nk, sent = checkpoint_name((routes.gate_nk, sent), routing.ROUTES)

    weights = whole(slots, x_nd, groups)
    if layout.split == "dynamic":  # these are the own experts; here come copies of some
        used = checkpoint_name(used, routing.ROUTES)
        with jax.named_scope("slots"):
            weights = stores.copied(weights, used, layout, groups)
    y_nd = exchange(x_nd, gate_nk, weights, sent, experts, view, groups)
    y_nd = schedules.leave(y_nd, view, groups)

    own = (score_ne, logit_ne, routes.expert_nk, sent.peer_nk)
    own = (schedules.schedule_of(view).own(value, groups) for value in own)
    sums = _sums(*own, sent, t, view, groups)
    sums = jax.tree.map(lambda leaf: varying_alike(leaf, x_btd)[0][None], sums)
    return y_nd.reshape(b, t, d).astype(x_btd.dtype), sums


def _sums(score_ne, logit_ne, expert_nk, peer_nk, sent, seq_len, layout, groups):
    """What this device's tokens add to losses and statistics, equal on the devices of
    its tensor axis."""
    parts = schedules.schedule_of(layout).split(groups)
    added = routing.balance_sums(score_ne, logit_ne, expert_nk, seq_len, parts)
    added["dropped"] = num_dropped(expert_nk, peer_nk)
    rows = rows_here(sent, layout, groups)
    owners = set(groups.parts) & set(groups.peers)
    return LayerSums(
        **(jax.lax.psum(added, parts) if parts else added),
        rows=jax.lax.pmax(rows, tuple(sorted(owners))) if owners else rows,
        rounds=num_rounds(sent, layout),
        fullest_pair=pair_to_fit(sent, layout),
        bound=sent.bound,
    )


@jax.named_scope("slots")
def whole(slots: stores.Weights, x_nd: Array, groups: Groups) -> stores.Weights:
    """This device's slots, gathered from where their width rests, as varied as x; gate
    beside up.

    The transpose scatters the summed gradient back.
    """

    def gathered(leaf, hidden_dim):
        leaf, _ = varying_alike(leaf, x_nd)  # gradients meet over dc as shards
        if groups.masters:
            leaf = jax.lax.all_gather(leaf, groups.masters, axis=hidden_dim, tiled=True)
        return leaf

    into_sd2f = slots["into"]
    s, d = into_sd2f.shape[:2]
    return {
        "into_sdh": gathered(into_sd2f, 3).reshape(s, d, -1),
        "down_sfd": gathered(slots["down"], 1),
    }


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
    num_colours = most_colours(layout.num_experts, layout.num_slots)
    if not is_hopper(device) or not fits_fused(num_colours, layout.num_devices):
        raise NotImplementedError(
            "the fused split is a kernel for Hopper GPUs and groups of at most 128 "
            f"devices, and this is {layout.num_experts} experts on "
            f"{layout.num_devices} x {device.device_kind}: use Dispatch.fused_split "
            "= False"
        )
