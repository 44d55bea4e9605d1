"""The MoE layer: a module that owns parameters, and the short body of its shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax import axes
from moejax.colours import most_colours
from moejax.config import Moe, Router
from moejax.kernels import varying_alike
from moejax.kernels.water_fill import fits_fused
from moejax.layout import Layout
from moejax.moe import route as routing
from moejax.moe import stores
from moejax.moe.exchange import Experts, exchange, num_rounds
from moejax.moe.experts import swiglu
from moejax.moe.manifest import manifest, pair_to_fit, rows_here
from moejax.types import LayerSums, Placement

ROUTER_FAN = 10
"""The router starts with a tenth of the usual variance (Switch, section 2.4): logits
near zero, loads near even."""


class RouterBias(nnx.Variable):
    """Expert bias of aux-loss-free balancing: moved by loads, not by gradients."""


class MoeLayer(nnx.Module):
    """Router, experts e of width f, in logical order; float32 masters.

    Expert weights are split over the expert axis by e and over data by their hidden
    width f (store 'sharded': over both by f; merged groups: over both by e), and
    gathered over data for compute.
    """

    def __init__(
        self, cfg: Moe, router: Router, d_model: int, mesh: Mesh, rngs: nnx.Rngs
    ):
        e, d, f = cfg.num_experts, d_model, cfg.d_expert
        self.cfg, self.router, self.mesh = cfg, router, mesh
        self.router_de = _param(rngs, (d, e), ROUTER_FAN * d)
        self.bias_e = RouterBias(jnp.zeros(e, jnp.float32))
        self.gate_edf = _param(rngs, (e, d, f), d, axes.EXPERT, None, axes.DATA)
        self.up_edf = _param(rngs, (e, d, f), d, axes.EXPERT, None, axes.DATA)
        self.down_efd = _param(rngs, (e, f, d), f, axes.EXPERT, axes.DATA, None)

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        placement: Placement,
        layout: Layout,
        jitter_btd: Float[Array, "b t d"] | None = None,
        forced_btk: Int[Array, "b t k"] | None = None,
        slots: stores.Weights | None = None,
        experts: Experts = swiglu,
    ) -> tuple[Float[Array, "b t d"], LayerSums]:
        """Output and every device's sums (leading dim: dc * data * expert devices).

        `placement` is of this layer alone. `jitter_btd` multiplies the router's input;
        `forced_btk` replaces its choice; `slots` are this layer's, where they exist
        already; `experts` computes the rows of this device's slots.
        """
        if layout.split == "dynamic":  # copies travel when the loads are known
            slots = stores.joined(self.masters(), x_btd.dtype)
        elif slots is None:
            slots = self.slots(placement, layout, x_btd.dtype)
        optional = {"jitter_btd": jitter_btd, "forced_btk": forced_btk}
        optional = {k: v for k, v in optional.items() if v is not None}
        batch, mesh = P(axes.BATCH_AXES), self.mesh
        static = {"cfg": self.cfg, "router": self.router, "mesh": mesh}
        out_specs = (batch, jax.tree.map(lambda _: batch, _SUMS))
        body = jax.shard_map(
            partial(_body, **static, layout=layout, experts=experts),
            mesh=mesh,
            in_specs=(
                batch,
                P(),
                P(),
                P(),
                stores.slot_specs(layout),
                dict.fromkeys(optional, batch),
            ),
            out_specs=out_specs,
        )
        y_btd, sums = body(
            x_btd, self.router_de[...], self.bias_e[...], placement, slots, optional
        )
        return y_btd, sums

    def slots(self, placement: Placement, layout: Layout, dtype) -> stores.Weights:
        """The weights of all slots, from the masters."""
        return stores.slots(self.masters(), placement, layout, self.mesh, dtype)

    def masters(self) -> stores.Weights:
        return {name: getattr(self, name)[...] for name in stores.MASTERS}


_SUMS = LayerSums(*[0] * 9)


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
    mesh,
    layout,
    experts,
):
    """One device's share of the layer; x_btd holds its own sequences."""
    b, t, d = x_btd.shape
    x_nd = x_btd.reshape(b * t, d)
    routed_nd, forced_nk = x_nd, None
    if "jitter_btd" in optional:
        routed_nd = x_nd * optional["jitter_btd"].reshape(b * t, d)
    if "forced_btk" in optional:
        forced_nk = optional["forced_btk"].reshape(b * t, -1)

    routes, score_ne, logit_ne = routing.route(
        routed_nd, router_de, bias_e, router, cfg.top_k, t, forced_nk
    )
    sent, used = manifest(routes.expert_nk, placement, layout, layout.axes)
    gate_nk, sent = checkpoint_name((routes.gate_nk, sent), routing.ROUTES)

    weights = whole(slots, x_nd, mesh, layout)
    if layout.split == "dynamic":  # these are the own experts; here come copies of some
        used = checkpoint_name(used, routing.ROUTES)
        with jax.named_scope("slots"):
            weights = stores.copied(weights, used, layout)
    y_nd = exchange(x_nd, gate_nk, weights, sent, experts, layout, layout.axes)
    sums = LayerSums(
        **routing.balance_sums(score_ne, logit_ne, routes.expert_nk, t),
        rows=rows_here(sent, layout, layout.axes),
        rounds=num_rounds(sent, layout),
        dropped=sent.dropped,
        fullest_pair=pair_to_fit(sent, layout),
        bound=sent.bound,
    )
    sums = jax.tree.map(lambda leaf: varying_alike(leaf, x_nd)[0][None], sums)
    return y_nd.reshape(b, t, d).astype(x_btd.dtype), sums


