"""A decoder-only transformer with scanned layers: a dense prefix, then cycles.

    embed -> first_k_dense blocks -> cycles of dense and MoE blocks -> norm

The parameters of a scanned part are stacked on a leading layer dim (decision 0001). A
cycle has one MoE layer or more; those of all cycles are stacked in the order of layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from moejax import axes
from moejax.config import Model, Network, Points
from moejax.model import ahead, vocabulary
from moejax.model.attention import AttentionContext
from moejax.model.blocks import Block, Cycle, by_cycle, by_layer, stack, unstack
from moejax.model.cache import Cache, KvCacheView
from moejax.model.flops import attention_flops_per_token
from moejax.model.layers import RmsNorm
from moejax.model.sharding import halve_rows, is_gathered, join_rows, shard_batch
from moejax.model.vocabulary import Slices
from moejax.moe import recorded
from moejax.moe.dense import dense
from moejax.moe.exchange.dispatch import ROWS
from moejax.moe.layer import LayerInputs, moe_layer_of_parts
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.route import ROUTES
from moejax.moe.setup import LayerSetup
from moejax.moe.types import LayerSums, Placement
from moejax.moe.weights.slots import (
    Slots,
    make_slots,
    make_slots_of_layers,
    make_whole,
)
from moejax.plan.layout import Layout

EMBED_SCALE = 0.02

INPUTS = "inputs"
"""Checkpoint name of the inputs of layers, which remat 'offload' sends to the host."""


class StepInputs(NamedTuple):
    """Inputs of one micro-batch beside its tokens: randomness and the routing mode."""

    key: Array
    """Random key of the micro-batch, for jitter and for recorded choices."""
    chance_le: Float[Array, "l e"] | None
    """With recorded routing, the probability in this micro-batch that a token chooses
    each expert. None: the router chooses."""
    jitter: float = 0.0
    """Half-width of the interval around 1 from which factors on the router's input are
    drawn; 0 for none."""
    is_dense: bool = False
    """Whether every expert computes every token (moejax.moe.dense)."""
    points: Points = "random"
    """How the tokens draw their experts with recorded routing (Recorded.points)."""


class SlotSource(NamedTuple):
    """Source of the slot weights of each MoE layer.

    There are three kinds: ready-made `slots` of all layers; prefetching, where the
    whole slots of each layer are fetched while the one before computes (`fetch`,
    `fetched_from`); or, if all of these are None, each layer makes its own.
    """

    placement: Placement
    layout: Layout
    slots: Slots | None = None
    """Slots of all layers, made before the first layer runs."""
    fetch: Callable[..., tuple[Slots, Array | None]] | None = None
    """Function from one layer's part of `fetched_from` to its slots, and what tells
    that their copies have arrived (moejax.moe.weights.dependency)."""
    fetched_from: Any = None
    """Arrays from which slots are made, stacked over layers."""
    tracked_lsx: Array | None = None
    """Estimates of compressed experts (moejax.moe.weights.domains), for layers that
    make their slots from them."""


class Transformer(nnx.Module):
    """Embedding, blocks, final norm and output embedding of a decoder-only model."""

    def __init__(self, cfg: Network, mesh: Mesh, rngs: nnx.Rngs):
        model = cfg.model
        self.cfg, self.mesh = cfg, mesh
        embed = jax.nn.initializers.normal(EMBED_SCALE)
        shape = (model.vocab_size, model.d_model)

        def table() -> nnx.Param:
            values_vd = embed(rngs.params(), shape, jnp.float32)
            return nnx.Param(values_vd, is_vocabulary=True)

        self.embed_vd = table()
        self.head_vd = None if model.tie_embeddings else table()
        make_block = partial(Block, cfg, cfg.prefix_kind, mesh)
        self.prefix = stack(make_block, model.first_k_dense, rngs)
        self.cycles = stack(partial(Cycle, cfg, mesh), cfg.num_cycles, rngs)
        if (num_moe := cfg.num_moe_in_cycle) > 1:
            join = partial(by_layer, num_moe=num_moe)
            nnx.update(self.cycles, _change_moe(nnx.state(self.cycles), join))
        self.norm = RmsNorm(model.d_model, model.norm_eps, model.logits_scaling)

    def __call__(
        self,
        tokens_bt: Int[Array, "b t"],
        position_bt: Int[Array, "b t"],
        placement: Placement,
        layout: Layout,
        step_inputs: StepInputs | None = None,
        slots: Slots | None = None,
        tracked_lsx: Float[Array, "l s x"] | None = None,
    ) -> tuple[Float[Array, "b t d"], LayerSums]:
        """Return the final hidden states, and the sums of all MoE layers.

        Hidden states have the compute dtype. Sums have leading dims [layer, device].

        Without `step_inputs` nothing is random and the router chooses. `slots` are
        those of all layers, if the step has made them already. `tracked_lsx` are the
        estimates of experts that travel compressed; if it is None, experts travel
        whole.
        """
        cut = self._cut(layout, len(tokens_bt), step_inputs)
        contexts = tuple(
            AttentionContext.from_windows(part_bt, self.cfg)
            for part_bt in cut(position_bt)
        )
        # Dense training needs no slots: owners compute with their own parameters.
        if step_inputs is not None and step_inputs.is_dense:
            slot_source = SlotSource(placement, layout)
        else:
            of_device = tokens_bt.size / self.mesh.size
            flops = of_device * attention_flops_per_token(self.cfg)
            slot_source = self._slot_source(
                placement, layout, slots, tracked_lsx, flops
            )
        slices = Slices(self.mesh, self.cfg.model.vocab_size)
        x_btd = vocabulary.embed(self.embed_vd[...], tokens_bt, slices, self._dtype)
        parts, sums, _ = self._run(x_btd, contexts, slot_source, step_inputs, cut=cut)
        return join_rows(parts, self.mesh), sums

    def _cut(self, layout: Layout, batch_size: int, step_inputs) -> Callable:
        """Return the function from an activation [b, ..] to its parts: two halves of
        each device's sequences if the layout asks for halves, else itself.

        Where a device has an odd number of sequences, the MoE layer itself cuts its
        tokens, once they are routed. Dense training has no rows that travel, and is not
        cut.
        """
        num_rows = batch_size // axes.axis_size(self.mesh, axes.BATCH_AXES)
        is_dense = step_inputs is not None and step_inputs.is_dense
        if not layout.halves or num_rows % 2 or is_dense:
            return lambda x: (x,)
        return partial(halve_rows, mesh=self.mesh)

    def extend(
        self,
        tokens_bt: Int[Array, "b t"],
        position_bt: Int[Array, "b t"],
        placement: Placement,
        layout: Layout,
        cache: Cache,
    ) -> tuple[Float[Array, "b t d"], Cache]:
        """Return the final hidden states of tokens that follow those in the cache.

        Also return the cache with these tokens appended. It must have room for them.
        """
        context, document_bu = AttentionContext.from_cache(position_bt, self.cfg, cache)
        cache_view = KvCacheView(cache.key_lbugi, cache.value_lbugi, jnp.int32(0))
        slot_source = self._slot_source(placement, layout)
        # Decoding has the table whole on every device, and few tokens.
        embed_vd = self._whole(self.embed_vd)
        (hidden_btd,), _, cache_view = self._run(
            embed_vd[tokens_bt], (context,), slot_source, cache_view=cache_view
        )
        cache = Cache(
            key_lbugi=cache_view.key_lbugi,
            value_lbugi=cache_view.value_lbugi,
            document_bu=document_bu,
            num_tokens=cache.num_tokens + tokens_bt.shape[1],
        )
        return hidden_btd, cache

    def _slot_source(
        self, placement, layout, slots=None, tracked_lsx=None, attention_flops=None
    ) -> SlotSource:
        """Return how layers get their slots: all at once, one layer ahead, or each by
        itself. `attention_flops` are those of a device in one layer's forward pass;
        None: no layer waits for copies of the next one's experts."""
        mesh_layout = on_mesh(self.mesh, layout)
        reduce_dtype = self.cfg.model.gradient_reduce_dtype
        how = mesh_layout, self._dtype, reduce_dtype
        params = self.cycles.moe.master_params()
        if layout.keeps_slots and slots is None:
            slots = make_slots_of_layers(params, placement, self.mesh, *how)
        if not layout.prefetch:
            return SlotSource(placement, layout, slots, tracked_lsx=tracked_lsx)

        def fetch(source) -> tuple[Slots, Array | None]:
            made, dependency = source, None
            if slots is None:
                params, placement, tracked_sx = source
                of_layer = params, placement, *how, tracked_sx, attention_flops
                made, dependency = make_slots(*of_layer)
            return make_whole(made, mesh_layout, reduce_dtype), dependency

        fetched_from = (params, placement, tracked_lsx) if slots is None else slots
        return SlotSource(placement, layout, None, fetch, fetched_from)

    def _run(
        self,
        x_btd,
        contexts,
        slot_source: SlotSource,
        step_inputs=None,
        cache_view=None,
        cut=lambda x: (x,),
    ):
        """Run all layers on the parts into which `cut` cuts the embeddings. Return the
        hidden states of each part, the sums of the MoE layers, and the cache view after
        the last layer."""
        carry = self._enter(x_btd, contexts, cache_view, cut)

        def make_run_moe(per_layer, slots, dependency):
            """Return the call of one MoE layer (blocks.RunMoe), which waits for copies
            of experts for another layer to arrive."""
            placement, chance_e, key, tracked_sx = per_layer
            jitter_btd = forced_btk = None
            if step_inputs is not None and step_inputs.jitter:
                low, high = 1 - step_inputs.jitter, 1 + step_inputs.jitter
                shape = x_btd.shape
                jitter_btd = jax.random.uniform(key, shape, jnp.float32, low, high)
            if chance_e is not None:
                shape = x_btd.shape[:2]
                point_bt = recorded.draw_points(step_inputs.points, key, shape)
                forced_btk = recorded.choose(chance_e, point_bt, self.cfg.moe.top_k)
            args = placement, setup

            def run_dense(layer, parts):
                y_btd, sums = dense(layer, *parts, *args, jitter_btd)
                return (y_btd,), sums

            def run_moe(layer, parts):
                ready = slots
                if slots is None and tracked_sx is not None:
                    how = setup.mesh_layout, self._dtype, setup.gradient_reduce_dtype
                    of_layer = layer.master_params(), placement, *how, tracked_sx
                    ready, _ = make_slots(*of_layer)
                given = (jitter_btd, forced_btk)
                cut_given = (
                    (None,) * len(parts) if v is None else cut(v) for v in given
                )
                inputs = tuple(map(LayerInputs, parts, *cut_given))
                return moe_layer_of_parts(
                    layer.params(), inputs, *args, slots=ready, dependency=dependency
                )

            is_dense = step_inputs is not None and step_inputs.is_dense
            return run_dense if is_dense else run_moe

        chance_le = None if step_inputs is None else step_inputs.chance_le
        keys_l = None
        if step_inputs is not None and (step_inputs.jitter or chance_le is not None):
            num_moe = self.cfg.model.num_moe_layers
            keys_l = jax.random.split(step_inputs.key, num_moe)
        setup = self._setup(slot_source.layout)
        per_layer = slot_source.placement, chance_le, keys_l, slot_source.tracked_lsx
        routing = per_layer, make_run_moe
        carry, sums = _scan(
            self.cycles, carry, contexts, routing, slot_source, self.cfg
        )
        return tuple(map(self.norm, carry[0])), sums, carry[1]

    def _enter(self, x_btd, contexts, cache_view, cut):
        """Return the parts of the embeddings and the cache view after the dense layers
        at the start."""
        factor = self.cfg.model.embedding_multiplier
        if factor != 1:
            x_btd = factor * x_btd
        carry = (cut(shard_batch(x_btd, self.mesh)), cache_view)
        if self.prefix is None:
            return carry
        carry, _ = _scan(self.prefix, carry, contexts, None, None, self.cfg)
        return carry

    def _setup(self, layout: Layout) -> LayerSetup:
        cfg = self.cfg
        return LayerSetup(
            cfg.moe,
            cfg.router,
            cfg.model.d_model,
            layout,
            self.mesh,
            is_router_split=not is_gathered(self.cycles.moe.router_de),
            gradient_reduce_dtype=cfg.model.gradient_reduce_dtype,
        )

    @property
    def _dtype(self):
        return jnp.dtype(self.cfg.model.compute_dtype)

    def head(self) -> Float[Array, "v d"]:
        """Return the output embedding as it is stored, for a loss."""
        return self._head[...]

    def whole_head(self) -> Float[Array, "v d"]:
        """Return the output embedding, whole on every device, in the compute dtype."""
        return self._whole(self._head)

    @jax.named_scope("gathered")
    def _whole(self, table: nnx.Param) -> Float[Array, "v d"]:
        """Return a table, whole on every device. It is cast to the compute dtype before
        it is gathered, so that fewer bytes travel."""
        values_vd = table[...].astype(self._dtype)
        return jax.lax.with_sharding_constraint(values_vd, axes.sharding(self.mesh))

    @property
    def _head(self) -> nnx.Param:
        return self.embed_vd if self.head_vd is None else self.head_vd


