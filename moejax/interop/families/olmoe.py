"""OLMoE: QK-norm over all heads together, and queries, keys and values clipped."""

from moejax.config import Network
from moejax.interop.families import shared
from moejax.interop.families.shared import Family, Rows
from moejax.interop.settings import Constant, Flag, HeadDim, Number, Whole


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer."""
    return [
        *shared.norms(net),
        *shared.attention(net),
        shared.router(net, "mlp.gate.weight"),
        *shared.experts(net),
    ]


FAMILY = Family(
    name="olmoe",
    model_types=("olmoe",),
    class_name="OlmoeForCausalLM",
    settings=shared.settings(
        Flag("attention_bias", "attention.bias", False, off="none", on="all"),
        Number("clip_qkv", "attention.clip_qkv", None, null=None),
        Constant("model.qk_norm", "full"),
        Whole("intermediate_size", "moe.d_expert"),
        Whole("num_experts", "moe.num_experts", other_keys=("num_local_experts",)),
        Whole("num_experts_per_tok", "moe.top_k", 8),
        Flag("norm_topk_prob", "router.normalise_gates", False),
        eps=1e-5,
        heads=HeadDim(is_usual=False),
    ),
    layer=layer,
)
