"""ERNIE 4.5: interleaved RoPE, softmax with a correction bias, shared experts."""

from moejax.config import Network
from moejax.interop.families import shared
from moejax.interop.families.shared import Family, Rows
from moejax.interop.rope_json import RopeKeys
from moejax.interop.settings import (
    HeadDim,
    Ignored,
    Only,
    Setting,
    SharedExperts,
    Whole,
)
from moejax.interop.table import Squeeze

MAX_NORM = 1e-6
"""Largest moe_norm_min that no sum of gates is below: the gates of top_k experts sum to
at least top_k / num_experts."""


class MoeLayers(Setting):
    """Layer i is an MoE layer if i + 1 is a multiple of moe_layer_interval, and i is
    from moe_layer_start_index to moe_layer_end_index, where -1 is the last layer."""

    def read(self, config, values) -> None:
        num_layers = values["model.num_layers"]
        start = config.whole("moe_layer_start_index", 1, least=0)
        end = config.whole("moe_layer_end_index", -1, least=-1)
        step = config.whole("moe_layer_interval", 1)
        last = num_layers - 1 if end == -1 else end
        values["layers.ff"] = tuple(
            "moe" if (i + 1) % step == 0 and start <= i <= last else "dense"
            for i in range(num_layers)
        )

    def write(self, values, record) -> None:
        kinds = values["layers.ff"]
        places = [i for i, kind in enumerate(kinds) if kind == "moe"]
        start, end = places[0], places[-1]
        step = 1 if len(places) == 1 else places[1] - start
        if places != list(range(start, end + 1, step)) or (start + 1) % step:
            raise ValueError(
                f"Model.layers={kinds}: MoE layers must have equal distances, of which "
                "their numbers, from 1, are multiples"
            )
        record |= {
            "moe_layer_start_index": start,
            "moe_layer_end_index": end,
            "moe_layer_interval": step,
        }
        values["layers.ff"] = ("moe",)


class SmallestSum(Setting):
    """The least sum by which gates are divided, which no sum is below."""

    def read(self, config, values) -> None:
        least = config.number("moe_norm_min", 1e-12, above=False)
        if least > MAX_NORM:
            raise config.error("moe_norm_min", f"must be at most {MAX_NORM:g}")

    def write(self, values, record) -> None:
        record.setdefault("moe_norm_min", 1e-12)


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer."""
    rows = [*shared.norms(net), *shared.attention(net, is_interleaved=True)]
    if not is_moe:
        return rows + shared.swiglu(net, "mlp.", net.model.d_ff)
    bias = shared.correction_bias(net, "mlp.moe_statics.", (1,), (Squeeze(),))
    return [*rows, *shared.moe_with_shared(net), bias]


FAMILY = Family(
    name="ernie4_5_moe",
    model_types=("ernie4_5_moe",),
    class_name="Ernie4_5_MoeForCausalLM",
    settings=shared.settings(
        Only("use_bias", (False,)),
        Only("moe_gate", ("topk",), is_written=False),
        Only("moe_use_aux_free", (True,), is_written=False),
        Only("use_rmsnorm", (True,), is_written=False),
        Ignored("moe_capacity"),
        SmallestSum(),
        Whole("intermediate_size", "model.d_ff"),
        Whole("moe_intermediate_size", "moe.d_expert"),
        Whole("moe_num_experts", "moe.num_experts", other_keys=("num_experts",)),
        Whole("moe_k", "moe.top_k", 6, other_keys=("num_experts_per_tok",)),
        SharedExperts("moe_num_shared_experts", 2),
        MoeLayers(),
        eps=1e-5,
        heads=HeadDim(is_usual=False),
        rope=RopeKeys(theta=500_000.0),
        is_tied=True,
    ),
    layer=layer,
    has_extra_layers=True,
)
