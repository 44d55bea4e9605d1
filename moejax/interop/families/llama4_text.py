"""Llama-4, its text part: chunks of attention, layers without RoPE, one expert a token
whose gate multiplies its input, and experts in two tensors.

Published files have a vision part too. Its tensors are read past.
"""

from moejax.config import Network
from moejax.interop.families import shared
from moejax.interop.families.shared import Family, Rows
from moejax.interop.rope_json import RopeKeys
from moejax.interop.settings import (
    Constant,
    Flag,
    HeadDim,
    Setting,
    Whole,
    inexpressible,
)
from moejax.interop.table import Row, Split

TYPES = {"chunked_attention": "chunked", "full_attention": "full"}


class Layers(Setting):
    """Kinds of attention: chunks and RoPE, or neither."""

    def read(self, config, values) -> None:
        num_layers = values["model.num_layers"]
        step = config.whole("no_rope_layer_interval", 4)
        rope = config.wholes("no_rope_layers", most=1) or [
            int((i + 1) % step != 0) for i in range(num_layers)
        ]
        if len(rope) != num_layers:
            raise config.error("no_rope_layers", f"must have {num_layers:,} numbers")
        kinds = config.names("layer_types", TYPES, num_layers) or tuple(
            "chunked" if has_rope else "full" for has_rope in rope
        )
        if ("chunked", 0) in zip(kinds, rope):
            raise config.error(
                "layer_types", "has chunks in a layer without RoPE, by no_rope_layers"
            )
        values["layers.attention"] = kinds = tuple(
            kind if has_rope else "nope" for kind, has_rope in zip(kinds, rope)
        )
        config.take("attention_chunk_size")
        if "chunked" in kinds:
            size = config.whole("attention_chunk_size", 8192)
            values["attention.chunk_size"] = size
        is_tuned = bool(config.whole_or_flag("attn_temperature_tuning", True))
        scale = config.number("attn_scale", 0.1, above=False)
        floor = config.whole("floor_scale", 8192)
        if is_tuned and "nope" in kinds:
            values["attention.temperature_scale"] = scale
            values["attention.temperature_floor"] = floor

    def write(self, values, record) -> None:
        kinds = values.pop("layers.attention")
        if "sliding" in kinds:
            raise inexpressible("attention.layers", "sliding", "chunked, full or nope")
        titles = {"chunked": "chunked_attention"}
        record["layer_types"] = [titles.get(kind, "full_attention") for kind in kinds]
        record["no_rope_layers"] = [int(kind != "nope") for kind in kinds]
        size = values.pop("attention.chunk_size")
        if size is not None:
            record["attention_chunk_size"] = size
        scale = values.pop("attention.temperature_scale")
        floor = values.pop("attention.temperature_floor")
        if "nope" in kinds:
            record["attn_temperature_tuning"] = scale > 0
        if scale > 0:
            record |= {"attn_scale": scale, "floor_scale": floor}


class MoeLayers(Setting):
    """The MoE layers: those listed, or every n-th one."""

    def read(self, config, values) -> None:
        num_layers = values["model.num_layers"]
        step = config.whole("interleave_moe_layer_step", 1)
        listed = config.wholes("moe_layers", most=num_layers - 1)
        places = range(step - 1, num_layers, step) if listed is None else set(listed)
        values["layers.ff"] = tuple(
            "moe" if i in places else "dense" for i in range(num_layers)
        )

    def write(self, values, record) -> None:
        kinds = values["layers.ff"]
        record["moe_layers"] = [i for i, kind in enumerate(kinds) if kind == "moe"]
        values["layers.ff"] = ("moe",)


class SharedExpert(Setting):
    """The one shared expert, as wide as a routed one."""

    def read(self, config, values) -> None:
        values["moe.num_shared_experts"] = 1

    def write(self, values, record) -> None:
        num, d_expert = (
            values.pop("moe.num_shared_experts"),
            record["intermediate_size"],
        )
        width = values.pop("moe.d_shared")
        if not num or width != d_expert:
            raise inexpressible("moe.num_shared_experts", num, "1, as wide as others")


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer."""
    e, d, f = net.moe.num_experts, net.model.d_model, net.moe.d_expert
    at = "feed_forward."
    rows = [*shared.norms(net), *shared.attention(net, is_interleaved=True)]
    if not is_moe:
        return rows + shared.swiglu(net, at, net.model.d_ff)
    both, split = ("moe.gate_edf", "moe.up_edf"), Split(2, (f, f))
    return [
        *rows,
        shared.router(net, f"{at}router.weight"),
        Row((f"{at}experts.gate_up_proj",), (e, d, 2 * f), both, (split,)),
        Row((f"{at}experts.down_proj",), (e, f, d), ("moe.down_efd",)),
        *shared.swiglu(net, f"{at}shared_expert.", net.moe.shared_width),
    ]


FAMILY = Family(
    name="llama4_text",
    model_types=("llama4_text",),
    class_name="Llama4ForCausalLM",
    settings=shared.settings(
        Flag("attention_bias", "attention.bias", False, off="none", on="all"),
        Flag("use_qk_norm", "attention.l2_norm", True),
        Whole("intermediate_size", "moe.d_expert"),
        Whole("intermediate_size_mlp", "model.d_ff"),
        Whole("num_local_experts", "moe.num_experts", other_keys=("num_experts",)),
        Whole("num_experts_per_tok", "moe.top_k", 1),
        MoeLayers(),
        SharedExpert(),
        Constant("router.kind", "sigmoid"),
        Constant("router.normalise_gates", False),
        Constant("router.gate_input", True),
        eps=1e-5,
        heads=HeadDim(128),
        rope=RopeKeys(theta=500_000.0),
        attention=Layers(),
    ),
    layer=layer,
    text_prefix="language_model.",
    other_parts=("vision_model.", "multi_modal_projector."),
)
