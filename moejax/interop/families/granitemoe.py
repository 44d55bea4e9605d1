"""Granite-MoE: multipliers, and experts in two tensors, gate before up."""

from moejax.config import Network
from moejax.interop.families import shared
from moejax.interop.families.shared import Family, Rows
from moejax.interop.settings import Flag, HeadDim, Number, Setting, Whole
from moejax.interop.table import Row, Split, Transpose

TURNED = Transpose((0, 2, 1))


class AttentionMultiplier(Setting):
    """The softmax scale, which is always given."""

    def read(self, config, values) -> None:
        values["attention.scale"] = config.number("attention_multiplier", 1.0)

    def write(self, values, record) -> None:
        width = record["hidden_size"] // record["num_attention_heads"]
        usual = record.get("head_dim", width) ** -0.5
        record["attention_multiplier"] = values.pop("attention.scale") or usual


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer."""
    e, d, f = net.moe.num_experts, net.model.d_model, net.moe.d_expert
    at = "block_sparse_moe."
    both = ("moe.gate_edf", "moe.up_edf")
    return [
        *shared.norms(net),
        *shared.attention(net),
        shared.router(net, f"{at}router.layer.weight"),
        Row(
            (f"{at}input_linear.weight",),
            (e, 2 * f, d),
            both,
            (Split(1, (f, f)), TURNED),
        ),
        Row((f"{at}output_linear.weight",), (e, d, f), ("moe.down_efd",), (TURNED,)),
    ]


FAMILY = Family(
    name="granitemoe",
    model_types=("granitemoe",),
    class_name="GraniteMoeForCausalLM",
    settings=shared.settings(
        Flag("attention_bias", "attention.bias", False, off="none", on="all"),
        AttentionMultiplier(),
        Number("embedding_multiplier", "model.embedding_multiplier", 1.0),
        Number("residual_multiplier", "model.residual_multiplier", 1.0),
        Number("logits_scaling", "model.logits_scaling", 1.0),
        Whole("intermediate_size", "moe.d_expert"),
        Whole("num_local_experts", "moe.num_experts", other_keys=("num_experts",)),
        Whole("num_experts_per_tok", "moe.top_k", 2),
        heads=HeadDim(is_usual=False),
    ),
    layer=layer,
)