def _scan(modules: nnx.Module, carry, contexts, routing, slot_source, cfg: Network):
    """Run stacked modules, blocks or cycles, one after the other.

    `carry` is (parts of x, cache view). Return the last carry, and the sums of all MoE
    layers, stacked.

    `routing` is a pair: arrays that differ between MoE layers, and a function that
    makes from one layer's arrays and slots the call of it (blocks.RunMoe). It is None
    if nothing is routed.
    """
    graph, params = nnx.split(modules)
    per_layer, make_run_moe = routing or (None, None)
    model, num_moe = cfg.model, cfg.num_moe_in_cycle
    split = partial(by_cycle, num_moe=num_moe)
    if routing is not None and num_moe > 1:
        params, per_layer = _change_moe(params, split), split(per_layer)

    def run(carry, slots, layer):
        parts, cache_view = carry
        parts = checkpoint_name(parts, INPUTS)
        (params, per_layer), dependencies = layer
        block = nnx.merge(graph, params)
        run_moe = None
        if routing is not None:
            dependencies = dependencies or [None] * num_moe
            given = unstack(per_layer, num_moe), slots, dependencies
            run_moe = list(map(make_run_moe, *given))
        parts, sums, cache_view = block(parts, contexts, run_moe, cache_view)
        return (parts, cache_view), sums

    is_kept = model.remat == "none"
    if not is_kept:
        run = jax.checkpoint(run, policy=_policy(model.remat), prevent_cse=False)
    if slot_source is not None and slot_source.fetch is not None:
        # Experts learn through their slots alone.
        layers = nnx.map_state(_without_gradient, params), per_layer

        def fetch(source) -> tuple[list[Slots], list[Array | None]]:
            made = [slot_source.fetch(each) for each in unstack(source, num_moe)]
            return tuple(map(list, zip(*made)))

        sources = split(slot_source.fetched_from)
        carry, sums = ahead.scan(run, carry, layers, fetch, sources, is_kept)
    else:
        ready = None if slot_source is None else split(slot_source.slots)

        def body(carry, layer):
            slots, layer = layer
            return run(carry, unstack(slots, num_moe), (layer, None))

        carry, sums = jax.lax.scan(body, carry, (ready, (params, per_layer)))
    return carry, by_layer(sums, num_moe)


