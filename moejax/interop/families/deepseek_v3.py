"""DeepSeek-V3 and R1, Moonlight, Kimi-K2: latent attention, sigmoid with a correction
bias, groups judged by their two best experts."""

from moejax.config import Network
from moejax.interop.families import deepseek, shared
from moejax.interop.families.deepseek import Groups
from moejax.interop.families.shared import Family, Rows
from moejax.interop.settings import Constant, Flag, Only


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer."""
    rows = deepseek.layer(net, is_moe)
    return [*rows, shared.correction_bias(net)] if is_moe else rows


FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2"),
    class_name="DeepseekV3ForCausalLM",
    settings=deepseek.settings(
        Only("scoring_func", ("sigmoid",)),
        Only("topk_method", ("noaux_tc",)),
        Only("rope_interleave", (True,)),
        Flag("norm_topk_prob", "router.normalise_gates", True),
        Constant("router.kind", "sigmoid"),
        first_k_dense=3,
        top_k=8,
        num_shared=1,
        gate_scale=2.5,
        groups=Groups(8, 4),
    ),
    layer=layer,
    has_extra_layers=True,
)
