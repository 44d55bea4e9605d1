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
from moejax.model.attention import Sight
from moejax.model.blocks import Block, Cycle
from moejax.model.cache import Cache, Memory
from moejax.model.layers import RmsNorm
from moejax.model.sharding import batch_sharded, gathered
from moejax.moe import recorded
from moejax.moe.dense import dense
from moejax.moe.exchange.dispatch import ROWS
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.route import ROUTES
from moejax.moe.types import LayerSums, Placement
from moejax.moe.weights import stores
from moejax.moe.weights.stores import Weights
from moejax.plan.layout import Layout

EMBED_SCALE = 0.02


class Noise(NamedTuple):
    """What is otherwise in training: None in evaluation (the recorded choice is
    kept)."""

    key: Array
    chance_le: Float[Array, "l e"] | None
    """Recorded routing: chance of each expert this step."""
    jitter: float = 0.0
    is_dense: bool = False
    """Every expert computes every token."""


class Supply(NamedTuple):
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
        noise: Noise | None = None,
        slots: Weights | None = None,
        tracked_lsx: Float[Array, "l s x"] | None = None,
    ) -> tuple[Float[Array, "b t d"], LayerSums]:
        """Final hidden states in the compute dtype, and the sums of all MoE layers with
        leading dims [layer, device]. `slots` of all layers, where they exist already:
        made once a step, where their gradients are summed over micro-batches.
        `tracked_lsx` is what domains hold of experts that travel compressed; None: they
        travel whole."""
        is_separate = self.cfg.documents == "separate"
        sight = Sight.of_windows(position_bt, self.cfg.model, is_separate)
        if noise is not None and noise.is_dense:  # of the masters where they rest
            supply = Supply(placement, layout)
        else:
            supply = self._supply(placement, layout, slots, tracked_lsx)
        hidden_btd, sums, _ = self._run(tokens_bt, sight, supply, noise)
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
        sight, document_bu = Sight.of_cache(position_bt, self.cfg.model, cache)
        memory = Memory(cache.key_lbugi, cache.value_lbugi, jnp.int32(0))
        supply = self._supply(placement, layout)
        hidden_btd, _, memory = self._run(tokens_bt, sight, supply, memory=memory)
        cache = Cache(
            key_lbugi=memory.key_lbugi,
            value_lbugi=memory.value_lbugi,
            document_bu=document_bu,
            num_tokens=cache.num_tokens + tokens_bt.shape[1],
        )
        return hidden_btd, cache

    def _supply(self, placement, layout, slots=None, tracked_lsx=None) -> Supply:
        """How slots come to the layers: at once, one layer ahead, or in each layer."""
        mesh_layout = on_mesh(self.mesh, layout)
        make = partial(stores.slots, mesh_layout=mesh_layout, dtype=self._dtype)
        weights = self.cycles.blocks[-1].moe.masters()
        if layout.store == "resident" and slots is None:
            slots = stores.slots_of_layers(make, weights, placement)
        is_there = slots is not None or tracked_lsx is not None
        if not layout.prefetch or is_there:
            return Supply(placement, layout, slots, tracked_lsx=tracked_lsx)
        weights = jax.tree.map(lambda leaf: leaf.astype(self._dtype), weights)
        first = jax.tree.map(lambda leaf: leaf[0], (weights, placement))
        ahead = jax.tree.map(lambda leaf: jnp.roll(leaf, -1, 0), (weights, placement))
        return Supply(placement, layout, None, make(*first), ahead, make)

    def _run(self, tokens_bt, sight, supply: Supply, noise=None, memory=None):
        """Hidden states, sums of the MoE layers, memory after the last layer."""
        model, moe = self.cfg.model, self.cfg.moe
        embed_vd = gathered(self.embed_vd, self.mesh, self._dtype)
        x_btd = batch_sharded(embed_vd[tokens_bt], self.mesh)
        carry = (x_btd, memory, None)
        if self.prefix is not None:
            carry, _ = _scan(self.prefix, carry, sight, None, None, model)

        def routed_by(per_layer, slots):
            placement, chance_e, key, tracked_sx = per_layer
            jitter_btd = forced_btk = None
            if noise is not None and noise.jitter:
                low, high = 1 - noise.jitter, 1 + noise.jitter
                shape = x_btd.shape
                jitter_btd = jax.random.uniform(key, shape, jnp.float32, low, high)
            if chance_e is not None:
                start_bt = jax.random.uniform(key, tokens_bt.shape)
                forced_btk = recorded.choose(chance_e, start_bt, moe.top_k)
            args = placement, supply.layout, jitter_btd
            if noise is not None and noise.is_dense:
                return lambda layer, x_btd: dense(layer, x_btd, *args)

            def routed(layer, x_btd):
                ready = slots
                if slots is None and tracked_sx is not None:
                    mesh_layout = on_mesh(self.mesh, supply.layout)
                    of_layer = placement, mesh_layout, x_btd.dtype, tracked_sx
                    ready = layer.slots(*of_layer)
                return layer(x_btd, *args, forced_btk, ready)

            return routed

        chance_le = None if noise is None else noise.chance_le
        keys_l = None
        if noise is not None and (noise.jitter or chance_le is not None):
            keys_l = jax.random.split(noise.key, model.num_moe_layers)
        per_layer = supply.placement, chance_le, keys_l, supply.tracked_lsx
        routing = per_layer, routed_by
        carry = (*carry[:2], supply.first)
        carry, sums = _scan(self.cycles, carry, sight, routing, supply, model)
        return self.norm(carry[0]), sums, carry[1]

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


def _scan(stack: nnx.Module, carry, sight, routing, supply, model: Model):
    """Run stacked modules one after the other; `carry` is x, memory and, when they are
    fetched a layer ahead, slots. Returns it, and the modules' sums stacked.

    `routing` is what differs between layers, and what makes of it the call of one MoE
    layer; None where nothing is routed.
    """
    graph, params = nnx.split(stack)
    per_layer, routed_by = routing or (None, lambda *_: None)
    ready, ahead = (supply.slots, supply.ahead) if supply else (None, None)

    def body(carry, layer):
        x_btd, memory, slots = carry
        params, per_layer, ready, ahead = layer
        # The next layer's slots depend on nothing here: they may travel meanwhile.
        following = None if ahead is None else supply.make(*ahead)
        block = nnx.merge(graph, params)
        routed = routed_by(per_layer, slots if ready is None else ready)
        x_btd, sums, memory = block(x_btd, sight, routed, memory)
        return (x_btd, memory, following), sums

    if model.remat != "none":
        names = (ROUTES, ROWS) if model.remat == "dispatch" else (ROUTES,)
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return jax.lax.scan(body, carry, (params, per_layer, ready, ahead))