def _change_moe(params: nnx.State, change: Callable[[Array], Array]) -> nnx.State:
    """Return the parameters of stacked cycles, with those of MoE layers changed."""

    def change_one(path, variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(change(variable[...])) if "moe" in path else variable

    return nnx.map_state(change_one, params)


def _without_gradient(_, variable: nnx.Variable) -> nnx.Variable:
    """Return a parameter of experts as a constant, and any other variable as it is."""
    if variable.get_metadata().get("expert_dims") is None:
        return variable
    return variable.replace(jax.lax.stop_gradient(variable[...]))


def _policy(remat: str):
    """Return which arrays of a layer are kept for its backward pass, and where."""
    if remat != "offload":
        names = (ROUTES, ROWS) if remat == "dispatch" else (ROUTES,)
        return jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[ROUTES],
        names_which_can_be_offloaded=[INPUTS],
        offload_src="device",
        offload_dst="pinned_host",
    )


def check_remat(model: Model, device: jax.Device) -> None:
    """Raise NotImplementedError where a device cannot keep activations as the model
    asks."""
    if model.remat == "offload" and device.platform == "cpu":
        raise NotImplementedError(
            "Model.remat='offload' sends activations from a GPU to its host, and this "
            "is a CPU: use Model.remat = 'full'"
        )
