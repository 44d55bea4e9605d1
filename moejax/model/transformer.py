"""A decoder-only transformer whose layers are scanned: dense prefix, then cycles.

    embed -> first_k_dense blocks -> cycles of (moe_every - 1 dense, 1 MoE) -> norm

Parameters of a scanned part are stacked on a leading layer dim (decision 0001).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from moejax.config import Model, Network
from moejax.model.attention import AttentionContext
from moejax.model.blocks import Block, Cycle
from moejax.model.cache import Cache, KvCacheView
from moejax.model.layers import RmsNorm
from moejax.model.sharding import batch_sharded, gathered
from moejax.moe import recorded
from moejax.moe.dense import dense
from moejax.moe.exchange.dispatch import ROWS
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.route import ROUTES
from moejax.moe.setup import LayerSetup
from moejax.moe.types import LayerSums, Placement
from moejax.moe.weights import stores
from moejax.moe.weights.stores import Weights
from moejax.plan.layout import Layout

EMBED_SCALE = 0.02


class StepInputs(NamedTuple):
    """What is otherwise in training: None in evaluation (the recorded choice is
    kept)."""

    key: Array
    chance_le: Float[Array, "l e"] | None
    """Recorded routing: chance of each expert this step."""
    jitter: float = 0.0
    is_dense: bool = False
    """Every expert computes every token."""


class SlotSource(NamedTuple):
    """Where the slots of each MoE layer come from; the layer makes them when all of the
    rest is None."""

    placement: Placement
    layout: Layout
    slots: Weights | None = None
    """Of all layers."""
    first: Weights | None = None
    """Of layer 0, when each layer makes those of the next one."""
    ahead: tuple[Weights, Placement] | None = None
    """Masters and placement of the layer after each; the first's after the last."""
    make: Callable[..., Weights] | None = None
    tracked_lsx: Array | None = None
    """What domains hold of experts that travel compressed, for the layers that make
    their slots of it."""


