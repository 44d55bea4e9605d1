"""Settings and rows of tensors that families share.

Dims of tensors on disk, [out, in] for products:

    v vocabulary    d model    h, g query and key heads    i width of a head
    e experts       f hidden width of an expert or of a dense part
"""

from collections.abc import Callable
from typing import NamedTuple

from moejax.config import Network
from moejax.interop.rope_json import RopeKeys
from moejax.interop.settings import (
    Flag,
    FullAttention,
    HeadDim,
    Number,
    Only,
    Setting,
    Whole,
)
from moejax.interop.table import Row, Split, Stack, Step, Transpose, half_split

TRANSPOSE = Transpose()
STACK_TRANSPOSED = (Stack(), Transpose((0, 2, 1)))
"""Steps of a tensor for each expert, [out, in]."""

Rows = list[Row]


class Family(NamedTuple):
    """A family of published models."""

    name: str
    """The model_type that is written."""
    model_types: tuple[str, ...]
    """Values of model_type in config.json."""
    class_name: str
    """The class of transformers, which config.json names."""
    settings: tuple[Setting, ...]
    layer: Callable[[Network, bool], Rows]
    """Rows of a layer of a network, which is an MoE layer or a dense one."""
    top: tuple[str, str, str] = (
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    )  # fmt: skip
    """Names of the embedding, the last norm and the head."""
    layer_name: str = "model.layers.{}."
    """Beginning of the names of a layer."""
    has_extra_layers: bool = False
    """Whether published files may have layers for multi-token prediction after the
    last one."""
    text_prefix: str = ""
    """Beginning of all names in files that have other parts too."""
    other_parts: tuple[str, ...] = ()
    """Beginnings of the names of those parts."""


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
        Only("hidden_act", ("silu",)),
        Whole("vocab_size", "model.vocab_size"),
        Whole("hidden_size", "model.d_model"),
        Whole("num_hidden_layers", "model.num_layers"),
        Whole("num_attention_heads", "model.num_heads"),
        KeyHeads(),
        Number("rms_norm_eps", "model.norm_eps", eps),
        Flag("tie_word_embeddings", "model.tie_embeddings", is_tied),
        heads or HeadDim(),
        rope or RopeKeys(),
        attention or FullAttention(),
        *own,
    )


class KeyHeads(Setting):
    """The number of key heads: that of query heads if it is not given."""

    def read(self, config, values) -> None:
        num_heads = values["model.num_heads"]
        values["model.num_kv_heads"] = config.whole(
            "num_key_value_heads", num_heads, num_heads
        )

    def write(self, values, record) -> None:
        record["num_key_value_heads"] = values.pop("model.num_kv_heads")


def linear(
    name: str, out: int, into: int, param: str, *steps: Step, has_bias: str = ""
) -> Rows:
    """Return the row of a product [out, in], which is ours transposed, and of its bias
    if `has_bias` names ours. `steps` act on dim 0, before it is transposed."""
    rows = [Row((f"{name}.weight",), (out, into), (param,), (*steps, TRANSPOSE))]
    if has_bias:
        rows.append(Row((f"{name}.bias",), (out,), (has_bias,), steps))
    return rows


def vector(name: str, width: int, param: str) -> Row:
    """Return the row of a vector that is the same on both sides."""
    return Row((name,), (width,), (param,))


def norms(net: Network) -> Rows:
    """Return the rows of the two norms of a layer."""
    d = net.model.d_model
    return [
        vector("input_layernorm.weight", d, "attention_norm.scale_d"),
        vector("post_attention_layernorm.weight", d, "ff_norm.scale_d"),
    ]


def attention(net: Network, is_interleaved: bool = False) -> Rows:
    """Return the rows of grouped-query attention. In an interleaved model the rotary
    pairs of a head are neighbours."""
    model, options, at = net.model, net.attention, "self_attn."
    d, h, g, i = model.d_model, model.num_heads, model.num_kv_heads, model.head_dim
    has_bias, has_all = options.bias != "none", options.bias == "all"
    rows: Rows = []
    for letter, num, is_turned, param, bias in (
        ("q", h, True, "q_dhi", "q_bias_hi"),
        ("k", g, True, "k_dgi", "k_bias_gi"),
        ("v", g, False, "v_dgi", "v_bias_gi"),
    ):
        steps = (half_split(num, i),) if is_interleaved and is_turned else ()
        rows += linear(
            f"{at}{letter}_proj", num * i, d, f"attention.{param}", *steps,
            has_bias=f"attention.{bias}" if has_bias else "",
        )  # fmt: skip
    rows += linear(
        f"{at}o_proj", d, h * i, "attention.out_hid",
        has_bias="attention.out_bias_d" if has_all else "",
    )  # fmt: skip
    if model.qk_norm != "none":
        widths = (i, i) if model.qk_norm == "head" else (h * i, g * i)
        for letter, width in zip("qk", widths):
            param = f"attention.{letter}_norm.scale_d"
            rows.append(vector(f"{at}{letter}_norm.weight", width, param))
    if options.sinks:
        rows.append(vector(f"{at}sinks", h, "attention.sinks_h"))
    return rows