@jax.named_scope("slots")
def whole(
    slots: stores.Weights, x_nd: Array, mesh: Mesh, layout: Layout
) -> stores.Weights:
    """This device's slots, gathered over data, as varied as x; gate beside up. Merged
    groups split no slot over data.

    The transpose scatters the summed gradient back to the shards.
    """
    is_split = mesh.shape[axes.DATA] > 1 and axes.DATA not in layout.axes

    def gathered(leaf, hidden_dim):
        leaf, _ = varying_alike(leaf, x_nd)  # gradients meet over dc as shards
        if is_split:
            leaf = jax.lax.all_gather(leaf, axes.DATA, axis=hidden_dim, tiled=True)
        return leaf

    into_sd2f = slots["into"]
    s, d = into_sd2f.shape[:2]
    return {
        "into_sdh": gathered(into_sd2f, 3).reshape(s, d, -1),
        "down_sfd": gathered(slots["down"], 1),
    }


def _param(rngs: nnx.Rngs, shape, fan_in: int, *split: str | None) -> nnx.Param:
    """Normal with variance 1 / fan_in, truncated; `split` names the dims' mesh axes."""
    init = jax.nn.initializers.truncated_normal(fan_in**-0.5)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), split=split or None)


HOPPER = 9.0


def check_device(layout: Layout, device: jax.Device) -> None:
    """NotImplementedError when a layer of this layout cannot run on such devices."""
    if layout.transport == "ragged" and device.platform == "cpu":
        raise NotImplementedError(
            "XLA:CPU has no ragged_all_to_all (jax issue 34755): use "
            "Moe.transport = 'padded' on the CPU"
        )
    if not layout.fused_split:
        return
    capability = float(getattr(device, "compute_capability", None) or 0.0)
    num_colours = most_colours(layout.num_experts, layout.num_slots)
    if capability < HOPPER or not fits_fused(num_colours, layout.num_devices):
        raise NotImplementedError(
            "the fused split is a kernel for Hopper GPUs and groups of at most 128 "
            f"devices, and this is {layout.num_experts} experts on "
            f"{layout.num_devices} x {device.device_kind}: use Moe.fused_split = False"
        )
