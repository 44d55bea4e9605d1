"""GPT-OSS: sinks, windows, biases everywhere, and experts whose gate and up columns are
interleaved."""

from moejax.config import Network
from moejax.interop.families import shared
from moejax.interop.families.shared import Family, Rows
from moejax.interop.rope_json import RopeKeys
from moejax.interop.settings import (
    Constant,
    HeadDim,
    Number,
    Only,
    Setting,
    Whole,
    inexpressible,
)
from moejax.interop.table import Permute, Row, Split

KINDS = {"sliding_attention": "sliding", "full_attention": "full"}
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


class Layers(Setting):
    """Windows in the layers that layer_types says, or in every other one."""

    def read(self, config, values) -> None:
        num_layers = values["model.num_layers"]
        kinds = config.names("layer_types", KINDS, num_layers) or tuple(
            ("sliding", "full")[i % 2] for i in range(num_layers)
        )
        values["layers.attention"] = kinds
        config.take("sliding_window")
        if "sliding" in kinds:
            values["attention.sliding_window"] = config.whole("sliding_window", 128)

    def write(self, values, record) -> None:
        titles = {kind: title for title, kind in KINDS.items()}
        kinds = values.pop("layers.attention")
        for kind in kinds:
            if kind not in titles:
                raise inexpressible("attention.layers", kind, f"one of {list(titles)}")
        record["layer_types"] = [titles[kind] for kind in kinds]
        record["sliding_window"] = values.pop("attention.sliding_window")


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer."""
    e, d, f = net.moe.num_experts, net.model.d_model, net.moe.d_expert
    columns = (*range(0, 2 * f, 2), *range(1, 2 * f, 2))

    def fused(name, shape, params):
        dim = len(shape) - 1
        steps = (Permute(dim, columns), Split(dim, (f, f)))
        return Row((f"mlp.experts.{name}",), shape, params, steps)

    def plain(name, shape, param):
        return Row((f"mlp.experts.{name}",), shape, (param,))

    biases = ("moe.gate_bias_ef", "moe.up_bias_ef")
    return [
        *shared.norms(net),
        *shared.attention(net),
        shared.router(net, "mlp.router.weight"),
        shared.vector("mlp.router.bias", e, "moe.logit_bias_e"),
        fused("gate_up_proj", (e, d, 2 * f), ("moe.gate_edf", "moe.up_edf")),
        fused("gate_up_proj_bias", (e, 2 * f), biases),
        plain("down_proj", (e, f, d), "moe.down_efd"),
        plain("down_proj_bias", (e, d), "moe.down_bias_ew"),
    ]


FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    class_name="GptOssForCausalLM",
    settings=shared.settings(
        Only("attention_bias", (True,)),
        Constant("attention.bias", "all"),
        Constant("attention.sinks", True),
        Whole("intermediate_size", "moe.d_expert"),
        Whole("num_local_experts", "moe.num_experts", other_keys=("num_experts",)),
        Whole("num_experts_per_tok", "moe.top_k", 4, other_keys=("experts_per_token",)),
        Number("swiglu_limit", "moe.swiglu_limit", 7.0),
        Number("swiglu_alpha", "moe.swiglu_alpha", 1.702),
        Constant("moe.activation", "clamped_swiglu"),
        Constant("moe.expert_bias", True),
        Constant("router.bias", True),
        eps=1e-5,
        heads=HeadDim(64),
        rope=RopeKeys(theta=150_000.0, missing=YARN),
        attention=Layers(),
    ),
    layer=layer,
)
