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
from moejax.config import Model, Network
from moejax.model import ahead, vocabulary
from moejax.model.attention import AttentionContext
from moejax.model.blocks import Block, Cycle, by_cycle, by_layer, stack, unstack
from moejax.model.cache import Cache, KvCacheView
from moejax.model.flops import attention_flops_per_token
from moejax.model.layers import RmsNorm
from moejax.model.routed import MoeInputs, MoeOptions, Parts, RoutingMode
from moejax.model.sharding import halve_rows, is_gathered, join_rows, shard_batch
from moejax.model.vocabulary import Slices
from moejax.moe.exchange.dispatch import ROWS
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

    key: Array | None = None
    """Random key of the micro-batch, for jitter and for recorded choices."""
    chance_le: Float[Array, "l e"] | None = None
    """With recorded routing, the probability in this micro-batch that a token chooses
    each expert. None: the router chooses."""
    mode: RoutingMode = RoutingMode()


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
        cfg, mesh = self.cfg, self.mesh
        step_inputs = StepInputs() if step_inputs is None else step_inputs
        # With halves, two halves of each device's sequences pass through the layers.
        # Where a device has an odd number of sequences, the MoE layer itself cuts its
        # tokens, once they are routed. Dense training has no rows that travel.
        num_rows = len(tokens_bt) // axes.axis_size(mesh, axes.BATCH_AXES)
        has_halves = (
            layout.halves and num_rows % 2 == 0 and not step_inputs.mode.is_dense
        )
        positions = halve_rows(position_bt, mesh) if has_halves else (position_bt,)
        contexts = tuple(AttentionContext.from_windows(part, cfg) for part in positions)
        flops = tokens_bt.size / mesh.size * attention_flops_per_token(cfg)

        slices = Slices(mesh, cfg.model.vocab_size)
        x_btd = vocabulary.embed(self.embed_vd[...], tokens_bt, slices, self._dtype)
        x_btd = self._scaled(x_btd)
        parts = halve_rows(x_btd, mesh) if has_halves else (x_btd,)
        parts, sums, _ = self._run_layers(
            parts,
            contexts,
            placement,
            layout,
            step_inputs,
            slots=slots,
            tracked_lsx=tracked_lsx,
            attention_flops=flops,
        )
        return join_rows(parts, mesh), sums

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
        # Decoding has the table whole on every device, and few tokens.
        embed_vd = self._whole(self.embed_vd)
        x_btd = self._scaled(embed_vd[tokens_bt])
        (hidden_btd,), _, cache_view = self._run_layers(
            (x_btd,), (context,), placement, layout, StepInputs(), cache_view=cache_view
        )
        cache = Cache(
            key_lbugi=cache_view.key_lbugi,
            value_lbugi=cache_view.value_lbugi,
            document_bu=document_bu,
            num_tokens=cache.num_tokens + tokens_bt.shape[1],
        )
        return hidden_btd, cache

    def _run_layers(
        self,
        parts: Parts,
        contexts: tuple[AttentionContext, ...],
        placement: Placement,
        layout: Layout,
        step_inputs: StepInputs,
        *,
        slots: Slots | None = None,
        tracked_lsx: Array | None = None,
        cache_view: KvCacheView | None = None,
        attention_flops: float | None = None,
    ) -> tuple[Parts, LayerSums, KvCacheView | None]:
        """Run all layers, and the final norm. Return the hidden states of each part,
        the sums of the MoE layers, and the cache view after the last layer.

        `attention_flops` are those of a device in one layer's forward pass; None: no
        layer waits for copies of the next one's experts.
        """
        cfg, model = self.cfg, self.cfg.model
        carry = (parts, cache_view)
        if self.prefix is not None:
            carry, _ = scan(self.prefix, carry, contexts, None, None, cfg)

        setup = LayerSetup(
            cfg.moe,
            cfg.router,
            model.d_model,
            layout,
            self.mesh,
            is_router_split=not is_gathered(self.cycles.moe.router_de),
            gradient_reduce_dtype=model.gradient_reduce_dtype,
        )
        key, chance_le, mode = step_inputs
        options, is_dense = MoeOptions(setup, mode), mode.is_dense
        keys_l = None
        if mode.jitter or chance_le is not None:
            keys_l = jax.random.split(key, model.num_moe_layers)
        inputs = MoeInputs(placement, chance_le, keys_l, tracked_lsx, slots)

        # Slots are made for all layers at once, or a layer ahead, or in each layer.
        # Dense training needs none: owners compute with their own parameters.
        params = self.cycles.moe.master_params()
        if layout.keeps_slots and slots is None and not is_dense:
            how = setup.mesh_layout, self._dtype, model.gradient_reduce_dtype
            slots = make_slots_of_layers(params, placement, self.mesh, *how)
            inputs = inputs._replace(slots=slots)
        if layout.prefetch and not is_dense:
            sources = (params, placement, tracked_lsx) if slots is None else slots
            inputs = inputs._replace(tracked_sx=None, slots=None)
            fetch = partial(
                fetch_slots, setup=setup, dtype=self._dtype, flops=attention_flops
            )
            carry, sums = scan_ahead(
                self.cycles, carry, contexts, inputs, options, cfg, fetch, sources
            )
        else:
            carry, sums = scan(self.cycles, carry, contexts, inputs, options, cfg)
        parts, cache_view = carry
        return tuple(map(self.norm, parts)), sums, cache_view

    def _scaled(self, x_btd: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Return embeddings times Model.embedding_multiplier, split as batches are."""
        factor = self.cfg.model.embedding_multiplier
        return shard_batch(x_btd if factor == 1 else factor * x_btd, self.mesh)

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


def layer_step(
    graph: nnx.GraphDef,
    contexts: tuple[AttentionContext, ...],
    options: MoeOptions | None,
    carry: tuple[Parts, KvCacheView | None],
    params: nnx.State,
    inputs: list[MoeInputs] | None,
) -> tuple[tuple[Parts, KvCacheView | None], LayerSums | None]:
    """Run one layer, or one cycle of layers, of the structure `graph` and the
    parameters `params`. Return the carry for the next one, and the sums of the MoE
    layers. `inputs` are those of each MoE layer; None where there is none."""
    parts, cache_view = carry
    parts = checkpoint_name(parts, INPUTS)
    layer = nnx.merge(graph, params)
    parts, sums, cache_view = layer(parts, contexts, inputs, options, cache_view)
    return (parts, cache_view), sums


def scan(
    layers: nnx.Module,
    carry: tuple[Parts, KvCacheView | None],
    contexts: tuple[AttentionContext, ...],
    inputs: MoeInputs | None,
    options: MoeOptions | None,
    cfg: Network,
) -> tuple[tuple[Parts, KvCacheView | None], LayerSums | None]:
    """Run stacked blocks or cycles one after the other, by `layer_step`. Return the
    last carry, and the sums of all MoE layers, stacked.

    `inputs` are those of all MoE layers, stacked; None for dense blocks.
    """
    graph, params = nnx.split(layers)
    num_moe = cfg.num_moe_in_cycle
    if inputs is not None:
        params = _change_moe(params, partial(by_cycle, num_moe=num_moe))
    step = with_remat(partial(layer_step, graph, contexts, options), cfg.model)

    def body(carry, layer):
        params, inputs = layer
        given = None if inputs is None else unstack(inputs, num_moe)
        return step(carry, params, given)

    carry, sums = jax.lax.scan(body, carry, (params, by_cycle(inputs, num_moe)))
    return carry, by_layer(sums, num_moe)


def scan_ahead(
    layers: nnx.Module,
    carry: tuple[Parts, KvCacheView | None],
    contexts: tuple[AttentionContext, ...],
    inputs: MoeInputs,
    options: MoeOptions,
    cfg: Network,
    fetch: Callable[[Any], tuple[Slots, Array | None]],
    sources: Any,
) -> tuple[tuple[Parts, KvCacheView | None], LayerSums]:
    """Do what `scan` does, where the slots of each layer are fetched while the one
    before computes (moejax.model.ahead).

    `sources` are the arrays from which slots are made, stacked over layers.
    fetch(source) returns the slots of one layer, and what tells that their copies have
    arrived.
    """
    graph, params = nnx.split(layers)
    num_moe = cfg.num_moe_in_cycle
    params = _change_moe(params, partial(by_cycle, num_moe=num_moe))
    # Experts learn through their slots alone.
    params = nnx.map_state(_without_gradient, params)

    def run(carry, slots, layer):
        (params, inputs), dependencies = layer
        given = zip(unstack(inputs, num_moe), slots, dependencies)
        given = [x._replace(slots=s, dependency=d) for x, s, d in given]
        return layer_step(graph, contexts, options, carry, params, given)

    def fetch_cycle(source) -> tuple[list[Slots], list[Array | None]]:
        made = [fetch(each) for each in unstack(source, num_moe)]
        return tuple(map(list, zip(*made)))

    carry, sums = ahead.scan(
        with_remat(run, cfg.model),
        carry,
        (params, by_cycle(inputs, num_moe)),
        fetch_cycle,
        by_cycle(sources, num_moe),
        is_kept=cfg.model.remat == "none",
    )
    return carry, by_layer(sums, num_moe)


def fetch_slots(
    source: Any, *, setup: LayerSetup, dtype, flops: float | None
) -> tuple[Slots, Array | None]:
    """Return the whole slots of one layer, and what tells that copies in them have
    arrived, or None.

    `source` is the layer's slots if they were made for all layers at once, else its
    expert parameters, its placement and its estimates of compressed experts. `flops`
    are those of a device in one layer's attention (make_slots).
    """
    slots, dependency, reduce_dtype = source, None, setup.gradient_reduce_dtype
    if not isinstance(source, Slots):
        params, placement, tracked_sx = source
        how = setup.mesh_layout, dtype, reduce_dtype
        slots, dependency = make_slots(params, placement, *how, tracked_sx, flops)
    return make_whole(slots, setup.mesh_layout, reduce_dtype), dependency


def with_remat(step: Callable, model: Model) -> Callable:
    """Return a layer's step, whose backward pass computes again what Model.remat does
    not keep."""
    if model.remat == "none":
        return step
    return jax.checkpoint(step, policy=_policy(model.remat), prevent_cse=False)


def _change_moe(params: nnx.State, change: Callable[[Array], Array]) -> nnx.State:
    """Apply `change` to the parameters of MoE layers among those of stacked cycles."""

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
