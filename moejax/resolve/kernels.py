"""Choice of the kernels that a run's layers use."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from moejax.axes import devices_of
from moejax.choice import Choice
from moejax.config import Config
from moejax.kernels.attention.choose import choose_attention, why_not
from moejax.kernels.attention.reading import Inputs, Rule
from moejax.kernels.device import device_here
from moejax.kernels.grouped_dot.choose import choose_grouped_dot
from moejax.kernels.permute.choose import choose_permute
from moejax.kernels.shapes import ProductShape
from moejax.kernels.tuning import layer_products, measured_tiles
from moejax.kernels.water_fill import choose_water_fill
from moejax.model.attention import make_rule
from moejax.plan.edge_coloring import max_colors
from moejax.plan.layout import Layout


def choose_kernels(cfg: Config, layout: Layout) -> dict[str, Choice[str]]:
    """Return the implementation of each kernel, for a layer of this layout on the
    device of this machine.

    "attention in sliding layers" is among them if it differs from that of other layers.
    """
    return _expert_kernels(cfg, layout) | _attention(cfg)


def check_attention(cfg: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raise NotImplementedError where Model.attention names an implementation that
    cannot compute the run's windows on the devices of the mesh. An abstract mesh that
    names no device is not judged."""
    named, is_abstract = cfg.model.attention, isinstance(mesh, AbstractMesh)
    if named == "auto" or (is_abstract and mesh.abstract_device is None):
        return
    with devices_of(mesh):
        rules = attention_rules(cfg).values()
        reasons = [why_not(named, attention_arrays(cfg), rule) for rule in rules]
    if why := next(filter(None, reasons), None):
        raise NotImplementedError(
            f"Model.attention='{named}' cannot compute this run: {why}: use 'auto'"
        )


def _attention(cfg: Config) -> dict[str, Choice[str]]:
    """Return the implementation of attention over the windows of a micro-batch."""
    named = cfg.model.attention
    if named != "auto":
        return {"attention": Choice(named, f"Model.attention='{named}'")}
    arrays = attention_arrays(cfg)
    choices = {
        kind: choose_attention(arrays, rule)
        for kind, rule in attention_rules(cfg).items()
    }
    first, *others = choices.values()
    chosen = {"attention": first}
    if any(other.value != first.value for other in others):
        chosen["attention in sliding layers"] = choices["sliding"]
    return chosen


def attention_rules(cfg: Config) -> dict[str, Rule]:
    """Return the different rules of the layers' attention, by one kind of layer that
    has each; that of sliding layers last."""
    kinds = sorted(set(cfg.attention.layers), key=lambda kind: kind == "sliding")
    rules = {make_rule(cfg.network, kind): kind for kind in reversed(kinds)}
    return {kind: rule for rule, kind in reversed(rules.items())}


def attention_arrays(cfg: Config) -> Inputs:
    """Return the shapes of one device's arrays of attention in a micro-batch."""
    model, tensor = cfg.model, cfg.mesh.tensor
    b = cfg.train.batch_size // cfg.train.accumulate_steps // cfg.mesh.num_batch_shards
    t, dtype = cfg.data.seq_len, jnp.dtype(model.compute_dtype)
    i, j = cfg.network.query_dim, cfg.network.value_dim
    query, key, value = (
        jax.ShapeDtypeStruct((b, t, heads // tensor, width), dtype)
        for heads, width in (
            (model.num_heads, i), (model.num_kv_heads, i), (model.num_kv_heads, j),
        )
    )  # fmt: skip
    first, start = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((b, t), ()))
    return Inputs(query, key, value, first, start)


def _expert_kernels(cfg: Config, layout: Layout) -> dict[str, Choice[str]]:
    """Return the implementations of experts' products, of row permutations and, where
    the split is water-filling, of that."""
    is_plain, why = layout.kernels == "plain", "Dispatch.kernels='plain'"
    if is_plain:
        grouped = Choice("blocked", why + _without_hopper(layout))
        chosen = {"grouped_dot": grouped, "permute": Choice("xla", why)}
    else:
        permute = choose_permute(cfg.model.compute_dtype, cfg.model.d_model)
        chosen = {"grouped_dot": _grouped_dot(cfg, layout), "permute": permute}
    if layout.split in ("water_filling", "top_up"):
        view = layout.exchanged.topped_up
        num_colors = max_colors(view.num_experts, view.num_slots)
        filling = choose_water_fill(num_colors, view.num_devices)
        chosen["water_fill"] = Choice("portable", why) if is_plain else filling
    return chosen


def product_widths(cfg: Config, layout: Layout) -> tuple[int, int]:
    """Return the width of a row, and the hidden width of an expert as one device
    computes it."""
    shards = 1 if layout.is_local else cfg.expert_shards
    return cfg.model.d_model, cfg.moe.d_expert // shards


def _grouped_dot(cfg: Config, layout: Layout) -> Choice[str]:
    """Return the implementation of the grouped products of round 0."""
    (d, f), dtype = product_widths(cfg, layout), cfg.model.compute_dtype
    is_fp8 = layout.fp8 != "none"
    choice = choose_grouped_dot(dtype, layout.align_rows, d, f, is_fp8=is_fp8)
    if option := cfg.moe.why_unfused:
        note = f"; no kernel fuses SwiGLU with {option}"
        choice = dataclasses.replace(choice, why=choice.why + note)
    if choice.value != "hopper":
        return dataclasses.replace(choice, why=choice.why + _without_hopper(layout))
    view = layout.exchanged.topped_up
    num_rows = view.num_sorted_rows(view.rows_per_device)
    shape = ProductShape(num_rows, d, f, view.slots_per_device)
    kind = device_here().device_kind
    products = layer_products(shape, is_fp8=is_fp8)
    tiles_by_product = [measured_tiles(*product, dtype, kind) for product in products]
    count = sum(tiles is not None for tiles in tiles_by_product)
    tiles = f"{count} of {len(products)} products with measured tiles"
    fp8 = f"fp8 with gradients in {layout.fp8}, " if is_fp8 else ""
    slots = f"slots of whole tiles of {layout.align_rows} rows"
    return Choice("hopper", f"{choice.why}, {fp8}{slots}, {tiles}")


def _without_hopper(layout: Layout) -> str:
    """Return the note that fp8 is emulated, for kernels without 8-bit products; '' for
    a layout without fp8."""
    if layout.fp8 == "none":
        return ""
    return f"; fp8 with gradients in {layout.fp8} is emulated, which is no faster"
