"""GLM-4.5: grouped-query attention with RoPE on a part of a head, and the router of
DeepSeek-V3."""

from moejax.config import Network
from moejax.interop.families import shared
from moejax.interop.families.deepseek import Groups
from moejax.interop.families.shared import Family, Rows
from moejax.interop.rope_json import RopeKeys
from moejax.interop.settings import (
    Constant,
    DensePrefix,
    Flag,
    Number,
    Only,
    SharedExperts,
    Whole,
)


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer."""
    rows = [*shared.norms(net), *shared.attention(net)]
    if not is_moe:
        return rows + shared.swiglu(net, "mlp.", net.model.d_ff)
    return [*rows, *shared.moe_with_shared(net), shared.correction_bias(net)]


FAMILY = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    class_name="Glm4MoeForCausalLM",
    settings=shared.settings(
        Flag("attention_bias", "attention.bias", False, off="none", on="qkv"),
        Flag("use_qk_norm", "model.qk_norm", False, off="none", on="head"),
        Whole("intermediate_size", "model.d_ff"),
        Whole("moe_intermediate_size", "moe.d_expert"),
        Whole("n_routed_experts", "moe.num_experts", other_keys=("num_local_experts",)),
        Whole("num_experts_per_tok", "moe.top_k", 8),
        SharedExperts("n_shared_experts", 1),
        DensePrefix("first_k_dense_replace", 1),
        Only("moe_layer_freq", (1,)),
        Only("scoring_func", ("sigmoid",)),
        Only("topk_method", ("noaux_tc",)),
        Number("routed_scaling_factor", "router.gate_scale", 1.0),
        Groups(),
        Flag("norm_topk_prob", "router.normalise_gates", True),
        Constant("router.kind", "sigmoid"),
        eps=1e-5,
        rope=RopeKeys(is_partial=True, partial=0.5),
    ),
    layer=layer,
    has_extra_layers=True,
)
