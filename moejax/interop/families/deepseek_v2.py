"""DeepSeek-V2 and V2-Lite: latent attention, softmax, groups judged by their best
expert."""

from moejax.interop.config_json import REQUIRED
from moejax.interop.families import deepseek
from moejax.interop.families.deepseek import Groups
from moejax.interop.families.shared import Family
from moejax.interop.settings import Constant, Only, Setting

GREEDY, LIMITED = "greedy", "group_limited_greedy"


class Method(Setting):
    """The choice of experts: among all of them, or in the best groups."""

    def read(self, config, values) -> None:
        methods = {GREEDY: False, LIMITED: True}
        if not config.choice("topk_method", methods, False):
            values["router.num_groups"] = values["router.top_groups"] = 1

    def write(self, values, record) -> None:
        has_groups = record["n_group"] > 1
        if has_groups or record.get("topk_method") not in (GREEDY, LIMITED):
            record["topk_method"] = LIMITED if has_groups else GREEDY


FAMILY = Family(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    class_name="DeepseekV2ForCausalLM",
    settings=deepseek.settings(
        Method(),
        Only("scoring_func", ("softmax",)),
        Only("norm_topk_prob", (False,)),
        Only("mlp_bias", (False,)),
        Constant("router.kind", "softmax"),
        Constant("router.normalise_gates", False),
        first_k_dense=0,
        top_k=REQUIRED,
        num_shared=2,
        gate_scale=1.0,
        groups=Groups(),
    ),
    layer=deepseek.layer,
)
