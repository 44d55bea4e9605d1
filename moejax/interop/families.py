"""Families of published models: a table each, with settings (config.json) and rows
(tensors), both read in both directions. Families of dense models are read alone.

How tensors are read and written belongs in the other modules; a family is data.
"""

from collections.abc import Callable
from typing import NamedTuple

from moejax.config import Network
from moejax.interop.config_json import REQUIRED
from moejax.interop.layer_keys import (
    ChunkedLayers,
    DensePrefix,
    FullAttention,
    LayersBetween,
    ListedLayers,
    SlidingLayers,
    SparseLayers,
)
from moejax.interop.rope_json import RopeKeys
from moejax.interop.rows import (
    TURNED,
    Rows,
    Split,
    Squeeze,
    attention,
    experts,
    latent_attention,
    router,
    row,
    swiglu,
)
from moejax.interop.settings import (
    AttentionMultiplier,
    Constant,
    Flag,
    Groups,
    HeadDim,
    Ignored,
    Key,
    KeyHeads,
    NullAlone,
    OneSharedExpert,
    Only,
    Setting,
    SharedExperts,
    SmallestSum,
)

EMBEDDING, LAST_NORM, HEAD = (
    "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
)  # fmt: skip
BOTH = "moe.gate_edf moe.up_edf"


class Family(NamedTuple):
    """A family of published models."""

    name: str
    """The model_type that is written."""
    class_name: str
    """The class of transformers, which config.json names."""
    settings: tuple[Setting, ...]
    moe: Callable[[Network], Rows]
    """Rows of the router, the experts and the shared experts of an MoE layer."""
    other_types: tuple[str, ...] = ()
    """Other values of model_type."""
    dense: str = "mlp."
    """Beginning of the names of a dense SwiGLU."""
    is_interleaved: bool = False
    """Whether rotary pairs are neighbours on disk."""
    has_extra_layers: bool = False
    """Whether published files may have layers for multi-token prediction after the
    last one."""
    text_prefix: str = ""
    """Beginning of all names in files that have other parts too."""
    other_parts: tuple[str, ...] = ()
    """Beginnings of the names of those parts."""

    def layer(self, net: Network, is_moe: bool) -> Rows:
        """Return the rows of a layer of a network."""
        d = net.model.d_model
        rows = [
            row("input_layernorm.weight", (d,), "attention_norm.scale_d"),
            row("post_attention_layernorm.weight", (d,), "ff_norm.scale_d"),
        ]
        if net.is_latent:
            rows += latent_attention(net)
        else:
            rows += attention(net, self.is_interleaved)
        if is_moe:
            return rows + self.moe(net)
        return rows + swiglu(net, self.dense, net.model.d_ff)


def top_rows(net: Network) -> Rows:
    """Return the rows outside of layers."""
    v, d = net.model.vocab_size, net.model.d_model
    rows = [
        row(EMBEDDING, (v, d), "embed_vd"),
        row(LAST_NORM, (d,), "norm.scale_d"),
    ]
    if not net.model.tie_embeddings:
        rows.append(row(HEAD, (v, d), "head_vd"))
    return rows


def settings(
    *own: Setting,
    eps: float = 1e-6,
    heads: Setting | None = None,
    rope: Setting | None = None,
    attention: Setting | None = None,
    is_tied: bool = False,
) -> tuple[Setting, ...]:
    """Return the settings that all families have, and those of one."""
    return (
        Only("hidden_act", "silu"),
        Key("vocab_size", "model.vocab_size"),
        Key("hidden_size", "model.d_model"),
        Key("num_hidden_layers", "model.num_layers", rule="layers"),
        Key("num_attention_heads", "model.num_heads"),
        KeyHeads(),
        Key("rms_norm_eps", "model.norm_eps", eps, rule="number"),
        Flag("tie_word_embeddings", "model.tie_embeddings", is_tied),
        heads or HeadDim(),
        rope or RopeKeys(),
        attention or FullAttention(),
        *own,
    )


