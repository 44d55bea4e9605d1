"""Qwen2-MoE (Qwen1.5-MoE too): biases on queries, keys and values, and a shared expert
of its own width with a gate."""

from moejax.config import Network
from moejax.interop.families import shared
from moejax.interop.families.qwen import SparseLayers
from moejax.interop.families.shared import Family, Rows
from moejax.interop.settings import (
    Constant,
    Flag,
    HeadDim,
    Ignored,
    Only,
    Setting,
    Whole,
    inexpressible,
)
from moejax.interop.table import Row, Squeeze


class SharedExpert(Setting):
    """The width of the shared experts, which are one."""

    def read(self, config, values) -> None:
        values["moe.num_shared_experts"] = 1
        width = config.whole("shared_expert_intermediate_size")
        values["moe.d_shared"] = width

    def write(self, values, record) -> None:
        if not values.pop("moe.num_shared_experts"):
            raise inexpressible("moe.num_shared_experts", 0, "1 or more")
        record["shared_expert_intermediate_size"] = values.pop("moe.d_shared")


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer."""
    rows = [*shared.norms(net), *shared.attention(net)]
    if not is_moe:
        return rows + shared.swiglu(net, "mlp.", net.model.d_ff)
    gate = "mlp.shared_expert_gate.weight"
    return [
        *rows,
        shared.router(net, "mlp.gate.weight"),
        *shared.experts(net),
        *shared.swiglu(net, "mlp.shared_expert.", net.moe.shared_width),
        Row((gate,), (1, net.model.d_model), ("shared_gate_d",), (Squeeze(),)),
    ]


FAMILY = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    class_name="Qwen2MoeForCausalLM",
    settings=shared.settings(
        Flag("qkv_bias", "attention.bias", True, off="none", on="qkv"),
        Only("use_sliding_window", (False,)),
        Ignored("sliding_window"),
        Ignored("max_window_layers"),
        Whole("intermediate_size", "model.d_ff"),
        Whole("moe_intermediate_size", "moe.d_expert"),
        SharedExpert(),
        Constant("moe.shared_gate", True),
        Whole("num_experts", "moe.num_experts", other_keys=("num_local_experts",)),
        Whole("num_experts_per_tok", "moe.top_k", 4),
        Flag("norm_topk_prob", "router.normalise_gates", False),
        SparseLayers(),
        heads=HeadDim(is_usual=False),
    ),
    layer=layer,
)
