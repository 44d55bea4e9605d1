"""Settings that say which layers are MoE layers, and how each attends.

They read and write the two tuples with an entry for each layer (fields.py).
"""

import dataclasses

from moejax.config.checks import MAX_LAYERS
from moejax.interop.settings import Setting, inexpressible

SLIDING = {"sliding_attention": "sliding", "full_attention": "full"}
CHUNKED = {"chunked_attention": "chunked", "full_attention": "full"}
"""Kinds of attention by the names in layer_types of GPT-OSS and of Llama-4."""


class FfLayers(Setting):
    """Kinds of layers by a rule, which says for each layer whether it is MoE."""

    def read(self, config, values) -> None:
        num_layers = values["model.num_layers"]
        is_moe = self.rule(config, num_layers)
        values["layers.ff"] = tuple(
            "moe" if is_moe(i) else "dense" for i in range(num_layers)
        )

    def write(self, values, record) -> None:
        kinds = values.pop("layers.ff")
        record |= self.keys([i for i, kind in enumerate(kinds) if kind == "moe"], kinds)

    def rule(self, config, num_layers):
        """Return a function from a layer's number to whether it is an MoE layer."""
        raise NotImplementedError

    def keys(self, places, kinds):
        """Return the keys that say that the layers at `places` are MoE layers."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class DensePrefix(FfLayers):
    """The number of dense layers before all others, which are MoE layers."""

    default: int

    def rule(self, config, num_layers):
        first = config.get("first_k_dense_replace", "count", self.default)
        return lambda i: i >= first

    def keys(self, places, kinds):
        if "dense" in kinds[places[0] :]:
            raise ValueError("a dense layer after an MoE layer: all must be before")
        return {"first_k_dense_replace": places[0]}


class SparseLayers(FfLayers):
    """Layer i of Qwen is an MoE layer if i + 1 is a multiple of decoder_sparse_step and
    i is not in mlp_only_layers."""

    def rule(self, config, num_layers):
        step = config.get("decoder_sparse_step", "whole", 1)
        names = {i: i for i in range(MAX_LAYERS)}
        dense = config.choices("mlp_only_layers", names, None) or ()
        return lambda i: (i + 1) % step == 0 and i not in dense

    def keys(self, places, kinds):
        step = places[0] + 1
        if places != list(range(step - 1, len(kinds), step)):
            step = 1
        dense = [i for i in range(step - 1, len(kinds), step) if kinds[i] == "dense"]
        return {"decoder_sparse_step": step, "mlp_only_layers": dense}


class LayersBetween(FfLayers):
    """Layer i of ERNIE is an MoE layer if i + 1 is a multiple of moe_layer_interval,
    and i is from moe_layer_start_index to moe_layer_end_index, where -1 is the last."""

    def rule(self, config, num_layers):
        start = config.get("moe_layer_start_index", "count", 1)
        end = config.get("moe_layer_end_index", "last layer", -1)
        step = config.get("moe_layer_interval", "whole", 1)
        last = num_layers - 1 if end == -1 else end
        return lambda i: (i + 1) % step == 0 and start <= i <= last

    def keys(self, places, kinds):
        start, end = places[0], places[-1]
        step = 1 if len(places) == 1 else places[1] - start
        if places != list(range(start, end + 1, step)) or (start + 1) % step:
            raise ValueError(
                f"Model.layers={kinds}: MoE layers must have equal distances, of which "
                "their numbers, from 1, are multiples"
            )
        return {
            "moe_layer_start_index": start,
            "moe_layer_end_index": end,
            "moe_layer_interval": step,
        }


class ListedLayers(FfLayers):
    """The MoE layers of Llama-4: those listed, or every n-th one."""

    def rule(self, config, num_layers):
        step = config.get("interleave_moe_layer_step", "whole", 1)
        names = {i: i for i in range(num_layers)}
        listed = config.choices("moe_layers", names, None)
        places = range(step - 1, num_layers, step) if listed is None else listed
        return lambda i: i in places

    def keys(self, places, kinds):
        return {"moe_layers": places}


class FullAttention(Setting):
    """Kinds of attention, in families that have full attention alone."""

    def read(self, config, values) -> None:
        names = {"full_attention": "full"}
        config.choices("layer_types", names, values["model.num_layers"])


class SlidingLayers(Setting):
    """Windows of GPT-OSS in the layers that layer_types says, or in every other one."""

    def read(self, config, values) -> None:
        num_layers = values["model.num_layers"]
        kinds = config.choices("layer_types", SLIDING, num_layers) or tuple(
            ("sliding", "full")[i % 2] for i in range(num_layers)
        )
        values["layers.attention"] = kinds
        config.take("sliding_window")
        if "sliding" in kinds:
            window = config.get("sliding_window", "whole", 128)
            values["attention.sliding_window"] = window

    def write(self, values, record) -> None:
        titles = {kind: title for title, kind in SLIDING.items()}
        kinds = values.pop("layers.attention")
        for kind in kinds:
            if kind not in titles:
                raise inexpressible("attention.layers", kind, f"one of {list(titles)}")
        record["layer_types"] = [titles[kind] for kind in kinds]
        record["sliding_window"] = values.pop("attention.sliding_window")


class ChunkedLayers(Setting):
    """Kinds of attention of Llama-4: chunks and RoPE, or neither."""

    def read(self, config, values) -> None:
        num_layers = values["model.num_layers"]
        step = config.get("no_rope_layer_interval", "whole", 4)
        if config.record.get("no_rope_layers") == []:  # as null, and as absent
            config.take("no_rope_layers")
            rope = None
        else:
            rope = config.choices("no_rope_layers", {0: 0, 1: 1}, num_layers)
        rope = rope or [int((i + 1) % step != 0) for i in range(num_layers)]
        kinds = config.choices("layer_types", CHUNKED, num_layers) or tuple(
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
            size = config.get("attention_chunk_size", "whole", 8192)
            values["attention.chunk_size"] = size
        is_tuned = bool(config.get("attn_temperature_tuning", "switch", True))
        scale = config.get("attn_scale", "number from 0", 0.1)
        floor = config.get("floor_scale", "whole", 8192)
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