def deepseek_settings(
    *own: Setting, first_k_dense: int, top_k, num_shared: int, gate_scale: float
) -> tuple[Setting, ...]:
    """Return the settings that DeepSeek-V2 and V3 share, and `own`, those of one of
    them. The numbers are defaults."""
    return settings(
        Only("attention_bias", False),
        Key("kv_lora_rank", "mla.kv_lora_rank", 512),
        Key("q_lora_rank", "mla.q_lora_rank", 1536, null=None),
        Key("qk_nope_head_dim", "mla.qk_nope_head_dim", 128),
        Key("qk_rope_head_dim", "mla.qk_rope_head_dim", 64),
        Key("v_head_dim", "mla.v_head_dim", 128),
        Constant("mla.norm_eps", 1e-6),
        *dense_and_experts("n_routed_experts", "num_local_experts"),
        Key("num_experts_per_tok", "moe.top_k", top_k),
        SharedExperts("n_shared_experts", num_shared),
        DensePrefix(first_k_dense),
        Only("moe_layer_freq", 1),
        Key("routed_scaling_factor", "router.gate_scale", gate_scale, rule="number"),
        *own,
        heads=Ignored(("head_dim", "qk_head_dim")),
        rope=RopeKeys(has_mscale=True),
    )


def dense_and_experts(*names: str) -> tuple[Setting, ...]:
    """Return the settings of widths where layers may be dense, and of the number of
    experts under these names."""
    return (
        Key("intermediate_size", "model.d_ff"),
        Key("moe_intermediate_size", "moe.d_expert"),
        Key(names[0], "moe.num_experts", others=names[1:]),
    )


def experts_alone(*names: str) -> tuple[Setting, ...]:
    """Return the settings of the width where all layers are MoE layers, and of the
    number of experts under these names."""
    return (
        Key("intermediate_size", "moe.d_expert"),
        Key(names[0], "moe.num_experts", others=names[1:]),
    )


SIGMOID = (
    Only("scoring_func", "sigmoid"),
    Only("topk_method", "noaux_tc"),
    Flag("norm_topk_prob", "router.normalise_gates", True),
    Constant("router.kind", "sigmoid"),
)
"""The router of DeepSeek-V3."""
NO_WINDOW = (
    Only("use_sliding_window", False),
    Ignored(("sliding_window", "max_window_layers")),
)


def plain_moe(net: Network) -> Rows:
    """Return the rows of OLMoE and others: a router and experts."""
    return [router(net), *experts(net)]


def shared_moe(net: Network) -> Rows:
    """Return the rows of router, experts and shared experts of DeepSeek and others."""
    rows = [router(net), *experts(net)]
    if net.moe.num_shared_experts:
        rows += swiglu(net, "mlp.shared_experts.", net.moe.shared_width)
    return rows


def corrected_moe(net: Network) -> Rows:
    """Return the rows of `shared_moe`, and of the bias that moves the choice of experts
    and not their gates."""
    bias = "mlp.gate.e_score_correction_bias"
    return [*shared_moe(net), row(bias, (net.moe.num_experts,), "moe.bias_e")]


def mixtral_moe(net: Network) -> Rows:
    """Return the rows of experts w1 (gate), w3 (up) and w2 (down)."""
    at = "block_sparse_moe."
    own = experts(net, f"{at}experts.{{}}.", ("w1", "w3", "w2"))
    return [router(net, f"{at}gate"), *own]


def qwen2_moe(net: Network) -> Rows:
    """Return the rows with a shared expert that has a gate."""
    gate = "mlp.shared_expert_gate.weight"
    return [
        *plain_moe(net),
        *swiglu(net, "mlp.shared_expert.", net.moe.shared_width),
        row(gate, (1, net.model.d_model), "shared_gate_d", Squeeze()),
    ]


def granite_moe(net: Network) -> Rows:
    """Return the rows of experts in two tensors, gate before up."""
    e, d, f = net.moe.num_experts, net.model.d_model, net.moe.d_expert
    at, split = "block_sparse_moe.", Split(1, (f, f))
    return [
        router(net, f"{at}router.layer"),
        row(f"{at}input_linear.weight", (e, 2 * f, d), BOTH, split, TURNED),
        row(f"{at}output_linear.weight", (e, d, f), "moe.down_efd", TURNED),
    ]


def ernie_moe(net: Network) -> Rows:
    """Return the rows with a correction bias [1, e]."""
    bias = "mlp.moe_statics.e_score_correction_bias"
    shape = (1, net.moe.num_experts)
    return [*shared_moe(net), row(bias, shape, "moe.bias_e", Squeeze())]


def gpt_oss_moe(net: Network) -> Rows:
    """Return the rows of experts whose gate and up columns alternate, and their
    biases."""
    e, d, f = net.moe.num_experts, net.model.d_model, net.moe.d_expert
    at, biases = "mlp.experts.", "moe.gate_bias_ef moe.up_bias_ef"
    columns, entries = (Split(dim, (f, f), in_turns=True) for dim in (2, 1))
    return [
        router(net, "mlp.router"),
        row("mlp.router.bias", (e,), "moe.logit_bias_e"),
        row(f"{at}gate_up_proj", (e, d, 2 * f), BOTH, columns),
        row(f"{at}gate_up_proj_bias", (e, 2 * f), biases, entries),
        row(f"{at}down_proj", (e, f, d), "moe.down_efd"),
        row(f"{at}down_proj_bias", (e, d), "moe.down_bias_ew"),
    ]


