"""Parts that DeepSeek-V2 and DeepSeek-V3 share: latent attention, a dense prefix, and
shared experts."""

import dataclasses
from typing import Any

from moejax.config import Network
from moejax.interop.families import shared
from moejax.interop.families.shared import Rows
from moejax.interop.rope_json import RopeKeys
from moejax.interop.settings import (
    Constant,
    DensePrefix,
    Ignored,
    Number,
    Only,
    Setting,
    SharedExperts,
    Whole,
)


@dataclasses.dataclass(frozen=True)
class Groups(Setting):
    """The groups of experts that a choice is limited to; null is one group."""

    num_groups: int = 1
    """Number of groups if it is not given."""
    top_groups: int = 1

    def read(self, config, values) -> None:
        values["router.num_groups"] = config.whole("n_group", self.num_groups, 1)
        values["router.top_groups"] = config.whole("topk_group", self.top_groups, 1)

    def write(self, values, record) -> None:
        record["n_group"] = values.pop("router.num_groups")
        record["topk_group"] = values.pop("router.top_groups")


def settings(
    *own: Setting,
    first_k_dense: int,
    top_k: Any,
    num_shared: int,
    gate_scale: float,
    groups: Groups,
) -> tuple[Setting, ...]:
    """Return the settings of both, and those of one. The numbers are defaults."""
    return shared.settings(
        Only("attention_bias", (False,)),
        Whole("kv_lora_rank", "mla.kv_lora_rank", 512),
        Whole("q_lora_rank", "mla.q_lora_rank", 1536, null=None),
        Whole("qk_nope_head_dim", "mla.qk_nope_head_dim", 128),
        Whole("qk_rope_head_dim", "mla.qk_rope_head_dim", 64),
        Whole("v_head_dim", "mla.v_head_dim", 128),
        Constant("mla.norm_eps", 1e-6),
        Ignored("qk_head_dim"),
        Whole("intermediate_size", "model.d_ff"),
        Whole("moe_intermediate_size", "moe.d_expert"),
        Whole("n_routed_experts", "moe.num_experts", other_keys=("num_local_experts",)),
        Whole("num_experts_per_tok", "moe.top_k", top_k),
        SharedExperts("n_shared_experts", num_shared),
        DensePrefix("first_k_dense_replace", first_k_dense),
        Only("moe_layer_freq", (1,)),
        Number("routed_scaling_factor", "router.gate_scale", gate_scale),
        groups,
        *own,
        heads=Ignored("head_dim"),
        rope=RopeKeys(has_mscale=True),
    )


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer without a correction bias."""
    rows = [*shared.norms(net), *shared.latent_attention(net)]
    if not is_moe:
        return rows + shared.swiglu(net, "mlp.", net.model.d_ff)
    return rows + shared.moe_with_shared(net)