def latent_attention(net: Network) -> Rows:
    """Return the rows of multi-head latent attention, whose rotary pairs are
    neighbours."""
    mla, at, d, h = net.mla, "self_attn.", net.model.d_model, net.model.num_heads
    c, r, rope = mla.kv_lora_rank, mla.q_lora_rank, mla.qk_rope_head_dim
    turn_queries = half_split(h, net.query_dim, rope)
    compressed = Row(
        (f"{at}kv_a_proj_with_mqa.weight",),
        (c + rope, d),
        ("attention.kv_a_dc", "attention.k_rope_di"),
        (half_split(1, c + rope, rope), Split(0, (c, rope)), TRANSPOSE),
    )
    rows = [
        compressed,
        vector(f"{at}kv_a_layernorm.weight", c, "attention.kv_a_norm.scale_d"),
        *linear(
            f"{at}kv_b_proj",
            h * (mla.qk_nope_head_dim + mla.v_head_dim),
            c,
            "attention.kv_b_chj",
        ),
        *linear(f"{at}o_proj", d, h * mla.v_head_dim, "attention.out_hjd"),
    ]
    if r is None:
        name, width, param = "q_proj", d, "attention.q_dhi"
    else:
        name, width, param = "q_b_proj", r, "attention.q_b_rhi"
        rows += linear(f"{at}q_a_proj", r, d, "attention.q_a_dr")
        norm = "attention.q_a_norm.scale_d"
        rows.append(vector(f"{at}q_a_layernorm.weight", r, norm))
    return rows + linear(at + name, h * net.query_dim, width, param, turn_queries)


def swiglu(net: Network, at: str, width: int) -> Rows:
    """Return the rows of a dense SwiGLU."""
    d = net.model.d_model
    return [
        *linear(f"{at}gate_proj", width, d, "dense.gate_df"),
        *linear(f"{at}up_proj", width, d, "dense.up_df"),
        *linear(f"{at}down_proj", d, width, "dense.down_fd"),
    ]


def router(net: Network, name: str) -> Row:
    """Return the row of the router."""
    shape = (net.moe.num_experts, net.model.d_model)
    return Row((name,), shape, ("moe.router_de",), (TRANSPOSE,))


def experts(
    net: Network,
    at: str = "mlp.experts.{}.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Rows:
    """Return the rows of experts that are tensors of their own."""
    d, f = net.model.d_model, net.moe.d_expert
    shapes = ((f, d), (f, d), (d, f))
    params = ("moe.gate_edf", "moe.up_edf", "moe.down_efd")
    numbers = range(net.moe.num_experts)
    return [
        Row(
            tuple(f"{at.format(e)}{name}.weight" for e in numbers),
            shape,
            (param,),
            STACK_TRANSPOSED,
        )
        for name, shape, param in zip(names, shapes, params)
    ]


def moe_with_shared(net: Network) -> Rows:
    """Return the rows of router, experts and shared experts of DeepSeek and others."""
    rows = [router(net, "mlp.gate.weight"), *experts(net)]
    if net.moe.num_shared_experts:
        rows += swiglu(net, "mlp.shared_experts.", net.moe.shared_width)
    return rows


def correction_bias(
    net: Network,
    at: str = "mlp.gate.",
    outer: tuple[int, ...] = (),
    steps: tuple[Step, ...] = (),
) -> Row:
    """Return the row of the bias that moves the choice of experts and not their gates.
    `outer` are dims of 1 before that of experts."""
    name, shape = f"{at}e_score_correction_bias", (*outer, net.moe.num_experts)
    return Row((name,), shape, ("moe.bias_e",), steps)