def llama4_moe(net: Network) -> Rows:
    """Return the rows of experts in two tensors, and of a shared expert."""
    e, d, f = net.moe.num_experts, net.model.d_model, net.moe.d_expert
    at = "feed_forward."
    return [
        router(net, f"{at}router"),
        row(f"{at}experts.gate_up_proj", (e, d, 2 * f), BOTH, Split(2, (f, f))),
        row(f"{at}experts.down_proj", (e, f, d), "moe.down_efd"),
        *swiglu(net, f"{at}shared_expert.", net.moe.shared_width),
    ]


GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
_ALL = {"off": "none", "on": "all"}
_QKV = {"off": "none", "on": "qkv"}

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    settings(
        Only("sliding_window", None),
        *experts_alone("num_local_experts", "num_experts"),
        Key("num_experts_per_tok", "moe.top_k", 2),
        eps=1e-5,
        rope=RopeKeys(theta=1e6),
    ),
    mixtral_moe,
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    settings(
        Flag("attention_bias", "attention.bias", False, **_ALL),
        Key("clip_qkv", "attention.clip_qkv", None, null=None, rule="number"),
        Constant("model.qk_norm", "full"),
        *experts_alone("num_experts", "num_local_experts"),
        Key("num_experts_per_tok", "moe.top_k", 8),
        Flag("norm_topk_prob", "router.normalise_gates", False),
        eps=1e-5,
        heads=HeadDim(is_usual=False),
    ),
    plain_moe,
)
QWEN3 = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    settings(
        Flag("attention_bias", "attention.bias", False, **_ALL),
        *NO_WINDOW,
        Constant("model.qk_norm", "head"),
        *dense_and_experts("num_experts", "num_local_experts"),
        Key("num_experts_per_tok", "moe.top_k", 8),
        Flag("norm_topk_prob", "router.normalise_gates", False),
        SparseLayers(),
    ),
    plain_moe,
)
QWEN2 = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    settings(
        Flag("qkv_bias", "attention.bias", True, **_QKV),
        *NO_WINDOW,
        *dense_and_experts("num_experts", "num_local_experts"),
        OneSharedExpert("shared_expert_intermediate_size"),
        Constant("moe.shared_gate", True),
        Key("num_experts_per_tok", "moe.top_k", 4),
        Flag("norm_topk_prob", "router.normalise_gates", False),
        SparseLayers(),
        heads=HeadDim(is_usual=False),
    ),
    qwen2_moe,
)
GRANITE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    settings(
        Flag("attention_bias", "attention.bias", False, **_ALL),
        AttentionMultiplier(),
        *(
            Key(name, f"model.{name}", 1.0, rule="number")
            for name in (
                "embedding_multiplier",
                "residual_multiplier",
                "logits_scaling",
            )
        ),
        *experts_alone("num_local_experts", "num_experts"),
        Key("num_experts_per_tok", "moe.top_k", 2),
        heads=HeadDim(is_usual=False),
    ),
    granite_moe,
)
GLM4 = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    settings(
        Flag("attention_bias", "attention.bias", False, **_QKV),
        Flag("use_qk_norm", "model.qk_norm", False, off="none", on="head"),
        *dense_and_experts("n_routed_experts", "num_local_experts"),
        Key("num_experts_per_tok", "moe.top_k", 8),
        SharedExperts("n_shared_experts", 1),
        DensePrefix(1),
        Only("moe_layer_freq", 1),
        *SIGMOID,
        Key("routed_scaling_factor", "router.gate_scale", 1.0, rule="number"),
        Groups(),
        eps=1e-5,
        rope=RopeKeys(partial=0.5),
    ),
    corrected_moe,
    has_extra_layers=True,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    deepseek_settings(
        *SIGMOID,
        Only("rope_interleave", True),
        Groups(8, 4),
        first_k_dense=3,
        top_k=8,
        num_shared=1,
        gate_scale=2.5,
    ),
    corrected_moe,
    other_types=("kimi_k2",),
    has_extra_layers=True,
)
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    deepseek_settings(
        Groups(can_be_greedy=True),
        Only("scoring_func", "softmax"),
        Only("norm_topk_prob", False),
        Only("mlp_bias", False),
        Constant("router.kind", "softmax"),
        Constant("router.normalise_gates", False),
        first_k_dense=0,
        top_k=REQUIRED,
        num_shared=2,
        gate_scale=1.0,
    ),
    shared_moe,
)
ERNIE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    settings(
        Only("use_bias", False),
        Only("moe_gate", "topk", is_written=False),
        Only("moe_use_aux_free", True, is_written=False),
        Only("use_rmsnorm", True, is_written=False),
        Ignored(("moe_capacity",)),
        SmallestSum(),
        *dense_and_experts("moe_num_experts", "num_experts"),
        Key("moe_k", "moe.top_k", 6, others=("num_experts_per_tok",)),
        SharedExperts("moe_num_shared_experts", 2),
        LayersBetween(),
        eps=1e-5,
        heads=HeadDim(is_usual=False),
        rope=RopeKeys(theta=500_000.0),
        is_tied=True,
    ),
    ernie_moe,
    is_interleaved=True,
    has_extra_layers=True,
)
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    settings(
        Only("attention_bias", True),
        Constant("attention.bias", "all"),
        Constant("attention.sinks", True),
        *experts_alone("num_local_experts", "num_experts"),
        Key("num_experts_per_tok", "moe.top_k", 4, others=("experts_per_token",)),
        Key("swiglu_limit", "moe.swiglu_limit", 7.0, rule="number"),
        Key("swiglu_alpha", "moe.swiglu_alpha", 1.702, rule="number"),
        Constant("moe.activation", "clamped_swiglu"),
        Constant("moe.expert_bias", True),
        Constant("router.bias", True),
        eps=1e-5,
        heads=HeadDim(64),
        rope=RopeKeys(theta=150_000.0, missing=GPT_OSS_YARN),
        attention=SlidingLayers(),
    ),
    gpt_oss_moe,
)
LLAMA4 = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    settings(
        Flag("attention_bias", "attention.bias", False, **_ALL),
        Flag("use_qk_norm", "attention.l2_norm", True),
        *experts_alone("num_local_experts", "num_experts"),
        Key("intermediate_size_mlp", "model.d_ff"),
        Key("num_experts_per_tok", "moe.top_k", 1),
        ListedLayers(),
        OneSharedExpert(),
        Constant("router.kind", "sigmoid"),
        Constant("router.normalise_gates", False),
        Constant("router.gate_input", True),
        eps=1e-5,
        heads=HeadDim(128),
        rope=RopeKeys(theta=500_000.0),
        attention=ChunkedLayers(),
    ),
    llama4_moe,
    dense="feed_forward.",
    is_interleaved=True,
    text_prefix="language_model.",
    other_parts=("vision_model.", "multi_modal_projector."),
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        MIXTRAL, OLMOE, QWEN3, QWEN2, GRANITE, GLM4, DEEPSEEK_V3, DEEPSEEK_V2, ERNIE,
        GPT_OSS, LLAMA4,
    )
}  # fmt: skip
"""Families by name, in the order in which one is looked for that can express a
network."""


