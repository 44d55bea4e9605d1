"""Mixtral: grouped-query attention, and experts w1 (gate), w3 (up) and w2 (down)."""

from moejax.config import Network
from moejax.interop.families import shared
from moejax.interop.families.shared import Family, Rows
from moejax.interop.rope_json import RopeKeys
from moejax.interop.settings import Only, Whole


def layer(net: Network, is_moe: bool) -> Rows:
    """Return the rows of a layer."""
    return [
        *shared.norms(net),
        *shared.attention(net),
        shared.router(net, "block_sparse_moe.gate.weight"),
        *shared.experts(net, "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    ]


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    class_name="MixtralForCausalLM",
    settings=shared.settings(
        Only("sliding_window", ()),
        Whole("intermediate_size", "moe.d_expert"),
        Whole("num_local_experts", "moe.num_experts", other_keys=("num_experts",)),
        Whole("num_experts_per_tok", "moe.top_k", 2),
        eps=1e-5,
        rope=RopeKeys(theta=1e6),
    ),
    layer=layer,
)
