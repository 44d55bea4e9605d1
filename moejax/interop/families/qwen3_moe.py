"""Qwen3-MoE: QK-norm for each head, and a head width of its own."""

from moejax.config import Network
from moejax.interop.families import shared
from moejax.interop.families.qwen import SparseLayers
from moejax.interop.families.shared import Family, Rows
from moejax.interop.settings import Constant, Flag, Ignored, Only, Whole


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer."""
    rows = [*shared.norms(net), *shared.attention(net)]
    if not is_moe:
        return rows + shared.swiglu(net, "mlp.", net.model.d_ff)
    return [*rows, shared.router(net, "mlp.gate.weight"), *shared.experts(net)]


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    class_name="Qwen3MoeForCausalLM",
    settings=shared.settings(
        Flag("attention_bias", "attention.bias", False, off="none", on="all"),
        Only("use_sliding_window", (False,)),
        Ignored("sliding_window"),
        Ignored("max_window_layers"),
        Constant("model.qk_norm", "head"),
        Whole("intermediate_size", "model.d_ff"),
        Whole("moe_intermediate_size", "moe.d_expert"),
        Whole("num_experts", "moe.num_experts", other_keys=("num_local_experts",)),
        Whole("num_experts_per_tok", "moe.top_k", 8),
        Flag("norm_topk_prob", "router.normalise_gates", False),
        SparseLayers(),
    ),
    layer=layer,
)