class DenseFamily(NamedTuple):
    """A family of dense models, which upcycling reads (upcycle.py)."""

    name: str
    """The model_type that is read."""
    settings: tuple[Setting, ...]
    """All settings but the width of the MLP and what experts are made of it. Their
    constants are those of `becomes` too."""
    becomes: Family
    """The family that says all that these models compute, and experts."""


NULL_SHARED_WIDTH = 64
"""Width of a shared expert of zeros: few weights, which meshes can divide."""

LLAMA = DenseFamily(
    "llama",
    settings(Only("attention_bias", False), Only("mlp_bias", False)),
    MIXTRAL,
)
MISTRAL = DenseFamily("mistral", settings(NullAlone("sliding_window")), MIXTRAL)
QWEN2_DENSE = DenseFamily(
    "qwen2",
    settings(
        *NO_WINDOW,
        Constant("attention.bias", "qkv"),
        Constant("moe.num_shared_experts", 1),
        Constant("moe.d_shared", NULL_SHARED_WIDTH),
        Constant("moe.shared_gate", True),
        heads=HeadDim(is_usual=False),
    ),
    QWEN2,
)
QWEN3_DENSE = DenseFamily(
    "qwen3",
    settings(
        Flag("attention_bias", "attention.bias", False, **_ALL),
        *NO_WINDOW,
        Constant("model.qk_norm", "head"),
        heads=HeadDim(128),
    ),
    QWEN3,
)

DENSE: dict[str, DenseFamily] = {
    family.name: family for family in (LLAMA, MISTRAL, QWEN2_DENSE, QWEN3_DENSE)
}
"""Families of dense models by name."""