class Transformer(nnx.Module):
    def __init__(self, cfg: Network, mesh: Mesh, rngs: nnx.Rngs):
        model = cfg.model
        self.cfg, self.mesh = cfg, mesh
        embed = jax.nn.initializers.normal(EMBED_SCALE)
        shape = (model.vocab_size, model.d_model)
        self.embed_vd = nnx.Param(embed(rngs.params(), shape, jnp.float32))
        self.head_vd = (
            None
            if model.tie_embeddings
            else nnx.Param(embed(rngs.params(), shape, jnp.float32))
        )
        self.prefix = _stack(
            partial(Block, cfg, False, mesh), model.first_k_dense, rngs
        )
        self.cycles = _stack(partial(Cycle, cfg, mesh), model.num_moe_layers, rngs)
        self.norm = RmsNorm(model.d_model, model.norm_eps)

    def __call__(
        self,
        tokens_bt: Int[Array, "b t"],
        position_bt: Int[Array, "b t"],
        placement: Placement,
        layout: Layout,
        step_inputs: StepInputs | None = None,
        slots: Weights | None = None,
        tracked_lsx: Float[Array, "l s x"] | None = None,
    ) -> tuple[Float[Array, "b t d"], LayerSums]:
        """Final hidden states in the compute dtype, and the sums of all MoE layers with
        leading dims [layer, device]. `slots` of all layers, where they exist already:
        made once a step, where their gradients are summed over micro-batches.
        `tracked_lsx` is what domains hold of experts that travel compressed; None: they
        travel whole."""
        is_separate = self.cfg.documents == "separate"
        context = AttentionContext.from_windows(
            position_bt, self.cfg.model, is_separate
        )
        if (
            step_inputs is not None and step_inputs.is_dense
        ):  # of the masters where they rest
            slot_source = SlotSource(placement, layout)
        else:
            slot_source = self._slot_source(placement, layout, slots, tracked_lsx)
        hidden_btd, sums, _ = self._run(tokens_bt, context, slot_source, step_inputs)
        return hidden_btd, sums

    def extend(
        self,
        tokens_bt: Int[Array, "b t"],
        position_bt: Int[Array, "b t"],
        placement: Placement,
        layout: Layout,
        cache: Cache,
    ) -> tuple[Float[Array, "b t d"], Cache]:
        """Final hidden states of tokens that follow those in the cache, which must have
        room for them, and the cache with them in it."""
        context, document_bu = AttentionContext.from_cache(
            position_bt, self.cfg.model, cache
        )
        cache_view = KvCacheView(cache.key_lbugi, cache.value_lbugi, jnp.int32(0))
        slot_source = self._slot_source(placement, layout)
        hidden_btd, _, cache_view = self._run(
            tokens_bt, context, slot_source, cache_view=cache_view
        )
        cache = Cache(
            key_lbugi=cache_view.key_lbugi,
            value_lbugi=cache_view.value_lbugi,
            document_bu=document_bu,
            num_tokens=cache.num_tokens + tokens_bt.shape[1],
        )
        return hidden_btd, cache

    def _slot_source(
        self, placement, layout, slots=None, tracked_lsx=None
    ) -> SlotSource:
        """How slots come to the layers: at once, one layer ahead, or in each layer."""
        mesh_layout = on_mesh(self.mesh, layout)
        make = partial(stores.slots, mesh_layout=mesh_layout, dtype=self._dtype)
        weights = self.cycles.blocks[-1].moe.master_params()
        if layout.store == "resident" and slots is None:
            slots = stores.slots_of_layers(make, weights, placement)
        is_there = slots is not None or tracked_lsx is not None
        if not layout.prefetch or is_there:
            return SlotSource(placement, layout, slots, tracked_lsx=tracked_lsx)
        weights = jax.tree.map(lambda leaf: leaf.astype(self._dtype), weights)
        first = jax.tree.map(lambda leaf: leaf[0], (weights, placement))
        ahead = jax.tree.map(lambda leaf: jnp.roll(leaf, -1, 0), (weights, placement))
        return SlotSource(placement, layout, None, make(*first), ahead, make)

    def _run(
        self,
        tokens_bt,
        context,
        slot_source: SlotSource,
        step_inputs=None,
        cache_view=None,
    ):
        """Hidden states, sums of the MoE layers, memory after the last layer."""
        model, moe = self.cfg.model, self.cfg.moe
        embed_vd = gathered(self.embed_vd, self.mesh, self._dtype)
        x_btd = batch_sharded(embed_vd[tokens_bt], self.mesh)
        carry = (x_btd, cache_view, None)
        if self.prefix is not None:
            carry, _ = _scan(self.prefix, carry, context, None, None, model)

        def routed_by(per_layer, slots):
            placement, chance_e, key, tracked_sx = per_layer
            jitter_btd = forced_btk = None
            if step_inputs is not None and step_inputs.jitter:
                low, high = 1 - step_inputs.jitter, 1 + step_inputs.jitter
                shape = x_btd.shape
                jitter_btd = jax.random.uniform(key, shape, jnp.float32, low, high)
            if chance_e is not None:
                start_bt = jax.random.uniform(key, tokens_bt.shape)
                forced_btk = recorded.choose(chance_e, start_bt, moe.top_k)
            args = placement, setup
            if step_inputs is not None and step_inputs.is_dense:
                return lambda layer, x_btd: dense(layer, x_btd, *args, jitter_btd)
            options = {"jitter_btd": jitter_btd, "forced_btk": forced_btk}

            def routed(layer, x_btd):
                ready = slots
                if slots is None and tracked_sx is not None:
                    of_layer = placement, setup.mesh_layout, x_btd.dtype, tracked_sx
                    ready = layer.slots(*of_layer)
                return layer(x_btd, *args, slots=ready, **options)

            return routed

        chance_le = None if step_inputs is None else step_inputs.chance_le
        keys_l = None
        if step_inputs is not None and (step_inputs.jitter or chance_le is not None):
            keys_l = jax.random.split(step_inputs.key, model.num_moe_layers)
        setup = self._setup(slot_source.layout)
        per_layer = slot_source.placement, chance_le, keys_l, slot_source.tracked_lsx
        routing = per_layer, routed_by
        carry = (*carry[:2], slot_source.first)
        carry, sums = _scan(self.cycles, carry, context, routing, slot_source, model)
        return self.norm(carry[0]), sums, carry[1]

    def _setup(self, layout: Layout) -> LayerSetup:
        cfg = self.cfg
        return LayerSetup(cfg.moe, cfg.router, cfg.model.d_model, layout, self.mesh)

    @property
    def _dtype(self):
        return jnp.dtype(self.cfg.model.compute_dtype)

    def head(self) -> Float[Array, "v d"]:
        """The output embedding, whole, in the compute dtype."""
        head_vd = self.embed_vd if self.head_vd is None else self.head_vd
        return gathered(head_vd, self.mesh, self._dtype)


def _stack(make, count: int, rngs: nnx.Rngs) -> nnx.Module | None:
    """`count` modules with their parameters stacked on a leading dim; None for none."""
    if count == 0:
        return None
    keys = jax.random.split(rngs.params(), count)
    return nnx.vmap(lambda key: make(rngs=nnx.Rngs(params=key)))(keys)


def _scan(stack: nnx.Module, carry, context, routing, slot_source, model: Model):
    """Run stacked modules one after the other; `carry` is x, memory and, when they are
    fetched a layer ahead, slots. Returns it, and the modules' sums stacked.

    `routing` is what differs between layers, and what makes of it the call of one MoE
    layer; None where nothing is routed.
    """
    graph, params = nnx.split(stack)
    per_layer, routed_by = routing or (None, lambda *_: None)
    ready, ahead = (
        (slot_source.slots, slot_source.ahead) if slot_source else (None, None)
    )

    def body(carry, layer):
        x_btd, cache_view, slots = carry
        params, per_layer, ready, ahead = layer
        # The next layer's slots depend on nothing here: they may travel meanwhile.
        following = None if ahead is None else slot_source.make(*ahead)
        block = nnx.merge(graph, params)
        routed = routed_by(per_layer, slots if ready is None else ready)
        x_btd, sums, cache_view = block(x_btd, context, routed, cache_view)
        return (x_btd, cache_view, following), sums

    if model.remat != "none":
        names = (ROUTES, ROWS) if model.remat == "dispatch" else (ROUTES,)
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return jax.lax.scan(body, carry, (params, per_layer, ready, ahead))
